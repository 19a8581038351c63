"""Multi-hop questions about a procedural world: endless, small, and without a download."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ENDLESS
from agent_envs.envs.retrieval_qa import RetrievalQAEnv
from agent_envs.envs.synthetic_world import (
    MAX_HOPS,
    VARIANTS,
    Question,
    World,
    make_question,
    make_world,
)
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval import Corpus, Hit, Passage, Retriever, build_retriever
from agent_envs.tools.search import make_search_tool

SPLITS: Final[Mapping[str, int]] = {"train": 0, "test": ENDLESS}
"""First world seed of each split; each has `ENDLESS` worlds, and no world is in both."""


class SyntheticMultiHopEnv(RetrievalQAEnv):
    """A procedural world per task, and a question that hops through it.

    Task: answer a question about films, people, companies and cities of a world made from the
    task's number. Tool: ``search(query)`` over the about 330 facts of that world, two at a time.
    Reward: exact match at the end, and a share of 0.2 for each fact on the way that a search finds
    first (see `RetrievalQAEnv`). The episode ends with an answer, or at the turn limit (4 turns
    unless ``max_episode_steps=`` says otherwise; more than 3 hops need more).

    Version history: v0, first version.
    """

    default_rewards: ClassVar[Mapping[str, float]] = {"exact_match": 1.0, "new_gold_passage": 0.2}

    def __init__(
        self,
        *,
        split: str = "train",
        hops: int = 2,
        variant: str = "default",
        top_k: int = 2,
        **shared: Any,
    ) -> None:
        """Set up the family.

        Args:
            split: ``"train"`` or ``"test"``: worlds of one are never in the other.
            hops: How many facts lead to the answer, 1 to 4.
            variant: ``"default"``, ``"paraphrase"`` (other phrasings), or ``"relations"`` (other
                relations); the embedded policy was made on the first only.
            top_k: How many facts a search returns at most.
            shared: What every tool environment takes; see `ToolEnv`.

        Raises:
            UnknownNameError: If a split or variant is unknown.
            ConfigurationError: If an argument is out of range.
        """
        if not 1 <= hops <= MAX_HOPS:
            raise ConfigurationError(f"hops must be 1 to {MAX_HOPS}, not {hops}.")
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        self._first_seed = lookup(SPLITS, split, kind="split")
        lookup(VARIANTS, variant, kind="variant")
        self._split, self._hops, self._variant = split, hops, variant
        super().__init__(default_tools=[make_search_tool(self, top_k=top_k)], **shared)

    @property
    def num_tasks(self) -> None:
        """Endless."""
        return

    def get_task(self, index: int) -> Task:
        """Make world `index` of the split, and its question."""
        world, question, self._retriever = _episode(
            self._first_seed + index, self._variant, self._hops
        )
        return Task(
            id=f"synthetic-{self._variant}-{self._hops}hop-{self._split}-{index}",
            question=question.text,
            answers=(question.answer,),
            data={
                "gold": tuple(world.passages[i].text for i in question.gold),
                "queries": question.queries,
            },
        )

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Search the current world."""
        return self._retriever.search(query, top_k)

    def gold_keys(self) -> tuple[str, ...]:
        """Return the sentences of the facts on the way to the answer."""
        gold: tuple[str, ...] = self.task.data["gold"]
        return gold

    def passage_key(self, passage: Passage) -> str:
        """Return the sentence: several facts share a title."""
        return passage.text

    def reference_actions(self) -> list[str]:
        """Search for each fact in the order of the hops, then answer."""
        searches = [self.write_call("search", query=query) for query in self.task.data["queries"]]
        return [*searches, self.write_answer(self.task.answers[0])]


@lru_cache(maxsize=256)  # the members of a group play the same world
def _episode(seed: int, variant: str, hops: int) -> tuple[World, Question, Retriever]:
    rng = np.random.default_rng(seed)
    world = make_world(rng, variant=variant)
    question = make_question(world, rng, hops=hops)
    return world, question, build_retriever(Corpus(world.passages))
