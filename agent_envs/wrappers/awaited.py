"""Async environments, for code that expects sync ones."""

import inspect
from typing import Any

import gymnasium as gym

from agent_envs.core.async_bridge import resolve
from agent_envs.core.turn_limit import limits_found


class Awaited(gym.Wrapper[str, str, str, str]):
    """Awaits `reset` and `step` on the shared event loop; the innermost wrapper."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        with limits_found(self.unwrapped, "reset"):
            result: tuple[str, dict[str, Any]] = resolve(self.env.reset(seed=seed, options=options))
        return result

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn."""
        with limits_found(self.unwrapped, "step"):
            result: tuple[str, float, bool, bool, dict[str, Any]] = resolve(self.env.step(action))
        return result


def awaited(env: gym.Env[str, str]) -> gym.Env[str, str]:
    """Put `Awaited` inside all wrappers of an async environment; return any other unchanged."""
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
    return Awaited(base)
