"""Async environments, for code that expects sync ones."""

import inspect
from typing import Any

import gymnasium as gym

from agent_envs.core.async_bridge import resolve
from agent_envs.core.turn_limit import calling_limits


class Awaited(gym.Wrapper[str, str, str, str]):
    """Awaits `reset` and `step` on the shared event loop; the innermost wrapper."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._find_limits("reset")
        return resolve(self.env.reset(seed=seed, options=options))  # type: ignore[no-any-return]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._find_limits("step")
        return resolve(self.env.step(action))  # type: ignore[no-any-return]

    def _find_limits(self, method: str) -> None:
        base: Any = self.unwrapped
        base.outer_limits = ()
        base.outer_limits = calling_limits(base, method)


def awaited(env: gym.Env[str, str]) -> gym.Env[str, str]:
    """Put `Awaited` inside all wrappers of an async environment; return any other unchanged."""
    base = env.unwrapped
    if not any(inspect.iscoroutinefunction(method) for method in (base.reset, base.step)):
        return env
    inner = env
    while isinstance(inner, gym.Wrapper) and inner.env is not base:
        inner = inner.env
    if inner is base:
        return Awaited(base)
    if not isinstance(inner, Awaited):
        inner.env = Awaited(base)  # type: ignore[attr-defined]
    return env
