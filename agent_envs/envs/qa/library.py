"""What environments over the same rows share: tasks, the pages to read, and an index of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, FileStamp, Source
from agent_envs.retrieval import (
    Corpus,
    Page,
    RetrievalClient,
    Retriever,
    SavedIndex,
    build_retriever,
    load_passages,
)


@dataclass(frozen=True, slots=True)
class QARow:
    """A row of a data set, read."""

    task: Task
    pages: tuple[Page, ...] = ()


@dataclass(frozen=True, slots=True)
class Library:
    """The tasks of a data set, and what can be read to solve them."""

    tasks: tuple[Task, ...]
    """One per row."""
    corpus: Corpus
    """The passages of all rows and of the corpus files, each once."""
    pages: Mapping[str, tuple[Page, ...]]
    """The pages of each title; those of corpus files hold one sentence."""


@lru_cache(maxsize=8)
def load_library(
    dataset: DatasetSpec[QARow], source: Source, files: tuple[FileStamp, ...]
) -> Library:
    """Load tasks and pages, those of `files` too, once per process for the same sources.

    Raises:
        DataError: If a source is missing or malformed; names file, row and field.
    """
    rows = dataset.read_all(source)
    passages = [passage for stamp in files for passage in load_passages(stamp.path)]
    pages = dict.fromkeys(page for row in rows for page in row.pages)
    pages |= dict.fromkeys(Page(passage.title, (passage.text,)) for passage in passages)
    by_title: dict[str, tuple[Page, ...]] = {}
    for page in pages:
        known = by_title.get(page.title, ())
        if all(page.passage != other.passage for other in known):
            by_title[page.title] = (*known, page)
    return Library(
        tuple(row.task for row in rows), Corpus(page.passage for page in pages), by_title
    )


def is_url(name: str) -> bool:
    """Return whether the name of a retriever is the address of a server."""
    return name.startswith(("http://", "https://"))


@lru_cache(maxsize=8)
def load_index(
    dataset: DatasetSpec[QARow], source: Source, files: tuple[FileStamp, ...], backend: str
) -> Retriever:
    """Index the passages of a library, once per process, or open the index in a folder.

    Raises:
        DataError: If a folder holds none, or the server of a URL does not answer.
    """
    if is_url(backend):
        client = RetrievalClient(backend)
        client.check()
        return client
    if Path(backend).is_dir():
        return SavedIndex(backend)
    return build_retriever(load_library(dataset, source, files).corpus, backend)
