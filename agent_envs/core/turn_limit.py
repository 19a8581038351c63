"""The turn limit that Gymnasium keeps around an environment, seen from inside of it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit


def turn_limit_of(env: gym.Env[Any, Any]) -> int | None:
    """Return how many steps Gymnasium allows an episode of an environment; None for no limit."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, TimeLimit):
            return env._max_episode_steps
        env = env.env
    return None


class TurnLimit:
    """Knows which step is the last one that Gymnasium allows.

    ``gym.make(..., max_episode_steps=N)`` and ``gymnasium.wrappers.TimeLimit`` count in a wrapper,
    out of the environment's sight. But `reset` and `step` pass through every wrapper, so those with
    a limit are found among their callers, or, where those wait in another thread, in what
    `hand_over` left.
    """

    def __init__(self, *, is_restored: bool = False) -> None:
        """Know no wrapper yet; `is_restored` if they have not counted the episode's turns."""
        self._wrappers: tuple[TimeLimit, ...] | None = None
        self._is_restored = is_restored

    @property
    def is_known(self) -> bool:
        """Whether the wrappers have been looked for since this was made."""
        return self._wrappers is not None

    @property
    def turns(self) -> int | None:
        """The smallest limit; None without one."""
        return min((w._max_episode_steps for w in self._wrappers or ()), default=None)

    def find(self, env: gym.Env[Any, Any]) -> None:
        """Find the wrappers through which `env` is being reset."""
        self._wrappers = tuple(_calling_limits(env, "reset"))

    def resume(self, env: gym.Env[Any, Any], num_turns: int) -> None:
        """Find those through which `env` takes a step, in an episode that began elsewhere.

        Those that have not counted its turns, of which there were `num_turns`, now have.
        """
        self._wrappers = tuple(_calling_limits(env, "step"))
        for wrapper in self._wrappers:
            if self._is_restored or wrapper._elapsed_steps is None:
                setattr(wrapper, "_elapsed_steps", num_turns)  # noqa: B010 - typed as None only

    def is_last(self) -> bool:
        """Return whether the step being taken is cut off."""
        return any(
            (wrapper._elapsed_steps or 0) + 1 >= wrapper._max_episode_steps
            for wrapper in self._wrappers or ()
        )


_handed_over: ContextVar[tuple[TimeLimit, ...]] = ContextVar("handed_over", default=())


@contextmanager
def hand_over(env: gym.Env[Any, Any], method: str) -> Iterator[None]:
    """Let `env` find the wrappers around it from another thread, which begins in this context."""
    token = _handed_over.set(tuple(_calling_limits(env, method)))
    try:
        yield
    finally:
        _handed_over.reset(token)


def _calling_limits(env: gym.Env[Any, Any], method: str) -> Iterator[TimeLimit]:
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == method else None
        if isinstance(caller, TimeLimit) and caller.unwrapped is env:
            yield caller
        frame = frame.f_back
    yield from (limit for limit in _handed_over.get() if limit.unwrapped is env)
