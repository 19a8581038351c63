"""Passages, collections of them, and what every search engine over them offers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_envs.data.records import read_records
from agent_envs.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text with a title."""

    title: str
    """Names the passage; not unique."""
    text: str
    """What it says."""


@dataclass(frozen=True, slots=True)
class Page:
    """A passage with its sentences told apart."""

    title: str
    """Names the page; not unique."""
    sentences: tuple[str, ...]
    """In order; supporting facts name them by number, from 0."""
    separator: str = " "
    """What stands between sentences."""

    @property
    def passage(self) -> Passage:
        """The page as it is searched."""
        return Passage(self.title, self.separator.join(self.sentences).strip())


class Corpus:
    """Passages in a fixed order, each distinct one once."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        """Keep the first of equal passages."""
        self.passages: tuple[Passage, ...] = tuple(dict.fromkeys(passages))

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self.passages)


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found."""

    passage: Passage
    """What was found."""
    index: int
    """Its number in the corpus."""
    score: float
    """How well it fits the query; above 0, higher is better."""


class Retriever(Protocol):
    """Finds passages for a query."""

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first, ties by number; none that do not fit.

        Raises:
            ConfigurationError: If `top_k` is less than 1.
        """


def search_many(retriever: Retriever, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
    """Search for each of `queries`; at once where `retriever` has a ``search_many`` of its own."""
    together = getattr(retriever, "search_many", None)
    if together is not None:
        found: list[list[Hit]] = together(queries, top_k)
        return found
    return [retriever.search(query, top_k) for query in queries]


def load_passages(path: str | Path) -> list[Passage]:
    """Read passages from rows with ``title`` and ``text``; see `read_records` for the files.

    Raises:
        DataError: If the file cannot be read, or a row lacks a field; names file, row and field.
    """
    passages = []
    for number, record in enumerate(read_records(path), start=1):
        for field in ("title", "text"):
            if not isinstance(record.get(field), str):
                found = ", ".join(record) or "nothing"
                raise DataError(
                    f"{path}, row {number}: field {field!r} is missing or no string (found: "
                    f"{found}). A passage needs 'title' and 'text'."
                )
        passages.append(Passage(record["title"], record["text"]))
    return passages
