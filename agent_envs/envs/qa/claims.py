"""Claims made of facts of 2WikiMultihopQA and HotpotQA, and of their contradictions."""

import re
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from agent_envs.core.rewards import COST, PROGRESS, extra_call_term, final_metric
from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, Source, file_source
from agent_envs.envs.qa import rows
from agent_envs.envs.qa.passages import PassageQAEnv, load_library
from agent_envs.envs.qa.retrieval import RetrievalQAEnv
from agent_envs.scoring import Overlap, normalize_answer, set_match, set_overlap
from agent_envs.tools.notebook import Note
from agent_envs.tools.pages import folded

SUPPORTED: Final = "supported"
REFUTED: Final = "refuted"
_NOUNS: Final = {"educated at": "alma mater", "award received": "award", "has part": "part"}
_OPPOSITES: Final = {"yes": "no", "no": "yes"}
_ASKED: Final = re.compile(r"\b(?:who(?:se)?|when|where|why|how \w+|(?:what|which) \w+)\b", re.I)
MAX_CANDIDATES: Final = 200


CLAIMS: Final = DatasetSpec(
    hub=rows.TWO_WIKI.hub,
    read=lambda row, n: (rows.TWO_WIKI if row.get("evidences") else rows.HOTPOTQA).read(row, n),
    form="A row has the form of 2WikiMultihopQA or of HotpotQA: 'question', 'answer', 'context' "
    "and 'supporting_facts', and the former also 'evidences'.",
)


class Statement(NamedTuple):
    """A true claim. Its object can be replaced by one of the same kind, the narrowest kind first.

    `key` identifies the object under any of its names, where the data have ids.
    """

    before: str
    object: str
    after: str
    kinds: tuple[Hashable, ...]
    key: str = ""


class ClaimVerificationEnv(PassageQAEnv):
    """Claims to verify: made of facts of 2WikiMultihopQA and HotpotQA, and of contradictions.

    Task: search for evidence, cite the passages that decide about the claim, and answer "supported"
    or "refuted". A row gives two claims, about its chain of facts ("The date of birth of the
    director of Red Harbor is 1970.") or about its answer. In the false one the object is another
    of the same kind, which the gold passages do not mention, or the other entity of a comparison.

    Tools: those of `PassageQAEnv`. ``note`` with the title of a passage cites it, and ``drop_note``
    withdraws it. A gold passage counts once a search of the episode has shown it.

    Reward terms: ``joint_em`` (verdict and cited passages are exactly right; success),
    ``exact_match`` (the verdict) and ``citation_f1`` at the end (outcome), ``extra_call`` (-1 for a
    call beyond those that find and cite each gold passage, ten times at most; process), and those
    of `RetrievalQAEnv`: a hybrid of result, evidence and efficiency. It ends with an answer.

    Version history: v0, first version.
    """

    dataset = CLAIMS
    tool_signatures = ("search(query)", "note(text, title, sentence)", "drop_note(number)")
    default_system_prompt = (
        "Verify the claim. Search for evidence, one fact after the other, and cite each passage "
        "that decides about the claim in a note with its title. Then answer with one word: "
        f"{SUPPORTED} if the passages confirm the claim, or {REFUTED}."
    )
    reward_functions = {
        **RetrievalQAEnv.reward_functions, "extra_call": extra_call_term,
        **{name: final_metric(name) for name in ("citation_f1", "joint_em")},
    }  # fmt: skip
    outcome_terms = RetrievalQAEnv.outcome_terms | {"citation_f1", "joint_em"}
    term_earnings = {  # a right verdict, or citations, earn their part without the other
        **PassageQAEnv.term_earnings, "exact_match": PROGRESS, "citation_f1": PROGRESS,
        "extra_call": COST,
    }  # fmt: skip
    default_rewards = {
        "joint_em": 1.0, "exact_match": 0.2, "citation_f1": 0.2, "new_gold_passage": 0.1,
        **dict.fromkeys(("format", "repeated_query", "extra_call"), 0.02),
    }  # fmt: skip
    metric_names = (
        *PassageQAEnv.metric_names, "citation_em", "citation_f1", "joint_em", "joint_f1"
    )  # fmt: skip

    def __init__(self, *, tools: Sequence[Any] | None = None, **rest: Any) -> None:
        """Load claims and passages; `tools` are in addition to ``"note"``."""
        more = [tool for tool in tools or () if tool != "note"]
        super().__init__(tools=["note", *more], **rest)

    @property
    def num_free_calls(self) -> int:
        return 2 * len(self.gold_keys())

    def load_tasks(self, source: Source) -> Sequence[Task]:
        super().load_tasks(source)
        return _load_claims(self.dataset, source, tuple(map(file_source, self._corpus)))

    def score_citations(self, notes: Sequence[Note]) -> dict[str, tuple[Overlap, float]]:
        unseen = set(map(folded, set(self.gold_keys()) - self._found))
        cited = {folded(note.title) for note in notes if note.title is not None} - unseen
        gold = set(map(folded, self.gold_keys()))
        return {"citation": (set_overlap(cited, gold), set_match(cited, gold))}

    def metrics(self) -> dict[str, float]:
        measured = super().metrics()
        return measured | {"success": measured["joint_em"]}

    def reference_actions(self) -> list[str]:
        """Search and cite each gold passage, and give the verdict."""
        actions = []
        for passage in self._gold():
            actions += [
                self.write_call("search", query=self._query_for(passage)),
                self.write_call("note", text="Evidence.", title=passage.title),
            ]
        return [*actions, self.write_answer(self.task.answers[0])]


