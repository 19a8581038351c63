"""An environment whose tool is sometimes slow, by the same draws on every side of a comparison."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_envs.core.tool import Tool
from agent_envs.envs.synthetic.multi_hop import SyntheticMultiHopEnv
from agent_envs.retrieval import Hit
from agent_envs.tools.search import make_search_tool

ENVIRONMENT: Final = "Benchmark/SlowSearch-v0"


@dataclass(slots=True, kw_only=True)
class ToolLatencies:
    """How long each call of each episode takes; most are fast, a few slow.

    One object per side: episodes are numbered as they begin, so both sides must begin as many in
    each round.
    """

    seed: int
    num_episodes: int
    """Episodes of a round."""
    num_calls: int
    """Calls of an episode that take time; those that follow take none."""
    fast_seconds: float
    slow_seconds: float
    slow_share: float
    is_off: bool = False
    """Whether no call takes any time, and no episode counts."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin_episode(self) -> int:
        """Return the number of the episode that begins."""
        return -1 if self.is_off else next(self._numbers)

    def seconds(self, episode: int, call: int) -> float:
        """Return how long a call takes."""
        if episode < 0 or call >= self.num_calls:
            return 0.0
        is_slow = np.random.default_rng([self.seed, episode, call]).random() < self.slow_share
        return self.slow_seconds if is_slow else self.fast_seconds

    def longest_episode(self, round_number: int) -> float:
        """Return the greatest sum of an episode's latencies in a round."""
        first = round_number * self.num_episodes
        return max(
            sum(self.seconds(episode, call) for call in range(self.num_calls))
            for episode in range(first, first + self.num_episodes)
        )


class SlowSearchEnv(SyntheticMultiHopEnv):
    """`SyntheticMultiHopEnv` with a search that takes its time."""

    def __init__(self, *, latencies: ToolLatencies, **shared: Any) -> None:
        """Take the latencies; the rest is the family's."""
        self._latencies = latencies
        # With a timeout, as any tool that may take long: without one it would count as immediate.
        search = Tool(make_search_tool(self, top_k=2).function, timeout=30.0)
        super().__init__(tools=[search], **shared)

    def begin_episode(self) -> None:
        """Take the next number."""
        super().begin_episode()
        self._number, self._num_calls = self._latencies.begin_episode(), 0

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Wait, then search."""
        seconds = self._latencies.seconds(self._number, self._num_calls)
        self._num_calls += 1
        if seconds:
            time.sleep(seconds)
        return super().search(query, top_k)


def register() -> None:
    """Make the environment known to Gymnasium."""
    if ENVIRONMENT not in gym.registry:
        gym.register(ENVIRONMENT, f"{__name__}:{SlowSearchEnv.__name__}")
