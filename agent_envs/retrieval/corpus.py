"""Passages, corpora, and the interface of search engines over them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from agent_envs.data.sources import DatasetSpec, field, file_source
from agent_envs.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text with a title, which is not unique."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A passage as separate sentences."""

    title: str
    sentences: tuple[str, ...]
    """Sentences in order; supporting facts refer to their numbers, from 0."""
    separator: str = " "
    """Text between sentences."""

    @property
    def passage(self) -> Passage:
        """The page as one text."""
        return Passage(self.title, self.separator.join(self.sentences).strip())


class Corpus:
    """Passages in a fixed order, each distinct one once."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        """Keep the first of equal passages."""
        self.passages: tuple[Passage, ...] = tuple(dict.fromkeys(passages))

    def __len__(self) -> int:
        return len(self.passages)


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result."""

    passage: Passage
    index: int
    """Its number in the corpus."""
    score: float
    """Relevance to the query; above 0, higher is better."""


class Retriever(Protocol):
    """Finds passages for a query."""

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` matching passages, 1 or more, best first, ties by number."""


def load_passages(path: str | Path) -> list[Passage]:
    """Read passages from rows with ``title`` and ``text``; see `read_records` for the files.

    Raises:
        DataError: If the file cannot be read, or a row lacks a field; names file, row and field.
    """
    return _ROWS.read_all(file_source(path))


def _read(row: Mapping[str, Any], _: int) -> Passage:
    for name in ("title", "text"):
        if not isinstance(field(row, name), str):
            raise DataError(f"field {name!r} must be a string, not {row[name]!r}.")
    return Passage(row["title"], row["text"])


_ROWS: Final = DatasetSpec(read=_read, form="A passage needs 'title' and 'text'.")
