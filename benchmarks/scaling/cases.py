"""What is measured: episodes of fixed shape, played and trained by the real trainer."""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_envs.core.spaces import UnicodeText

PROMPT_WORDS: Final = 40
NUM_GROUPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The shape of one optimiser step."""

    processes: int = 1
    """Processes that share the batch."""
    turns: int = 4
    """Turns of every episode."""
    observation_tokens: int = 32
    """About this many tokens come back from the environment after each turn."""
    action_tokens: int = 8
    """Tokens that the policy writes in each turn."""
    group_size: int = 8
    """Episodes of a group."""
    is_held_out: bool = False
    """Whether the case is left out of the fit, to check it."""

    @property
    def episodes_per_process(self) -> float:
        """Episodes that each process plays in an optimiser step."""
        return NUM_GROUPS * self.group_size / self.processes


CASES: Final = (
    Case(turns=2),
    Case(),
    Case(turns=8, is_held_out=True),
    Case(turns=16),
    Case(observation_tokens=8),
    Case(observation_tokens=96),
    Case(observation_tokens=64, is_held_out=True),
    Case(group_size=4),
    Case(group_size=16),
    Case(group_size=12, turns=6, is_held_out=True),
    Case(processes=2),
    Case(processes=2, turns=8, is_held_out=True),
    Case(processes=2, turns=16),
    Case(processes=2, group_size=16),
    Case(processes=2, observation_tokens=64, is_held_out=True),
)


class FixedShape(gym.Env[str, str]):
    """An environment that only costs tokens: it answers with words and ends after so many turns."""

    def __init__(self, case: Case) -> None:
        """Give every episode the shape of `case`."""
        self.observation_space = self.action_space = UnicodeText()
        self._case = case
        self._messages: list[dict[str, str]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        question = self._words(PROMPT_WORDS)
        self._messages = [{"role": "user", "content": question}]
        return question, self._info({}, {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take any action; the reward is some number of it."""
        observation = self._words(self._case.observation_tokens)
        self._messages = [
            *self._messages,
            {"role": "assistant", "content": action},
            {"role": "user", "content": observation},
        ]
        digest = hashlib.sha256(action.encode("utf-8", "surrogatepass")).digest()
        terms = {"digest": digest[0] / 255}
        is_over = len(self._messages) // 2 >= self._case.turns
        return observation, terms["digest"], is_over, False, self._info(terms, {"success": 0.0})

    def _info(self, terms: dict[str, float], metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "messages": self._messages,
            "tools": [],
            "task_id": "fixed",
            "reward_terms": terms,
            "metrics": metrics,
        }

    def _words(self, count: int) -> str:
        words = ("academy", "award", "born", "bridge", "city", "company", "country", "director")
        return " ".join(words[i] for i in self.np_random.integers(len(words), size=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process does in one optimiser step of a case: the variables of the model."""

    episodes: float
    """Episodes it plays."""
    turns: float
    """Turns of each."""
    waves: float
    """Tokens that are sampled one after the other: turns times tokens of an action."""
    sampled: float
    """Tokens sampled in all episodes."""
    read: float
    """Tokens of all states that were not sampled: read once, then kept from turn to turn."""
    attended: float
    """Tokens looked back at while sampling, summed over sampled tokens."""
    trained: float
    """Tokens of all merged rows."""
    squared: float
    """Squared lengths of all merged rows, summed: attention in training."""
    processes: float
    """Processes in all."""


def work_of(
    *, episodes: float, turns: int, prompt: float, action: float, observation: float, processes: int
) -> Work:
    """Count the work of episodes whose states grow by an action and an observation a turn."""
    states = prompt + (action + observation) * np.arange(turns)  # (S,)
    length = float(states[-1] + action)
    return Work(
        episodes=episodes,
        turns=turns,
        waves=turns * action,
        sampled=episodes * turns * action,
        read=episodes * (length - turns * action),
        attended=episodes * action * float((states + action / 2).sum()),
        trained=episodes * length,
        squared=episodes * length**2,
        processes=processes,
    )


def case_work(case: Case) -> Work:
    """Count the work of a measured case; the chat template adds a few tokens a turn."""
    template = 8
    return work_of(
        episodes=case.episodes_per_process,
        turns=case.turns,
        prompt=PROMPT_WORDS + template,
        action=case.action_tokens,
        observation=case.observation_tokens + template,
        processes=case.processes,
    )
