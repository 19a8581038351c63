"""Actions as numbers, for libraries whose policies write no text.

With `TokenObservation` both sides are arrays, as Stable-Baselines3 and CleanRL need them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import RecordConstructorArgs

from agent_envs.errors import ConfigurationError

Menu = Callable[[dict[str, Any]], Sequence[str]]
Mask = npt.NDArray[np.int8]

NO_CHOICE = ""
"""The action of a number without a text: a mistake, to which the environment replies."""


class MenuActions(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Makes the index of a text in a menu the action.

    ``info["menu"]`` holds the texts and ``info["action_mask"]``, shape (size,), int8, the valid
    indices; `action_masks` returns the mask as booleans, for sb3-contrib's MaskablePPO. An invalid
    index is an empty action.
    """

    def __init__(self, env: gym.Env[Any, str], menu: Sequence[str] | Menu, *, size: int) -> None:
        """Wrap `env`.

        Args:
            env: An environment whose actions are text.
            menu: The texts, or a function of the state's `info` that returns them.
            size: The number of actions; texts beyond it are left out.
        """
        RecordConstructorArgs.__init__(self, menu=menu, size=size)
        super().__init__(env)
        self._menu, self._size = menu, size
        self._choices: list[str] = []
        self.action_space = gym.spaces.Discrete(size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see `ToolEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._offer(info)

    def step(self, action: np.int64) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take the turn with index `action`."""
        if not isinstance(action, int | np.integer) or not 0 <= action < self._size:
            raise ConfigurationError(f"An action is 0 to {self._size - 1}, not {action!r}.")
        text = self._choices[int(action)] if int(action) < len(self._choices) else NO_CHOICE
        observation, reward, terminated, truncated, info = self.env.step(text)
        return observation, reward, terminated, truncated, self._offer(info)

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return the valid indices of this state, shape (size,)."""
        return np.arange(self._size) < len(self._choices)

    def _offer(self, info: dict[str, Any]) -> dict[str, Any]:
        choices = self._menu(info) if callable(self._menu) else self._menu
        self._choices = list(choices)[: self._size]
        mask: Mask = self.action_masks().astype(np.int8)
        return info | {"menu": list(self._choices), "action_mask": mask}
