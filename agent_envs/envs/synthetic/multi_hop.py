"""Multi-hop questions about procedural worlds, without a download."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Earnings, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ENDLESS, NewConversation
from agent_envs.envs.qa.retrieval import RetrievalQAEnv
from agent_envs.envs.synthetic import world as worlds
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval import Corpus, Hit, Passage, Retriever, build_retriever
from agent_envs.tools.search import make_search_tool

SPLITS: Final[Mapping[str, int]] = {"train": 0, "test": ENDLESS}
"""First world seed of each split of `ENDLESS` worlds."""


class SyntheticMultiHopEnv(RetrievalQAEnv):
    """A procedural world per task, and questions that hop through it.

    Task: answer a question about films, people, companies and cities of a world made from the
    task's number; or several questions, one after the other. Tool: ``search(query)`` over the about
    330 facts of that world, two at a time. Rewards: those of `RetrievalQAEnv` (exact match of each
    answer, and a share of 0.2 for each gold fact that a search finds first), and ``all_correct`` at
    the end. The episode ends with the last answer.

    ``AgentR1/SyntheticLongHorizon-v0`` asks three questions in a row, which take 9 turns.

    Version history: v0, first version.
    """

    reward_functions = {**RetrievalQAEnv.reward_functions, **noted_terms("all_correct")}
    outcome_terms = RetrievalQAEnv.outcome_terms | {"all_correct"}
    default_rewards = {"exact_match": 1.0, "new_gold_passage": 0.2}

    def __init__(
        self,
        *,
        split: str = "train",
        hops: int | Sequence[int] = 2,
        start: str | Sequence[str] = "film",
        variant: str | Sequence[str] = "default",
        top_k: int | Sequence[int] = 2,
        questions: int = 1,
        outdated: float = 0.0,
        **shared: Any,
    ) -> None:
        """Set up the family. Of arguments that are lists, each task draws one entry.

        Args:
            split: ``"train"`` or ``"test"``, which share no world.
            hops: Number of facts that lead to each answer, 1 to 4.
            start: Kind of thing from which questions start: ``"film"`` (up to 4 hops), ``"person"``
                (3), ``"company"`` (2), ``"city"`` (1) or, in ``relations``, ``"school"``; drawn
                among those with enough hops.
            variant: Phrasing of facts and questions: ``"default"``, ``"possessive"``,
                ``"clauses"``, ``"paraphrase"``, ``"relations"`` (other relations), or
                ``"injected"`` (prompt injections in search results, see
                `agent_envs.envs.qa.injection`; not in a list with others).
            top_k: Maximal number of facts per search.
            questions: Number of questions about one world, each in a separate conversation.
            outdated: Share of the worlds with an outdated version of each fact, 0 to 1.
            shared: Arguments of `ToolEnv`.
        """
        lengths, starts, variants = _several(hops), _several(start), _several(variant)
        shown = _several(top_k)
        if not lengths or not set(lengths) <= set(range(1, worlds.MAX_HOPS + 1)):
            raise ConfigurationError(f"hops must be 1 to {worlds.MAX_HOPS}, not {hops}.")
        least = {"top_k": min(shown, default=0), "questions": questions, "variant": len(variants)}
        for name, value in least.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}.")
        if not 0.0 <= outdated <= 1.0:
            raise ConfigurationError(f"outdated must be a share from 0 to 1, not {outdated}.")
        for kind in starts:
            lookup(worlds.STARTS, kind, kind="start")
        for name in variants:
            relations = lookup(worlds.VARIANTS, name, kind="variant")
            most = max((worlds.reach(relations, kind) for kind in starts), default=0)
            if max(lengths) > most:
                raise ConfigurationError(
                    f"start={list(starts)}: in variant {name!r} questions from there have at most "
                    f"{most} hops, not {max(lengths)}. Add 'film', or ask for fewer hops."
                )
        self.is_injected = "injected" in variants
        if self.is_injected and len(variants) > 1:
            raise ConfigurationError("variant 'injected' cannot be mixed with others.")
        self._first_seed = lookup(SPLITS, split, kind="split")
        self._family = _Family(variants, lengths, questions, float(outdated), shown, starts)
        self._split, self.num_questions = split, questions
        search = make_search_tool(self, top_k=max(shown), show=self.show_passage)
        super().__init__(default_tools=[search], **shared)

    @classmethod
    def earnings(cls, *, questions: int = 1, **_: Any) -> Mapping[str, Earnings]:
        """Return the bounds of the terms: an unsolved episode may have one wrong answer."""
        wrong = Earnings((1.0, 1.0), (0.0, 1.0 - 1.0 / questions))
        facts = Earnings((0.0, 1.0), (0.0, 1.0))
        return {**super().earnings(), "exact_match": wrong, "new_gold_passage": facts}

    def get_task(self, index: int) -> Task:
        world, questions, self.retriever, self._top_k = _episode(
            self._first_seed + index, self._family
        )
        gold = [world.passages[i].text for question in questions for i in question.gold]
        return Task(
            id=f"{self._family.label}-{self._split}-{index}",
            question=questions[0].text,
            answers=(questions[-1].answer,),
            data={"gold": tuple(dict.fromkeys(gold)), "questions": questions},
        )

    def on_restore(self) -> None:
        seed = self._first_seed + (self.task_index or 0)
        _, _, self.retriever, self._top_k = _episode(seed, self._family)

    def begin_episode(self) -> None:
        super().begin_episode()
        self._questions: tuple[worlds.Question, ...] = self.task.data["questions"]

    def expected_answers(self) -> Sequence[str]:
        return (self._questions[len(self._scores)].answer,)

    def on_answer(self, answer: str) -> NewConversation | None:
        super().on_answer(answer)
        self.noted["all_correct"] = self.metrics()["success"]
        if len(self._scores) == self.num_questions:
            return None
        return NewConversation(self._questions[len(self._scores)].text)

    def search(self, query: str, top_k: int) -> list[Hit]:
        return super().search(query, min(top_k, self._top_k))

    def gold_keys(self) -> tuple[str, ...]:
        gold: tuple[str, ...] = self.task.data["gold"]
        return gold

    def passage_key(self, passage: Passage) -> str:
        """Return the sentence, since facts share titles."""
        return passage.text

    def reference_actions(self) -> list[str]:
        actions = []
        for question in self.task.data["questions"]:
            actions += [self.write_call("search", query=query) for query in question.queries]
            actions.append(self.write_answer(question.answer))
        return actions


def _several(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, int | str) else tuple(given)


class _Family(NamedTuple):
    """Arguments of worlds and questions, besides the seed."""

    variants: tuple[str, ...]
    hops: tuple[int, ...]
    questions: int
    outdated: float
    top_k: tuple[int, ...]
    starts: tuple[str, ...]

    @property
    def label(self) -> str:
        """The family's part of a task's id: a digest if it is long, without `top_k`."""
        extras = f"-outdated{self.outdated:g}" if self.outdated else ""
        several = f"-{self.questions}q" if self.questions > 1 else ""
        hops = "or".join(map(str, self.hops))
        about = f"-{'or'.join(self.starts)}" if self.starts != ("film",) else ""
        label = f"synthetic-{'or'.join(self.variants)}-{hops}hop{about}{several}{extras}"
        digest = hashlib.blake2b(label.encode(), digest_size=4).hexdigest()
        return label if len(label) <= 25 else f"synthetic-{digest}"


@lru_cache(maxsize=256)  # a group of episodes shares a world
def _episode(
    seed: int, family: _Family
) -> tuple[worlds.World, tuple[worlds.Question, ...], Retriever, int]:
    rng = np.random.default_rng(seed)
    # a separate generator, so that mixtures do not change a world
    draws = np.random.default_rng([seed, len(family.hops)])
    hops = int(draws.choice(family.hops))
    is_outdated = bool(draws.random() < family.outdated)
    variant = str(draws.choice(family.variants))
    top_k = int(draws.choice(family.top_k))
    world = worlds.make_world(rng, variant=variant, outdated=is_outdated)
    starts = [
        kind for kind in family.starts if worlds.reach(worlds.VARIANTS[variant], kind) >= hops
    ]
    start = str(draws.choice(starts))
    questions = tuple(
        worlds.make_question(world, rng, hops=hops, start=start) for _ in range(family.questions)
    )
    return world, questions, build_retriever(Corpus(world.passages)), top_k
