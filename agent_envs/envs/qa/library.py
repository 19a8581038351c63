"""What environments over the same rows share: tasks, the pages to read, and an index of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, FileStamp, Source
from agent_envs.retrieval import Corpus, Page, Retriever, build_retriever, load_passages


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
    """Load tasks and pages, once per process for the same source.

    Args:
        dataset: How rows are read.
        source: Where they are.
        files: Files of more passages.

    Raises:
        DataError: If a source is missing or malformed; names file, row and field.
    """
    tasks: list[Task] = []
    pages: dict[Page, None] = {}
    for row in dataset.read_all(source):
        tasks.append(row.task)
        pages |= dict.fromkeys(row.pages)
    for stamp in files:
        for passage in load_passages(stamp.path):
            pages[Page(passage.title, (passage.text,))] = None
    by_title: dict[str, tuple[Page, ...]] = {}
    for page in pages:
        known = by_title.get(page.title, ())
        if all(page.passage != other.passage for other in known):
            by_title[page.title] = (*known, page)
    return Library(tuple(tasks), Corpus(page.passage for page in pages), by_title)


@lru_cache(maxsize=8)
def load_index(
    dataset: DatasetSpec[QARow], source: Source, files: tuple[FileStamp, ...], backend: str
) -> Retriever:
    """Index the passages of a library, once per process; see `build_retriever`."""
    return build_retriever(load_library(dataset, source, files).corpus, backend)
