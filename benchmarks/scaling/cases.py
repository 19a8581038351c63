"""What is measured: episodes of fixed shape, played and trained by the real trainer."""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym

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


CASES: Final = (
    Case(turns=2),
    Case(),
    Case(turns=8),
    Case(turns=16),
    Case(observation_tokens=8),
    Case(observation_tokens=96),
    Case(observation_tokens=64),
    Case(group_size=4),
    Case(group_size=16),
    Case(group_size=12, turns=6),
    Case(processes=2),
    Case(processes=2, turns=8),
    Case(processes=2, turns=16),
    Case(processes=2, group_size=16),
    Case(processes=2, observation_tokens=64),
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
