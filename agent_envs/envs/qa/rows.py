"""Rows of the question-answering data sets.

Each data set is read in all forms in use: the original release, the hub's, and copies with nested
lists as JSON strings.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, Hub, field, text_field
from agent_envs.errors import DataError
from agent_envs.retrieval import Page
from agent_envs.scoring.musique import UNANSWERABLE_SUFFIX

Value = TypeVar("Value")

UNANSWERABLE: Final = "unanswerable"
"""The right answer if the passages do not contain it (MuSiQue's full variant)."""


@dataclass(frozen=True, slots=True)
class QARow:
    """A row of a data set: a task and its passages."""

    task: Task
    pages: tuple[Page, ...] = ()


def _task(
    row: Mapping[str, Any], index: int, answers: Iterable[str] | None = None, **data: Any
) -> Task:
    return Task(
        id=str(row.get("id") or row.get("_id") or f"row-{index}"),
        question=text_field(row, "question"),
        answers=tuple(dict.fromkeys(answers or [text_field(row, "answer")])),
        data=data,
    )


def _read_two_wiki(row: Mapping[str, Any], index: int) -> QARow:
    read = _read_facts(row, index, separator=" ")
    evidences = _nested(row, "evidences", _triples)
    # ids of the entities; not in every copy
    ids = _nested(row, "evidences_id", _triples) if row.get("evidences_id") else ()
    if ids and len(ids) != len(evidences):
        raise DataError(f"field 'evidences_id' needs {len(evidences)} triples, like 'evidences'.")
    read.task.data.update(
        evidences=evidences,
        evidences_id=ids or (("", "", ""),) * len(evidences),
        answer_id=str(row.get("answer_id") or ""),
    )
    return read


def _read_facts(row: Mapping[str, Any], index: int, *, separator: str) -> QARow:
    pages = _nested(row, "context", functools.partial(_pages, separator=separator))
    facts = tuple(dict.fromkeys(_nested(row, "supporting_facts", _facts)))
    titles = dict.fromkeys(title for title, _ in facts)
    texts = {page.title: page.passage.text for page in pages}
    gold = tuple((title, texts.get(title, "")) for title in titles)
    kind = {"type": row.get("type"), "level": row.get("level")}
    return QARow(_task(row, index, gold=gold, supporting_facts=facts, **kind), pages)


def _read_musique(
    row: Mapping[str, Any], index: int, *, keep_unanswerable: bool = False
) -> QARow | None:
    is_answerable = row.get("answerable", True)
    if not isinstance(is_answerable, bool):
        raise DataError(f"field 'answerable' must be true or false, not {is_answerable!r}.")
    if not is_answerable and not keep_unanswerable:
        return None
    pages = _nested(row, "paragraphs", _paragraphs)
    aliases = _nested(row, "answer_aliases", _answers) if row.get("answer_aliases") else ()
    gold = [(page.title, page.passage.text) for page, is_supporting in pages if is_supporting]
    answers = [text_field(row, "answer"), *aliases] if is_answerable else [UNANSWERABLE]
    task = _task(row, index, answers, gold=tuple(dict.fromkeys(gold)))
    if not is_answerable:  # the rows of a pair share their id
        task = dataclasses.replace(task, id=task.id + UNANSWERABLE_SUFFIX)
    task.data["type"] = task.id.split("__")[0] if "__" in task.id else None
    task.data["is_answerable"] = is_answerable
    return QARow(task, tuple(page for page, _ in pages))


def _read_bamboogle(row: Mapping[str, Any], index: int) -> QARow:
    return QARow(_task({name.lower(): value for name, value in row.items()}, index))


def _search_r1(name: str, source: str) -> DatasetSpec[QARow]:
    """Return a data set in Search-R1's form; rows with another ``data_source`` are skipped."""

    def read(row: Mapping[str, Any], index: int) -> QARow | None:
        if str(row.get("data_source") or source).lower() != source:
            return None
        return QARow(_task(row, index, _golden_answers(row)))

    return DatasetSpec(
        hub=Hub(name=name, path="RUC-NLPIR/FlashRAG_datasets", configuration=source),
        read=read,
        form="A row in Search-R1's form needs 'question' and 'golden_answers'.",
    )


HOTPOTQA: Final = DatasetSpec(
    hub=Hub(
        name="HotpotQA", path="hotpotqa/hotpot_qa", configuration="distractor", split="validation",
        licence="CC BY-SA 4.0",
    ),
    read=functools.partial(_read_facts, separator=""),
    form="A HotpotQA row needs 'question', 'answer', 'context' and 'supporting_facts'.",
)  # fmt: skip
TWO_WIKI: Final = DatasetSpec(
    hub=Hub(
        name="2WikiMultihopQA", path="xanhho/2WikiMultihopQA", split="validation",
        licence="Apache-2.0",
    ),
    read=_read_two_wiki,
    form="A 2WikiMultihopQA row needs 'question', 'answer', 'context', 'supporting_facts' and "
    "'evidences'.",
)  # fmt: skip
MUSIQUE: Final = DatasetSpec(
    hub=Hub(name="MuSiQue", path="dgslibisey/MuSiQue", split="validation", licence="CC BY 4.0"),
    read=_read_musique,
    form="A MuSiQue row needs 'question', 'answer' and 'paragraphs' with 'title', 'paragraph_text' "
    "and 'is_supporting'.",
)
FULL_MUSIQUE: Final = dataclasses.replace(
    MUSIQUE, read=functools.partial(_read_musique, keep_unanswerable=True)
)
BAMBOOGLE: Final = DatasetSpec(
    hub=Hub(name="Bamboogle", path="chiayewken/bamboogle"),
    read=_read_bamboogle,
    form="A Bamboogle row needs 'Question' and 'Answer'.",
)
NATURAL_QUESTIONS: Final = _search_r1("Natural Questions", "nq")
TRIVIA_QA: Final = _search_r1("TriviaQA", "triviaqa")
POP_QA: Final = _search_r1("PopQA", "popqa")


def _golden_answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    answers = row.get("golden_answers")
    if answers is None:  # Search-R1's processed form
        with contextlib.suppress(KeyError, TypeError):
            answers = row["reward_model"]["ground_truth"]["target"]
    try:
        known = _answers([answers] if isinstance(answers, str) else answers or ())
    except TypeError as error:
        raise DataError(f"field 'golden_answers' is malformed ({error}).") from None
    if not known:
        raise DataError("field 'golden_answers' has no answer.")
    return known


def _answers(values: Any) -> tuple[str, ...]:
    return tuple(answer for answer in _strings(values) if answer.strip())


def _nested(row: Mapping[str, Any], name: str, read: Callable[[Any], Value]) -> Value:
    """Read a nested value, which may be a JSON string."""
    value = field(row, name)
    try:
        return read(json.loads(value) if isinstance(value, str) else value)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"field {name!r} is malformed ({reason}).") from None


