"""The turn limits of Gymnasium around an environment, found from inside it.

`TimeLimit` shares its limit with nobody, and `gym.make` clears that of the spec; but `reset` and
`step` are called through every wrapper, so those with a limit are found among the callers.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

_found_before: ContextVar[tuple[TimeLimit, ...]] = ContextVar("found_before", default=())


def turn_limit_of(env: gym.Env[Any, Any]) -> int | None:
    """Return how many steps Gymnasium allows an episode of an environment; None for no limit."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, TimeLimit):
            return env._max_episode_steps
        env = env.env
    return None


def calling_limits(env: gym.Env[Any, Any], method: str) -> tuple[TimeLimit, ...]:
    """Return the wrappers through which `method` of `env` is being called."""
    found = list(_found_before.get())
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == method else None
        if isinstance(caller, TimeLimit):
            found.append(caller)
        frame = frame.f_back
    return tuple(limit for limit in found if limit.unwrapped is env)


@contextmanager
def limits_found(env: gym.Env[Any, Any], method: str) -> Iterator[None]:
    """Let `calling_limits` find the wrappers from another thread that copies this context."""
    token = _found_before.set(calling_limits(env, method))
    try:
        yield
    finally:
        _found_before.reset(token)
