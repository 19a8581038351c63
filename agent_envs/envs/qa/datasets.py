"""Question-answering data sets: one and several hops over passages of Wikipedia.

Tools, rewards, metrics and the end of an episode are those of `PassageQAEnv`. Bamboogle and the
data sets in Search-R1's row format have no passages: pass ``corpus=``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from agent_envs.core.tasks import Task
from agent_envs.data.sources import DatasetSpec, Source, field, file_source, text_field
from agent_envs.envs.qa import rows
from agent_envs.envs.qa.passages import PassageQAEnv, UnmarkedQAEnv
from agent_envs.retrieval import Passage
from agent_envs.scoring import Overlap, exact_match, set_match, set_overlap, squad_f1
from agent_envs.scoring.answers import two_wiki_evidence, two_wiki_facts
from agent_envs.tools.notebook import Note


class HotpotQAEnv(PassageQAEnv):
    """HotpotQA (Yang et al., 2018, arXiv 1809.09600) as an environment.

    Task: answer a question that needs two passages. Tools, rewards and metrics: see `PassageQAEnv`;
    metrics of citations are the official supporting-fact and joint scores.

    Version history: v0, first version.
    """

    dataset = rows.HOTPOTQA


class TwoWikiMultihopQAEnv(PassageQAEnv):
    """2WikiMultihopQA (Ho et al., 2020, arXiv 2011.01060) as an environment.

    Task: answer a question over two to four passages. Tools, rewards and metrics: see
    `PassageQAEnv`; notes written ``subject | relation | object`` are evidence, which the joint
    scores include. Facts, evidence and answers are scored by version 1.1 of the official script,
    with the aliases of ``aliases=``.

    Version history: v0, first version.
    """

    dataset = rows.TWO_WIKI

    def __init__(self, *, aliases: str | None = None, **rest: Any) -> None:
        """Load tasks and passages.

        Args:
            aliases: The official ``id_aliases.json``: other names of the entities in ``answer_id``
                and ``evidences_id``, which are right, too.
            rest: Arguments of `PassageQAEnv`.
        """
        self._aliases = aliases
        super().__init__(**rest)

    def load_tasks(self, source: Source) -> Sequence[Task]:
        tasks = super().load_tasks(source)
        if self._aliases is None:
            return tasks
        known = _load_aliases(file_source(self._aliases, has_lines=True))
        return [_with_aliases(task, known) for task in tasks]

    def score_citations(self, notes: Sequence[Note]) -> dict[str, tuple[Overlap, float]]:
        data = self.task.data
        facts = {note.fact for note in notes if note.fact is not None}
        triples = [note.triple for note in notes if note.triple is not None]
        gold = data.get("evidence_names") or [[[p] for p in triple] for triple in data["evidences"]]
        return {
            "supporting_fact": two_wiki_facts(facts, data["supporting_facts"]),
            "evidence": two_wiki_evidence(triples, gold),
        }


def _with_aliases(task: Task, known: Mapping[str, Sequence[str]]) -> Task:
    answers = dict.fromkeys((*task.answers, *known.get(task.data["answer_id"], ())))
    pairs = zip(task.data["evidences"], task.data["evidences_id"], strict=True)
    names = tuple(
        ((subject, *known.get(subject_id, ())), (relation,), (object_, *known.get(object_id, ())))
        for (subject, relation, object_), (subject_id, _, object_id) in pairs
    )
    return replace(task, answers=tuple(answers), data=task.data | {"evidence_names": names})


@lru_cache(maxsize=2)
def _load_aliases(file: Source) -> Mapping[str, tuple[str, ...]]:
    """Return other names by the id of a Wikidata entity."""
    return dict(_ALIASES.read_all(file))


def _read_aliases(row: Mapping[str, Any], _: int) -> tuple[str, tuple[str, ...]]:
    names = [*field(row, "aliases"), *field(row, "demonyms")]
    return text_field(row, "Q_id"), tuple(dict.fromkeys(map(str, names)))


_ALIASES: Final = DatasetSpec(
    read=_read_aliases, form="A row of aliases needs 'Q_id', 'aliases' and 'demonyms'."
)


class MuSiQueEnv(PassageQAEnv):
    """MuSiQue (Trivedi et al., 2022, arXiv 2108.00573) as an environment.

    Task: answer a question over two to four passages; aliases of the answer count. Tools, rewards
    and metrics: see `PassageQAEnv`; F1 is that of the official script. With the tool ``"note"``,
    ``support_em`` and ``support_f1`` compare the titles in notes with those of the supporting
    passages. With ``unanswerable=True``, ``sufficiency`` is 1 if the question was rightly answered
    or refused, and `agent_envs.scoring.musique_group_scores` computes the official scores of pairs.

    Version history: v0, first version.
    """

    dataset = rows.MUSIQUE
    f1_rule = staticmethod(squad_f1)

    def __init__(self, *, unanswerable: bool = False, **rest: Any) -> None:
        """Load tasks and passages.

        Args:
            unanswerable: Include questions whose passages lack the answer (MuSiQue-Full); the
                right answer to them is "unanswerable".
            rest: Arguments of `PassageQAEnv`.
        """
        self._has_unanswerable = unanswerable
        if unanswerable:
            self.dataset = rows.FULL_MUSIQUE
        super().__init__(**rest)

    def _full_prompt(self) -> str:
        hint = f" If the passages do not hold the answer, answer: {rows.UNANSWERABLE}."
        first, *rest = super()._full_prompt().split("\n")
        return "\n".join([first + hint * self._has_unanswerable, *rest])

    def passage_key(self, passage: Passage) -> str:
        return f"{passage.title}\n{passage.text}"  # titles are not unique here

    def metrics(self) -> dict[str, float]:
        measured = super().metrics()
        is_answerable = bool(self.task.data["is_answerable"])
        if self._has_unanswerable:
            is_refused = (
                self.answer is not None and exact_match(self.answer, rows.UNANSWERABLE) == 1.0
            )
            is_right = self.answer is not None and is_refused != is_answerable
            measured["sufficiency"] = float(is_right)
        if "note" in self.tools and is_answerable:
            cited = {note.title for note in self._notebook.notes.values() if note.title is not None}
            gold = {passage.title for passage in self._gold()}
            measured["support_em"] = set_match(cited, gold)
            measured["support_f1"] = set_overlap(cited, gold).f1
        return measured


class BamboogleEnv(UnmarkedQAEnv):
    """Bamboogle (Press et al., 2023, arXiv 2210.03350) as an environment.

    Task: answer a question of two hops. The data set has no passages: pass ``corpus=``. Tools,
    rewards and metrics: see `PassageQAEnv`.

    Version history: v0, first version.
    """

    dataset = rows.BAMBOOGLE


class NaturalQuestionsEnv(UnmarkedQAEnv):
    """Natural Questions, open (Kwiatkowski et al., 2019; Lee et al., 2019) as an environment.

    Task: answer a question to a search engine; any of the gold answers is right, by exact match as
    in Search-R1 (arXiv 2503.09516). There are no passages: pass ``corpus=``. Tools, rewards and
    metrics: see `PassageQAEnv`.

    Custom questions need no other environment: ``data=`` takes a file of rows such as
    ``{"question": "Who directed Red Harbor?", "golden_answers": ["Ada Holm"]}``, ``corpus=`` one of
    passages such as ``{"title": "Red Harbor", "text": "A film by Ada Holm."}``.

    Version history: v0, first version.
    """

    dataset = rows.NATURAL_QUESTIONS
    f1_rule = staticmethod(squad_f1)


class TriviaQAEnv(NaturalQuestionsEnv):
    """TriviaQA (Joshi et al., 2017, arXiv 1705.03551) as an environment.

    Task: answer a trivia question; any alias is right. Everything else: see `NaturalQuestionsEnv`.

    Version history: v0, first version.
    """

    dataset = rows.TRIVIA_QA


class PopQAEnv(NaturalQuestionsEnv):
    """PopQA (Mallen et al., 2023, arXiv 2212.10511) as an environment.

    Task: answer a question about an entity, often a rare one; any alias is right. Everything else:
    see `NaturalQuestionsEnv`.

    Version history: v0, first version.
    """

    dataset = rows.POP_QA
