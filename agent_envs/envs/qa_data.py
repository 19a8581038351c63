"""Load question-answering data sets: tasks, the passages to search, and the pages to read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_envs.core.records import read_records
from agent_envs.core.tasks import Task
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

    name: str
    hub_name: str
    hub_configuration: str | None
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
    stamps = tuple(_stamp(path) for path in corpus)
    if data is None:
        return _load_hub(dataset, split, stamps, backend)
    if isinstance(data, str | Path):
        return _load_file(dataset, _stamp(data), stamps, backend)
    return _build(dataset, f"dataset {split!r}", data, stamps, backend)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A file as it is now: a changed file is another key of the cache."""

    path: str
    size: int
    modified_ns: int


def _stamp(path: str | Path) -> _Stamp:
    try:
        status = Path(path).expanduser().stat()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Pass the path of an existing file."
        ) from None
    return _Stamp(str(Path(path).expanduser()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _load_file(
    dataset: QADataset, source: _Stamp, corpus: tuple[_Stamp, ...], backend: str
) -> QAData:
    return _build(dataset, source.path, read_records(source.path), corpus, backend)


@lru_cache(maxsize=8)
def _load_hub(dataset: QADataset, split: str, corpus: tuple[_Stamp, ...], backend: str) -> QAData:
    import datasets

    try:
        rows = datasets.load_dataset(dataset.hub_name, dataset.hub_configuration, split=split)
    except Exception as error:
        configuration = f"{dataset.hub_configuration}, " if dataset.hub_configuration else ""
        raise DataError(
            f"The hub's data set {dataset.hub_name} ({configuration}split {split!r}) could not be "
            f"loaded: {type(error).__name__}: {error}. Pass data= with a local file of "
            f"{dataset.name} rows (JSONL, JSON, Parquet; also .gz), or check the network and the "
            "split's name."
        ) from error
    return _build(dataset, f"{dataset.hub_name}:{split}", rows, corpus, backend)


def _build(
    dataset: QADataset,
    source: str,
    rows: "Iterable[Mapping[str, Any]] | datasets.Dataset",
    corpus: Sequence[_Stamp],
    backend: str,
) -> QAData:
    tasks: list[Task] = []
    pages: dict[Page, None] = {}
    for index, row in enumerate(rows):
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