@lru_cache(maxsize=8)
def _load_claims(
    dataset: DatasetSpec[rows.QARow], source: Source, files: tuple[Source, ...]
) -> tuple[Task, ...]:
    return tuple(make_claims(load_library(dataset, source, files).tasks))


def make_claims(tasks: Sequence[Task]) -> Iterator[Task]:
    """Yield a true claim, and a contradiction if there is one, in an order drawn by the id."""
    statements = [state(task) for task in tasks]
    pools: dict[Hashable, list[Statement]] = {}
    for statement in statements:
        for kind in statement.kinds:
            pools.setdefault(kind, []).append(statement)
    for task, statement in zip(tasks, statements, strict=True):
        rng = np.random.default_rng(zlib.crc32(task.id.encode()))
        tried = (contradict(statement, task, pools[kind], rng) for kind in statement.kinds)
        other = next(filter(None, tried), None)
        claims = [(SUPPORTED, statement.object), *([(REFUTED, other)] if other else [])]
        if rng.random() < 0.5:
            claims.reverse()
        for number, (verdict, text) in enumerate(claims, start=1):
            yield replace(
                task,
                id=f"{task.id}-{number}",
                question=f"Claim: {statement.before}{text}{statement.after}",
                answers=(verdict,),
            )


def state(task: Task) -> Statement:
    """Return what a row says, as a claim: its chain of facts, or else its answer."""
    facts = task.data.get("evidences", ())
    if facts and all(first[2] == second[0] for first, second in pairwise(facts)):
        relations = [_NOUNS.get(relation, relation) for _, relation, _ in reversed(facts)]
        before = f"The {' of the '.join(relations)} of {facts[0][0]} is "
        _, relation, object = facts[-1]
        return Statement(before, object, ".", (relation,), task.data["evidences_id"][-1][2])
    question = " ".join(task.question.split())
    answer = _as_in(question, task.answers[0])
    asked = _ASKED.search(question)
    is_number, words = any(map(str.isdigit, answer)), asked[0].casefold().split() if asked else [""]
    kinds = (*words, is_number), (words[0], is_number, answer[:1].isupper()), is_number
    return Statement(f'The answer to "{question}" is "', answer, '".', kinds)


def contradict(
    statement: Statement, task: Task, pool: Sequence[Statement], rng: np.random.Generator
) -> str | None:
    """Return an object that makes a claim false, or None."""
    true = normalize_answer(statement.object)
    if true in _OPPOSITES:
        return _OPPOSITES[true]
    question = f" {normalize_answer(task.question)} "
    names = [title.partition(" (")[0] for title, _ in task.data["gold"]]
    compared = [name for name in names if f" {normalize_answer(name)} " in question]
    if true in map(normalize_answer, compared):
        others = [name for name in compared if normalize_answer(name) != true]
        return _as_in(task.question, str(rng.choice(others))) if others else None
    passages = f" {normalize_answer(' '.join(text for _, text in task.data['gold']))} "
    first, words = int(rng.integers(len(pool))), {*true.split()}
    for number in range(min(len(pool), MAX_CANDIDATES)):
        other = pool[(first + number) % len(pool)]
        text = normalize_answer(other.object)
        is_same = statement.key != "" and other.key == statement.key
        is_near = {*text.split()} <= words or {*text.split()} >= words
        if text not in _OPPOSITES and not (is_same or is_near or f" {text} " in passages):
            return other.object
    return None


def _as_in(question: str, name: str) -> str:
    """Return a name as a question spells it, lest the spelling tell the verdict."""
    found = re.search(re.escape(name), question, re.IGNORECASE)
    return found[0] if found else name
