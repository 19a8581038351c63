"""The environment that a command line names."""

import difflib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import (
    EnvSpec,
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.async_bridge import resolve
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.rollout.answers import read_reset

NUM_STATES: Final = 4
"""First states that are looked at."""


def environment_maker(
    env_id: str, kwargs: Mapping[str, Any], option: str = "--env_kwargs"
) -> Callable[[], Any]:
    """Return a function that makes an environment; the id's ``module:`` may lie here.

    The function takes further arguments, such as those of a level. It raises `ConfigurationError`
    if it cannot be made; `option` is named where arguments are wrong.

    Raises:
        ConfigurationError: See `check_id`.
    """
    check_id(env_id)
    maker: Any = functools.partial(_make, env_id, kwargs, option)
    maker.__name__ = env_id  # what its levels are called after
    return cast(Callable[[], Any], maker)


def check_id(env_id: Any) -> None:
    """Make sure that there is an environment of that id, without making it.

    Raises:
        ConfigurationError: If there is none, or its module cannot be imported.
    """
    if not isinstance(env_id, str):
        raise ConfigurationError(f"--env must be a Gymnasium id such as Name-v0, not {env_id!r}.")
    module, is_given, name = env_id.rpartition(":")
    if is_given:
        see_modules_here()
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"--env {env_id}: {error}. Run the command where the module lies, or install it."
            ) from error
        except Exception as error:  # whatever a module may do
            raise _foreign_error(env_id, f"{module} cannot be imported", error) from error
    try:
        _find_spec(name)
    except gym.error.Error as error:
        close = difflib.get_close_matches(name, gym.registry, n=1)
        hint = f"Did you mean {close[0]}?" if close else "Is it registered when its module loads?"
        raise ConfigurationError(f"--env {env_id}: {str(error).split(' Did you')[0]} {hint}") from (
            error
        )


class FirstLook(NamedTuple):
    """What an environment says of itself before it is played."""

    states: list[dict[str, Any]]
    """The `info` of its first resets."""
    num_tasks: int | None
    """How many tasks there are; None where they are endless."""


def look_at(make_env: Callable[[], Any], env_id: str) -> FirstLook:
    """Make an environment, reset it a few times, and close it.

    Raises:
        ConfigurationError: If it fails, or answers what is no state.
    """
    env = make_env()
    try:
        states = [read_reset(resolve(env.reset(seed=seed))) for seed in range(NUM_STATES)]
        return FirstLook(states, getattr(env.unwrapped, "num_tasks", None))
    except AgentEnvsError:
        raise
    except Exception as error:  # an environment is foreign code
        raise _foreign_error(env_id, "it cannot be reset", error) from error
    finally:
        env.close()


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


def hold_out(num_tasks: int | None, count: int, seed: int) -> Split:
    """Keep `count` of an environment's tasks out of training, at most a fifth of them.

    Of an endless family (None) they are the last of all: training draws from all at random.
    """
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
    """Return the first tasks of an environment, as many as asked for or as it has."""
    return list(range(count if num_tasks is None else min(count, num_tasks)))


def _find_spec(name: str) -> EnvSpec:
    """Return what is registered under an id; without a version, the newest, as `gym.make` does."""
    if name not in gym.registry:
        namespace, base, version = parse_env_id(name)
        version = find_highest_version(namespace, base) if version is None else version
        name = get_env_id(namespace, base, version)
    return gym.spec(name)


def _make(env_id: str, kwargs: Mapping[str, Any], option: str, **others: Any) -> Any:
    kwargs = {**kwargs, **others}
    try:
        return gym.make(env_id, **kwargs)
    except (AgentEnvsError, gym.error.Error):
        raise
    except Exception as error:  # an environment is foreign code
        text = str(error)
        if isinstance(error, TypeError) and "unexpected keyword argument" in text:
            raise ConfigurationError(_unknown_argument(env_id, text, option)) from error
        raise _foreign_error(
            env_id, f"it cannot be made with {option} {dict(kwargs)}", error
        ) from (error)


def _unknown_argument(env_id: str, text: str, option: str) -> str:
    """Name the argument that an environment does not take, and the nearest that it does."""
    name = text.partition("unexpected keyword argument ")[2].split()[0].strip("'\".")
    known: list[str] = []
    try:
        entry_point = _find_spec(env_id.rpartition(":")[2]).entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        for kind in getattr(creator, "__mro__", ()):
            known += inspect.signature(kind.__init__).parameters
    except (TypeError, ValueError):
        pass  # written in C; the name alone has to do
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{option}: unexpected keyword argument {name!r} for {env_id}.{hint}"


def _foreign_error(env_id: str, what: str, error: Exception) -> ConfigurationError:
    """Say in one line what a user's own code did, and where."""
    origin = error.__context__ or error  # Gymnasium raises some anew
    frames = traceback.extract_tb(origin.__traceback__)
    ours = (str(Path(gym.__file__).parent), str(Path(__file__).parent.parent))
    own = [frame for frame in frames if not frame.filename.startswith((*ours, "<frozen"))]
    where = ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
    elif own:
        where = f" ({own[-1].filename}, line {own[-1].lineno})"
    reason = " ".join(traceback.format_exception_only(error)[-1].split())
    return ConfigurationError(f"--env {env_id}: {what}: {reason}{where}")
