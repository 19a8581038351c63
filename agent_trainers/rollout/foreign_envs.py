"""What a rollout has to know of environments that others wrote."""

from typing import Any, Final

import gymnasium as gym

KNOWN_WRAPPERS: Final = ("gymnasium.", "agent_envs.")


class UnmadeEnv(gym.Env[str, str]):
    """Stands in for an environment that could not be made; its first reset says why."""

    def __init__(self, error: Exception) -> None:
        """Keep the error."""
        self._error = error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Raise what making the environment raised."""
        raise self._error


def is_immediate(env: gym.Env[str, str]) -> bool:
    """Return whether an environment only computes, so that it needs no thread and no deadline.

    It says so itself, but cannot speak for a wrapper around it that waits for something; a wrapper
    that only computes says so with an attribute ``is_immediate`` of its class.
    """
    while isinstance(env, gym.Wrapper):
        only_computes = vars(type(env)).get("is_immediate", False)
        if not (only_computes or type(env).__module__.startswith(KNOWN_WRAPPERS)):
            return False
        env = env.env
    return bool(getattr(env, "is_immediate", False))
