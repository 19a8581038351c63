"""The environment that a command line names."""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError


def environment_maker(env_id: str, kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes an environment; the id's ``module:`` may lie here.

    The function raises `ConfigurationError` if the environment does not take `kwargs`, or the
    module is not there.
    """
    see_modules_here()
    return functools.partial(_make, env_id, kwargs)


def see_modules_here() -> None:
    """Let modules of the working directory be imported: a script's path begins where it lies."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def count_tasks(make_env: Callable[[], Any]) -> int | None:
    """Return how many tasks an environment has; None where they are endless."""
    env = make_env()
    num_tasks: int | None = getattr(env.unwrapped, "num_tasks", None)
    env.close()
    return num_tasks


class Split(NamedTuple):
    """Which tasks are trained on, and which are played to measure it."""

    train: list[int] | None
    """None for all that there are."""
    eval: list[int]
    words: str
    """What the second are, for people."""


def hold_out(make_env: Callable[[], Any], count: int, seed: int) -> Split:
    """Keep tasks of one environment out of training, at most a fifth of them.

    Of an endless family they are the last of all: training draws from all at random.
    """
    return hold_out_of(count_tasks(make_env) if count else None, count, seed)


def hold_out_of(num_tasks: int | None, count: int, seed: int) -> Split:
    """Keep some of `num_tasks` tasks out of training, as `hold_out` does; None: endless."""
    if count == 0:
        return Split(None, [], "nothing")
    if num_tasks is None:
        return Split(None, list(range(ENDLESS - count, ENDLESS)), "tasks held out of training")
    count = min(count, num_tasks // 5)
    if count == 0:
        return Split(None, list(range(num_tasks)), "training tasks: there are too few to hold out")
    order = np.random.default_rng(seed).permutation(num_tasks)
    held_out, rest = sorted(order[:count].tolist()), sorted(order[count:].tolist())
    return Split(rest, held_out, f"{count} of {num_tasks} tasks, held out of training")


def first_tasks(make_env: Callable[[], Any], count: int) -> list[int]:
    """Return the first tasks of an environment, as many as asked for or as it has."""
    return list(range(min(count, count_tasks(make_env) or count)))


def _make(env_id: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return gym.make(env_id, **kwargs)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--env {env_id}: {error}") from error
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise ConfigurationError(f"--env_kwargs: {error}") from error
