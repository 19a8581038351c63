"""Tell an environment the turn limit that Gymnasium puts around it."""

from typing import Any

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import TimeLimit


class KnownTurnLimit(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Lets rewards that come at the end also come where the turn limit is the end.

    ``gym.make(..., max_episode_steps=N)`` sets the limit in a wrapper, out of the environment's
    sight. Every registered id has this wrapper around that one; it changes nothing else.
    """

    def __init__(self, env: gym.Env[str, str]) -> None:
        """Find the `TimeLimit` around `env` and tell the environment."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        layer: Any = env
        while isinstance(layer, gym.Wrapper):
            if isinstance(layer, TimeLimit):
                layer.unwrapped.max_turns = layer._max_episode_steps  # type: ignore[attr-defined]
                return
            layer = layer.env
