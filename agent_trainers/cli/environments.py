"""The environment that a command line names."""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.errors import ConfigurationError


def environment_maker(env_id: str, kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an environment; the id's ``module:`` may lie here.

    The function raises `ConfigurationError` if the environment does not take `kwargs`, or the
    module is not there.
    """
    if (here := str(Path.cwd())) not in sys.path:  # a script's path begins where the script lies
        sys.path.append(here)
    return functools.partial(_make, env_id, kwargs)


def first_tasks(make_env: Callable[[], Any], count: int) -> list[int]:
    """Return the first tasks of an environment, as many as asked for or as it has."""
    env = make_env()
    limit = getattr(env.unwrapped, "num_tasks", None)
    env.close()
    return list(range(min(count, limit or count)))


def _make(env_id: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return gym.make(env_id, **kwargs)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--env {env_id}: {error}") from error
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise ConfigurationError(f"--env_kwargs: {error}") from error