def _pages(context: Any, separator: str) -> tuple[Page, ...]:
    if isinstance(context, Mapping):
        sentences = context["sentences"] if "sentences" in context else context["content"]
        context = zip(context["title"], sentences, strict=True)
    return tuple(Page(_text(title), _strings(lines), separator) for title, lines in context)


def _facts(facts: Any) -> list[tuple[str, int]]:
    if isinstance(facts, Mapping):
        facts = zip(facts["title"], facts["sent_id"], strict=True)
    return [(_text(title), int(str(sentence))) for title, sentence in facts]  # not 0.9


def _triples(evidences: Any) -> tuple[tuple[str, str, str], ...]:
    return tuple((str(s), str(relation), str(o)) for s, relation, o in evidences)


def _paragraphs(paragraphs: Any) -> list[tuple[Page, bool]]:
    if any(not isinstance(paragraph["is_supporting"], bool) for paragraph in paragraphs):
        raise TypeError("'is_supporting' must be true or false")
    return [
        (Page(_text(p["title"]), (_text(p["paragraph_text"]),)), p["is_supporting"])
        for p in paragraphs
    ]


def _strings(values: Any) -> tuple[str, ...]:
    if isinstance(values, str | Mapping):
        raise TypeError(f"must be a list of strings, not {values!r}")
    return tuple(map(_text, values))


def _text(value: Any) -> str:
    """Return a string, or a number as a string."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"must be a string, not {value!r}")
    return str(value)
