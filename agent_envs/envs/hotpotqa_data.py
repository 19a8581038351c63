"""Read HotpotQA rows: tasks, and the passages to search.

Two shapes are read: the hub's (``context = {"title": […], "sentences": [[…]]}``) and the original
release's (``context = [[title, [sentence, …]], …]``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_envs.core.records import read_records
from agent_envs.core.tasks import Task
from agent_envs.errors import DataError
from agent_envs.retrieval import Corpus, Passage, Retriever, build_retriever, load_passages

if TYPE_CHECKING:
    import datasets

HUB_NAME: Final = "hotpotqa/hotpot_qa"
HUB_CONFIGURATION: Final = "distractor"
FORM_TEXT: Final = (
    "A HotpotQA row needs 'question', 'answer', 'context' and 'supporting_facts', in the form of "
    "the hub's hotpotqa/hotpot_qa or of the original release."
)


@dataclass(frozen=True, slots=True)
class HotpotQAData:
    """What environments over the same source share."""

    tasks: tuple[Task, ...]
    """One per row."""
    retriever: Retriever
    """Over the passages of all rows and of the corpus files."""


def load_hotpotqa(
    data: "str | Path | datasets.Dataset | None",
    split: str,
    corpus: Sequence[str],
    backend: str,
) -> HotpotQAData:
    """Load tasks and passages, once per process for the same source.

    Args:
        data: A file, a ``datasets.Dataset``, or None for the hub's data set.
        split: The split of the hub's data set.
        corpus: Files of more passages.
        backend: The search engine; see `build_retriever`.

    Raises:
        DataError: If a source is missing or malformed; names file, row and field.
    """
    stamps = tuple(_stamp(path) for path in corpus)
    if data is None:
        return _load_hub(split, stamps, backend)
    if isinstance(data, str | Path):
        return _load_file(_stamp(data), stamps, backend)
    return _build(f"dataset {split!r}", data, stamps, backend)


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
def _load_file(source: _Stamp, corpus: tuple[_Stamp, ...], backend: str) -> HotpotQAData:
    return _build(source.path, read_records(source.path), corpus, backend)


@lru_cache(maxsize=8)
def _load_hub(split: str, corpus: tuple[_Stamp, ...], backend: str) -> HotpotQAData:
    import datasets

    try:
        rows = datasets.load_dataset(HUB_NAME, HUB_CONFIGURATION, split=split)
    except Exception as error:
        raise DataError(
            f"The hub's data set {HUB_NAME} ({HUB_CONFIGURATION}, split {split!r}) could not be "
            f"loaded: {type(error).__name__}: {error}. Pass data= with a local file of HotpotQA "
            "rows (JSONL, JSON, Parquet; also .gz), or check the network and the split's name."
        ) from error
    return _build(f"{HUB_NAME}:{split}", rows, corpus, backend)


def _build(
    source: str, rows: "Sequence[Mapping[str, Any]] | datasets.Dataset", corpus: Any, backend: str
) -> HotpotQAData:
    tasks: list[Task] = []
    passages: list[Passage] = []
    for number, row in enumerate(rows, start=1):
        place = f"{source}, row {number}"
        paragraphs = dict(_paragraphs(row, place))
        passages.extend(Passage(title, text) for title, text in paragraphs.items())
        tasks.append(_task(row, paragraphs, number - 1, place))
    if not tasks:
        raise DataError(f"{source}: there are no rows. {FORM_TEXT}")
    for stamp in corpus:
        passages.extend(load_passages(stamp.path))
    return HotpotQAData(tuple(tasks), build_retriever(Corpus(passages), backend))


def _task(row: Mapping[str, Any], paragraphs: Mapping[str, str], index: int, place: str) -> Task:
    gold = tuple(dict.fromkeys(_supporting_titles(row, place)))
    return Task(
        id=str(row.get("id") or row.get("_id") or f"row-{index}"),
        question=_text(row, "question", place),
        answers=(_text(row, "answer", place),),
        data={
            "gold_titles": gold,
            "gold_texts": {title: paragraphs.get(title, "") for title in gold},
            "type": row.get("type"),
            "level": row.get("level"),
        },
    )


def _text(row: Mapping[str, Any], field: str, place: str) -> str:
    value = _field(row, field, place)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: field {field!r} must be a non-empty string, not {value!r}.")
    return value


def _field(row: Mapping[str, Any], field: str, place: str) -> Any:
    if field not in row or row[field] is None:
        found = ", ".join(row) or "nothing"
        raise DataError(f"{place}: field {field!r} is missing (found: {found}). {FORM_TEXT}")
    return row[field]


def _paragraphs(row: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    context = _field(row, "context", place)
    try:
        if isinstance(context, Mapping):
            pairs = list(zip(context["title"], context["sentences"], strict=True))
        else:
            pairs = [(title, sentences) for title, sentences in context]
        for title, sentences in pairs:
            yield str(title), "".join(sentences).strip()
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{place}: field 'context' is malformed ({type(error).__name__}: {error}). {FORM_TEXT}"
        ) from None


def _supporting_titles(row: Mapping[str, Any], place: str) -> list[str]:
    facts = _field(row, "supporting_facts", place)
    try:
        if isinstance(facts, Mapping):
            return [str(title) for title in facts["title"]]
        return [str(title) for title, _ in facts]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{place}: field 'supporting_facts' is malformed ({type(error).__name__}: {error}). "
            f"{FORM_TEXT}"
        ) from None
