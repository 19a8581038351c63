"""Environments whose `reset` and `step` are ``async``, for everything that expects plain ones."""

import inspect
from typing import Any

import gymnasium as gym

from agent_envs.core.async_bridge import resolve
from agent_envs.core.turn_limit import limits_found


class Awaited(gym.Wrapper[str, str, str, str]):
    """Waits for `reset` and `step`; they run in the one event loop of the process.

    So many environments wait at once, and may share clients that are bound to a loop. It belongs
    next to the environment, inside of all other wrappers.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        with limits_found(self.unwrapped, "reset"):
            answer: tuple[str, dict[str, Any]] = resolve(self.env.reset(seed=seed, options=options))
        return answer

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn."""
        with limits_found(self.unwrapped, "step"):
            answer: tuple[str, float, bool, bool, dict[str, Any]] = resolve(self.env.step(action))
        return answer


def awaited(env: gym.Env[str, str]) -> gym.Env[str, str]:
    """Put `Awaited` next to an environment that is ``async``, and return any other as it is.

    Wrappers, such as those of ``gym.make``, stay around it.
    """
    base = env.unwrapped
    if not any(inspect.iscoroutinefunction(method) for method in (base.reset, base.step)):
        return env
    inner = env
    while isinstance(inner, gym.Wrapper):
        if isinstance(inner, Awaited):
            return env
        if inner.env is base:
            inner.env = Awaited(base)
            return env
        inner = inner.env
    return Awaited(env)
