"""Find the turn limit that Gymnasium keeps around an environment."""

import inspect
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit


def find_turn_limit(env: gym.Env[Any, Any]) -> int | None:
    """Return the limit under which `env` is being reset; None without one.

    ``gym.make(..., max_episode_steps=N)`` and ``gymnasium.wrappers.TimeLimit`` keep it in a
    wrapper, out of the environment's sight. But a reset passes through every wrapper, so those with
    a limit are found among its callers.
    """
    limits = []
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "reset" else None
        if isinstance(caller, TimeLimit) and caller.unwrapped is env:
            limits.append(caller._max_episode_steps)
        frame = frame.f_back
    return min(limits, default=None)
