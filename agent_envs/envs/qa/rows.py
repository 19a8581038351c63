"""How the rows of each question-answering data set are read.

Every data set is read in the forms that are in use: the original release's, the hub's, and copies
that hold nested lists as JSON strings.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, Hub
from agent_envs.envs.qa.library import QARow
from agent_envs.errors import DataError
from agent_envs.retrieval import Page

UNANSWERABLE: Final = "unanswerable"
"""What to answer where the passages do not hold the answer (MuSiQue's full variant)."""

_HOTPOTQA_FORM: Final = (
    "A HotpotQA row needs 'question', 'answer', 'context' and 'supporting_facts', in the form of "
    "the hub's hotpotqa/hotpot_qa or of the original release."
)
_TWO_WIKI_FORM: Final = (
    "A 2WikiMultihopQA row needs 'question', 'answer', 'context', 'supporting_facts' and "
    "'evidences', as nested lists (the original release) or as JSON strings of them."
)
_MUSIQUE_FORM: Final = (
    "A MuSiQue row needs 'question', 'answer' and 'paragraphs' with 'title', 'paragraph_text' and "
    "'is_supporting'."
)
_BAMBOOGLE_FORM: Final = "A Bamboogle row needs 'Question' and 'Answer'."
_SEARCH_R1_FORM: Final = (
    "A row in Search-R1's form needs 'question' and 'golden_answers', or the answers in "
    "'reward_model' under 'ground_truth' and 'target'."
)


def _read_hotpotqa(row: Mapping[str, Any], place: str, index: int) -> QARow:
    return _read_facts(row, place, index, form=_HOTPOTQA_FORM, separator="")


def _read_two_wiki(row: Mapping[str, Any], place: str, index: int) -> QARow:
    read = _read_facts(row, place, index, form=_TWO_WIKI_FORM, separator=" ")
    evidences = _nested(row, "evidences", place, _TWO_WIKI_FORM)
    try:
        triples = tuple((str(s), str(relation), str(o)) for s, relation, o in evidences)
    except (TypeError, ValueError) as error:
        raise _malformed(place, "evidences", error, _TWO_WIKI_FORM) from None
    read.task.data["evidences"] = triples
    return read


def _read_facts(
    row: Mapping[str, Any], place: str, index: int, *, form: str, separator: str
) -> QARow:
    pages = tuple(_pages(row, place, form, separator))
    facts = tuple(dict.fromkeys(_supporting_facts(row, place, form)))
    titles = dict.fromkeys(title for title, _ in facts)
    texts = {page.title: page.passage.text for page in pages}
    return QARow(
        Task(
            id=str(row.get("id") or row.get("_id") or f"row-{index}"),
            question=_text(row, "question", place, form),
            answers=(_text(row, "answer", place, form),),
            data={
                "gold": tuple((title, texts.get(title, "")) for title in titles),
                "supporting_facts": facts,
                "type": row.get("type"),
                "level": row.get("level"),
            },
        ),
        pages,
    )


def _read_musique(
    row: Mapping[str, Any], place: str, index: int, *, keep_unanswerable: bool
) -> QARow | None:
    is_answerable = bool(row.get("answerable", True))
    if not is_answerable and not keep_unanswerable:
        return None
    paragraphs = _nested(row, "paragraphs", place, _MUSIQUE_FORM)
    try:
        pages = [(Page(p["title"], (p["paragraph_text"],)), p["is_supporting"]) for p in paragraphs]
        aliases = tuple(map(str, row.get("answer_aliases") or ()))
    except (KeyError, TypeError) as error:
        raise _malformed(place, "paragraphs", error, _MUSIQUE_FORM) from None
    task_id = str(row.get("id") or f"row-{index}")
    answers = (_text(row, "answer", place, _MUSIQUE_FORM), *aliases)
    gold = [(page.title, page.passage.text) for page, is_supporting in pages if is_supporting]
    return QARow(
        Task(
            id=task_id,
            question=_text(row, "question", place, _MUSIQUE_FORM),
            answers=tuple(dict.fromkeys(answers)) if is_answerable else (UNANSWERABLE,),
            data={
                "gold": tuple(dict.fromkeys(gold)),
                "type": task_id.split("__")[0] if "__" in task_id else None,
                "is_answerable": is_answerable,
            },
        ),
        tuple(page for page, _ in pages),
    )


def _read_answerable_musique(row: Mapping[str, Any], place: str, index: int) -> QARow | None:
    return _read_musique(row, place, index, keep_unanswerable=False)


def _read_full_musique(row: Mapping[str, Any], place: str, index: int) -> QARow | None:
    return _read_musique(row, place, index, keep_unanswerable=True)


def _read_bamboogle(row: Mapping[str, Any], place: str, index: int) -> QARow:
    row = {name.lower(): value for name, value in row.items()}
    return QARow(
        Task(
            id=str(row.get("id") or f"row-{index}"),
            question=_text(row, "question", place, _BAMBOOGLE_FORM),
            answers=(_text(row, "answer", place, _BAMBOOGLE_FORM),),
        )
    )


def _search_r1(name: str, hub_configuration: str, sources: tuple[str, ...]) -> DatasetSpec[QARow]:
    """Return a data set in Search-R1's form.

    Args:
        name: Its name.
        hub_configuration: Its part of the hub's collection.
        sources: What rows of a mixed file have as ``data_source``; the others are left out.
    """

    def read(row: Mapping[str, Any], place: str, index: int) -> QARow | None:
        source = row.get("data_source")
        if source is not None and str(source).lower() not in sources:
            return None
        return QARow(
            Task(
                id=str(row.get("id") or f"row-{index}"),
                question=_text(row, "question", place, _SEARCH_R1_FORM),
                answers=_golden_answers(row, place),
            )
        )

    hub = Hub(name=name, path="RUC-NLPIR/FlashRAG_datasets", configuration=hub_configuration)
    return DatasetSpec(hub=hub, read=read, form=_SEARCH_R1_FORM)


HOTPOTQA: Final = DatasetSpec(
    hub=Hub(
        name="HotpotQA",
        path="hotpotqa/hotpot_qa",
        configuration="distractor",
        split="validation",
        licence="CC BY-SA 4.0",
    ),
    read=_read_hotpotqa,
    form=_HOTPOTQA_FORM,
)
TWO_WIKI: Final = DatasetSpec(
    hub=Hub(
        name="2WikiMultihopQA",
        path="xanhho/2WikiMultihopQA",
        split="validation",
        licence="Apache-2.0",
    ),
    read=_read_two_wiki,
    form=_TWO_WIKI_FORM,
)
MUSIQUE: Final = DatasetSpec(
    hub=Hub(name="MuSiQue", path="dgslibisey/MuSiQue", split="validation", licence="CC BY 4.0"),
    read=_read_answerable_musique,
    form=_MUSIQUE_FORM,
)
FULL_MUSIQUE: Final = dataclasses.replace(MUSIQUE, read=_read_full_musique)
BAMBOOGLE: Final = DatasetSpec(
    hub=Hub(name="Bamboogle", path="chiayewken/bamboogle"),
    read=_read_bamboogle,
    form=_BAMBOOGLE_FORM,
)
NATURAL_QUESTIONS: Final = _search_r1("Natural Questions", "nq", ("nq",))
TRIVIA_QA: Final = _search_r1("TriviaQA", "triviaqa", ("triviaqa",))
POP_QA: Final = _search_r1("PopQA", "popqa", ("popqa",))


def _golden_answers(row: Mapping[str, Any], place: str) -> tuple[str, ...]:
    answers = row.get("golden_answers")
    if answers is None:
        try:
            answers = row["reward_model"]["ground_truth"]["target"]
        except (KeyError, TypeError):
            found = ", ".join(row) or "nothing"
            raise DataError(
                f"{place}: field 'golden_answers' is missing (found: {found}). {_SEARCH_R1_FORM}"
            ) from None
    answers = (answers,) if isinstance(answers, str) else tuple(map(str, answers))
    if not any(answer.strip() for answer in answers):
        raise DataError(f"{place}: field 'golden_answers' holds no answer. {_SEARCH_R1_FORM}")
    return tuple(dict.fromkeys(answer for answer in answers if answer.strip()))


def _text(row: Mapping[str, Any], field: str, place: str, form: str) -> str:
    value = _field(row, field, place, form)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: field {field!r} must be a non-empty string, not {value!r}.")
    return value


def _field(row: Mapping[str, Any], field: str, place: str, form: str) -> Any:
    if field not in row or row[field] is None:
        found = ", ".join(row) or "nothing"
        raise DataError(f"{place}: field {field!r} is missing (found: {found}). {form}")
    return row[field]


def _nested(row: Mapping[str, Any], field: str, place: str, form: str) -> Any:
    """Return a nested value, also where a copy holds it as a JSON string."""
    value = _field(row, field, place, form)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _malformed(place, field, error, form) from None


def _pages(row: Mapping[str, Any], place: str, form: str, separator: str) -> Iterator[Page]:
    context = _nested(row, "context", place, form)
    try:
        if isinstance(context, Mapping):
            sentences = context["sentences"] if "sentences" in context else context["content"]
            pairs = list(zip(context["title"], sentences, strict=True))
        else:
            pairs = [(title, sentences) for title, sentences in context]
        for title, sentences in pairs:
            if isinstance(sentences, str):
                raise TypeError("sentences must be a list of strings")
            yield Page(str(title), tuple(map(str, sentences)), separator)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(place, "context", error, form) from None


def _supporting_facts(row: Mapping[str, Any], place: str, form: str) -> list[tuple[str, int]]:
    facts = _nested(row, "supporting_facts", place, form)
    try:
        if isinstance(facts, Mapping):
            facts = list(zip(facts["title"], facts["sent_id"], strict=True))
        return [(str(title), int(sentence)) for title, sentence in facts]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(place, "supporting_facts", error, form) from None


def _malformed(place: str, field: str, error: Exception, form: str) -> DataError:
    return DataError(
        f"{place}: field {field!r} is malformed ({type(error).__name__}: {error}). {form}"
    )
