"""Potential-based reward shaping, which keeps the optimal policies."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

Potential = Callable[[gym.Env[str, str]], float]
TERM = "shaping"


class PotentialShaping(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Adds ``gamma * potential(s') - potential(s)`` to each step's reward, as the term "shaping".

    With any potential the optimal policies stay the same (Ng, Harada and Russell, 1999, theorem 1):
    over an episode the discounted additions sum to ``-potential(s_0)``. A terminal state has
    potential 0; a truncated one keeps its potential, as it keeps its value.
    """

    def __init__(self, env: gym.Env[str, str], potential: Potential, gamma: float = 1.0) -> None:
        """Shape the rewards of `env`.

        Args:
            env: Any environment.
            potential: Value of the current state, given the unwrapped environment.
            gamma: Must be the discount of the training.
        """
        RecordConstructorArgs.__init__(self, potential=potential, gamma=gamma)
        super().__init__(env)
        self._potential, self._gamma = potential, gamma

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        # not kept from the last step: the state may have been restored
        before = float(self._potential(self.unwrapped))
        observation, reward, terminated, truncated, info = self.env.step(action)
        after = 0.0 if terminated else float(self._potential(self.unwrapped))
        bonus = self._gamma * after - before
        terms = info.get("reward_terms", {})
        info["reward_terms"] = terms | {TERM: terms.get(TERM, 0.0) + bonus}
        return observation, float(reward) + bonus, terminated, truncated, info


def found_gold(env: gym.Env[str, str]) -> float:
    """Return the share of gold passages found so far; 0 if they are unknown."""
    metrics: dict[str, float] = env.metrics()  # type: ignore[attr-defined]
    return metrics.get("gold_passage_recall", 0.0)
