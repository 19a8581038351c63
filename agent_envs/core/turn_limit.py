"""The turn limits of Gymnasium around an environment, found from inside it.

`TimeLimit` does not publish its limit, and `gym.make` clears that of the spec; but `reset` and
`step` are called through every wrapper, so those with a limit are found among the callers.
"""

import inspect
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit


def calling_limits(env: gym.Env[Any, Any], method: str) -> tuple[TimeLimit, ...]:
    """Return the wrappers through which `method` of `env` is being called."""
    found = list(getattr(env, "outer_limits", ()))  # an async environment runs in another thread
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == method else None
        if isinstance(caller, TimeLimit):
            found.append(caller)
        frame = frame.f_back
    return tuple(limit for limit in found if limit.unwrapped is env)
