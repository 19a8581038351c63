"""Environments named on a command line: made with clear errors, and their tasks split."""

import difflib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.async_bridge import resolve
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.rollout.environments import read_reset

NUM_STATES: Final = 4
"""Number of resets that `inspect_environment` takes."""


def environment_maker(
    env_id: str, kwargs: Mapping[str, Any], option: str = "--env_kwargs"
) -> Callable[[], Any]:
    """Return a function that makes an environment and takes further keyword arguments.

    The ``module:`` part of `env_id` may be in the working directory. Errors about `kwargs` name
    `option`.
    """
    maker: Any = functools.partial(_make, env_id, kwargs, option)
    maker.__name__ = env_id  # curriculum levels are named after it
    return cast(Callable[[], Any], maker)


def _make(env_id: str, kwargs: Mapping[str, Any], option: str, **others: Any) -> Any:
    add_working_directory()
    try:
        return gym.make(env_id, **{**kwargs, **others})
    except gym.error.Error as error:
        raise ConfigurationError(f"--env {env_id}: {error}") from error
    except AgentEnvsError:
        raise
    except Exception as error:  # user code
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise ConfigurationError(_unknown_argument(env_id, str(error), option)) from error
        raise _user_error(env_id, "cannot be made", error) from error


def _unknown_argument(env_id: str, text: str, option: str) -> str:
    """Return the message for an unknown keyword argument, with the closest known one."""
    name = text.partition("unexpected keyword argument ")[2].split()[0].strip("'\".")
    known: list[str] = []
    spec = gym.registry.get(env_id.rpartition(":")[2])
    entry_point = None if spec is None else spec.entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    for kind in getattr(creator, "__mro__", ())[:-1]:
        known += inspect.signature(kind.__init__).parameters
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{option}: unexpected keyword argument {name!r} for {env_id}.{hint}"


def _user_error(env_id: str, what: str, error: Exception) -> ConfigurationError:
    """Return an error of one line with the file and line of the user's code that failed."""
    origin = error.__context__ or error  # Gymnasium wraps some errors
    frames = traceback.extract_tb(origin.__traceback__)
    ours = (str(Path(gym.__file__).parent), str(Path(__file__).parent.parent), "<frozen")
    places = [(frame.filename, frame.lineno) for frame in frames]
    places = [place for place in places if not place[0].startswith(ours)]
    if isinstance(error, SyntaxError):
        places = [(str(error.filename), error.lineno)]
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    reason = " ".join(traceback.format_exception_only(error)[-1].split())
    return ConfigurationError(f"--env {env_id}: {what}: {reason}{where}")


class EnvironmentFacts(NamedTuple):
    """First states of an environment, and its number of tasks."""

    states: list[dict[str, Any]]
    """`info` of its first resets."""
    num_tasks: int | None
    """Number of tasks; None if endless."""


def inspect_environment(make_env: Callable[[], Any], env_id: str) -> EnvironmentFacts:
    """Make an environment, reset it a few times, and close it.

    Raises:
        ConfigurationError: If a reset fails or returns no state.
    """
    env = make_env()
    try:
        states = [read_reset(resolve(env.reset(seed=seed))) for seed in range(NUM_STATES)]
        return EnvironmentFacts(states, getattr(env.unwrapped, "num_tasks", None))
    except AgentEnvsError:
        raise
    except Exception as error:  # user code
        raise _user_error(env_id, "cannot be reset", error) from error
    finally:
        env.close()


def add_working_directory() -> None:
    """Make modules of the working directory importable."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def count_tasks(make_env: Callable[[], Any]) -> int | None:
    """Return the number of tasks of an environment; None if endless."""
    env = make_env()
    num_tasks: int | None = getattr(env.unwrapped, "num_tasks", None)
    env.close()
    return num_tasks


class Split(NamedTuple):
    """Tasks to train on and tasks to evaluate on."""

    train: list[int] | None
    """None: all tasks."""
    eval: list[int]
    words: str
    """Description of the evaluation tasks."""


def hold_out(num_tasks: int | None, count: int, seed: int) -> Split:
    """Hold `count` tasks, at most a fifth, out of training; the last ones of an endless family."""
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


def first_tasks(num_tasks: int | None, count: int) -> list[int]:
    """Return the first `count` tasks, or all if there are fewer."""
    return list(range(count if num_tasks is None else min(count, num_tasks)))
