"""Load question-answering data sets: tasks, the passages to search, and the pages to read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_envs.core.tasks import Task
from agent_envs.data.sources import FileStamp, Hub, Source, find_source
from agent_envs.errors import DataError
from agent_envs.retrieval import Corpus, Page, Retriever, build_retriever, load_passages

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class QARow:
    """A row of a data set, read."""

    task: Task
    pages: tuple[Page, ...] = ()


@dataclass(frozen=True, slots=True)
class QADataset:
    """A public data set and how its rows are read."""

    hub: Hub
    read: Callable[[Mapping[str, Any], str, int], QARow | None]
    """Takes a row, its place for error messages, and its number from 0; returns None for a row to
    leave out.

    Raises:
        DataError: If the row is malformed; names place and field.
    """
    form: str
    """What a row must look like, in a sentence."""


@dataclass(frozen=True, slots=True)
class QAData:
    """What environments over the same source share."""

    tasks: tuple[Task, ...]
    """One per row."""
    retriever: Retriever
    """Over the passages of all rows and of the corpus files, each passage once."""
    pages: Mapping[str, tuple[Page, ...]]
    """The pages of each title; those of corpus files hold one sentence."""


def load_qa(
    dataset: QADataset,
    data: "str | Path | datasets.Dataset | None",
    split: str,
    corpus: Sequence[str],
    backend: str,
) -> QAData:
    """Load tasks and passages, once per process for the same source.

    Args:
        dataset: Which data set.
        data: A file, a ``datasets.Dataset``, or None for the hub's data set.
        split: The split of the hub's data set.
        corpus: Files of more passages.
        backend: The search engine; see `build_retriever`.

    Raises:
        DataError: If a source is missing or malformed; names file, row and field.
    """
    return _load(
        dataset,
        find_source(data, split, dataset.hub),
        tuple(FileStamp.of(path) for path in corpus),
        backend,
    )


@lru_cache(maxsize=8)
def _load(
    dataset: QADataset, source: Source, corpus: tuple[FileStamp, ...], backend: str
) -> QAData:
    tasks: list[Task] = []
    pages: dict[Page, None] = {}
    for index, row in enumerate(source.rows()):
        if (read := dataset.read(row, f"{source}, row {index + 1}", index)) is not None:
            tasks.append(read.task)
            pages |= dict.fromkeys(read.pages)
    if not tasks:
        raise DataError(f"{source}: there are no rows to play. {dataset.form}")
    for stamp in corpus:
        for passage in load_passages(stamp.path):
            pages[Page(passage.title, (passage.text,))] = None
    by_title: dict[str, tuple[Page, ...]] = {}
    for page in pages:
        known = by_title.get(page.title, ())
        if all(page.passage != other.passage for other in known):
            by_title[page.title] = (*known, page)
    retriever = build_retriever(Corpus(page.passage for page in pages), backend)
    return QAData(tuple(tasks), retriever, by_title)
