"""Questions that take several passages of Wikipedia: search, hop, answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent_envs.core.tasks import Task
from agent_envs.data.sources import FileStamp, Source
from agent_envs.envs.qa.passages import PassageQAEnv, UnmarkedQAEnv
from agent_envs.envs.qa.rows import (
    BAMBOOGLE,
    FULL_MUSIQUE,
    HOTPOTQA,
    MUSIQUE,
    TWO_WIKI,
    UNANSWERABLE,
)
from agent_envs.retrieval import Passage
from agent_envs.scoring import Overlap, exact_match, set_match, set_overlap, squad_f1
from agent_envs.scoring.two_wiki import GoldEvidence, load_aliases, score_evidence, score_facts
from agent_envs.tools.notebook import Note


class HotpotQAEnv(PassageQAEnv):
    """HotpotQA (Yang et al., 2018, arXiv 1809.09600) as an environment.

    Task: answer a question whose answer takes two passages. Tools, rewards and metrics: see
    `PassageQAEnv`; metrics of citations are the official supporting-fact and joint scores. The
    episode ends with an answer, or at the turn limit (5 turns unless ``max_episode_steps=`` says
    otherwise). Hub: ``hotpotqa/hotpot_qa``, distractor setting.

    Version history: v0, first version.
    """

    dataset = HOTPOTQA


class TwoWikiMultihopQAEnv(PassageQAEnv):
    """2WikiMultihopQA (Ho et al., 2020, arXiv 2011.01060) as an environment.

    Task: answer a question over two to four passages. Tools, rewards and metrics: see
    `PassageQAEnv`; notes written ``subject | relation | object`` are the evidence, which the joint
    scores include. Facts, evidence and answers are scored by version 1.1 of the official script,
    with aliases where ``aliases=`` has them. The episode ends with an answer, or at the turn limit
    (6 turns unless ``max_episode_steps=`` says otherwise). Hub: ``xanhho/2WikiMultihopQA``.

    Version history: v0, first version.
    """

    dataset = TWO_WIKI

    def __init__(self, *, aliases: str | None = None, **rest: Any) -> None:
        """Load tasks and passages.

        Args:
            aliases: The official ``id_aliases.json``: other names of the entities that the rows
                name in ``answer_id`` and ``evidences_id``, which count as right too.
            rest: See `PassageQAEnv`.

        Raises:
            DataError: If a source is missing or malformed; names file, row and field.
        """
        self._aliases = aliases
        super().__init__(**rest)

    def load_tasks(self, source: Source) -> Sequence[Task]:
        """Return the tasks of a source, with their aliases."""
        tasks = super().load_tasks(source)
        if self._aliases is None:
            return tasks
        stamp = FileStamp.of(self._aliases)
        known = load_aliases(stamp.path, stamp.size, stamp.modified_ns)
        return [
            replace(
                task,
                answers=tuple(
                    dict.fromkeys((*task.answers, *known.get(task.data["answer_id"], ())))
                ),
                data=task.data
                | {
                    "evidence_aliases": tuple(
                        (known.get(subject, ()), known.get(object, ()))
                        for subject, _, object in task.data["evidences_id"]
                    )
                },
            )
            for task in tasks
        ]

    def score_citations(self, notes: Sequence[Note]) -> dict[str, tuple[Overlap, float]]:
        """Return overlap and exact match of facts and evidence, as version 1.1 of the script."""
        data = self.task.data
        facts = {note.fact for note in notes if note.fact is not None}
        triples = [note.triple for note in notes if note.triple is not None]
        aliases = data.get("evidence_aliases") or ((),) * len(data["evidences"])
        gold = [
            GoldEvidence(t, *names) for t, names in zip(data["evidences"], aliases, strict=True)
        ]
        return {
            "supporting_fact": score_facts(facts, data["supporting_facts"]),
            "evidence": score_evidence(triples, gold),
        }


class MuSiQueEnv(PassageQAEnv):
    """MuSiQue (Trivedi et al., 2022, arXiv 2108.00573) as an environment.

    Task: answer a question over two to four passages; aliases of the answer count. Tools, rewards
    and metrics: see `PassageQAEnv`; F1 is that of the official script. With the tool ``"note"``,
    ``support_em`` and ``support_f1`` compare the titles that notes name with those of the
    supporting passages. With ``unanswerable=True``, ``sufficiency`` says whether the question was
    rightly answered or refused, and `agent_envs.scoring.musique_group_scores` makes the official
    scores of pairs out of all episodes. The episode ends with an answer, or at the turn limit (6
    turns unless ``max_episode_steps=`` says otherwise). Hub: ``dgslibisey/MuSiQue``.

    Version history: v0, first version.
    """

    dataset = MUSIQUE
    f1_rule = staticmethod(squad_f1)

    def __init__(self, *, unanswerable: bool = False, **rest: Any) -> None:
        """Load tasks and passages.

        Args:
            unanswerable: Play questions too whose passages do not hold the answer (MuSiQue-Full);
                the right answer to them is "unanswerable".
            rest: See `PassageQAEnv`.
        """
        self._plays_unanswerable = unanswerable
        if unanswerable:
            self.dataset = FULL_MUSIQUE
        super().__init__(**rest)

    def _full_prompt(self) -> str:
        hint = f" If the passages do not hold the answer, answer: {UNANSWERABLE}."
        first, *rest = super()._full_prompt().split("\n")
        return "\n".join([first + hint * self._plays_unanswerable, *rest])

    def passage_key(self, passage: Passage) -> str:
        """Return title and text: titles are not unique here."""
        return f"{passage.title}\n{passage.text}"

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now."""
        measured = super().metrics()
        is_answerable = bool(self.task.data["is_answerable"])
        if self._plays_unanswerable:
            is_refused = self.answer is not None and exact_match(self.answer, UNANSWERABLE) == 1.0
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
    rewards and metrics: see `PassageQAEnv`. The episode ends with an answer, or at the turn limit
    (5 turns unless ``max_episode_steps=`` says otherwise). Hub: ``chiayewken/bamboogle``.

    Version history: v0, first version.
    """

    dataset = BAMBOOGLE
