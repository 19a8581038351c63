"""Environments that wait for their next episode, and those that could not be made."""

import logging
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from agent_envs.errors import AgentEnvsError, ServerError
from agent_envs.wrappers.awaited import awaited
from agent_trainers.rollout.episode import TextEnv

_log = logging.getLogger(__name__)


class EnvPool:
    """Makes environments as they are needed, and keeps them for later episodes."""

    def __init__(self, make_env: Callable[[], TextEnv]) -> None:
        """Make environments with `make_env`."""
        self._make_env = make_env
        self._idle: list[TextEnv] = []

    def take(self) -> TextEnv:
        """Return an environment that nobody plays in.

        Raises:
            AgentEnvsError: If none can be made, as settings or data are wrong. What else making
                one raises is raised by its first reset.
        """
        if self._idle:
            return self._idle.pop()
        try:
            env = self._make_env()
            if not isinstance(env, gym.Env):
                raise TypeError(
                    f"make_env returned a {type(env).__name__}; it must return a Gymnasium "
                    "environment."
                )
            return awaited(env)
        except ServerError as error:
            return _UnmadeEnv(error)  # servers of environments come back
        except AgentEnvsError:
            raise  # wrong settings or data: no episode would ever work
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; it is recorded
            return _UnmadeEnv(error)

    def give_back(self, env: TextEnv) -> None:
        """Keep an environment for the next episode; one that could not be made is made anew."""
        if not isinstance(env, _UnmadeEnv):
            self._idle.append(env)

    def close(self) -> None:
        """Close the environments that wait."""
        for env in self._idle:
            try:
                env.close()
            except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
                _log.warning("An environment failed to close.", exc_info=True)
        self._idle.clear()


class _UnmadeEnv(gym.Env[str, str]):
    """Stands in for an environment that could not be made; its first reset says why."""

    def __init__(self, error: BaseException) -> None:
        """Keep the error."""
        self._error = error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Raise what making the environment raised."""
        raise self._error
