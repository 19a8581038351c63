"""Reward progress on the way without changing what is best to do."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

from agent_envs.errors import ConfigurationError

Potential = Callable[[gym.Env[str, str]], float]
TERM = "shaping"


class PotentialShaping(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Adds ``gamma * potential(s') - potential(s)`` to each step's reward, as the term "shaping".

    With any potential the optimal policies stay the same (Ng, Harada and Russell, 1999, theorem 1):
    over an episode the additions sum to ``-potential(s_0)``, discounted, whatever is done in
    between. For that a state that ends the task counts as 0; one in which the episode is only cut
    off keeps its potential, as it keeps its value.
    """

    def __init__(self, env: gym.Env[str, str], potential: Potential, gamma: float = 1.0) -> None:
        """Shape the rewards of `env`.

        Args:
            env: Any environment of this package.
            potential: How promising the current state is, given the unwrapped environment.
            gamma: The discount of the training; with another one the guarantee is lost.

        Raises:
            ConfigurationError: If `gamma` is not in [0, 1].
        """
        RecordConstructorArgs.__init__(self, potential=potential, gamma=gamma)
        super().__init__(env)
        if not 0.0 <= gamma <= 1.0:
            raise ConfigurationError(f"gamma must be in [0, 1], not {gamma}.")
        self._potential, self._gamma = potential, gamma

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn; see `ToolEnv.step`."""
        # Not kept from the last step: the state may have been restored since.
        before = float(self._potential(self.unwrapped))
        observation, reward, terminated, truncated, info = self.env.step(action)
        after = 0.0 if terminated else float(self._potential(self.unwrapped))
        bonus = self._gamma * after - before
        info["reward_terms"] = info.get("reward_terms", {}) | {TERM: bonus}
        return observation, float(reward) + bonus, terminated, truncated, info


def found_gold(env: gym.Env[str, str]) -> float:
    """Return the share of the gold passages found so far: a potential for question answering.

    It is 0 throughout for a question whose gold passages are not known.
    """
    metrics: dict[str, float] = env.metrics()  # type: ignore[attr-defined]
    return metrics.get("gold_passage_recall", 0.0)
