"""Environments or a program named on a command line: made with clear errors, and their tasks."""

import contextlib
import difflib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
from datasets import Dataset
from gymnasium.envs.registration import load_env_creator
from transformers.hf_argparser import HfArg

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.async_bridge import resolve
from agent_envs.core.command_line import check_range, json_object, with_hint
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.programs.program import REWARDS, RUNNERS
from agent_trainers.programs.rollout import ProgramTasks
from agent_trainers.rollout.environments import read_reset, template_tools
from agent_trainers.tasks.env_members import EnvMember, name_members, read_members

DEFAULT_ENV: Final = "AgentR1/SyntheticMultiHop-v0"
MAX_UNKNOWN_SHARE: Final = 0.1
NUM_STATES: Final = 4
"""Number of resets that `inspect_environment` takes."""
OF_ENVIRONMENTS: Final = ("env", "env_kwargs", "eval_env_kwargs", "eval_envs", "tool_format")
OF_PROGRAMS: Final = (
    "tasks", "eval_tasks", "reward", "program_runner", "program_env", "program_concurrency",
    "program_max_calls", "ignored_parameters", "frozen_roles",
)  # fmt: skip


@contextlib.contextmanager
def _named_errors(env_id: str, option: str) -> Iterator[None]:
    """Raise errors of user code as one line with the file and line that failed."""
    try:
        yield
    except AgentEnvsError:
        raise
    except gym.error.Error as error:
        raise ConfigurationError(f"--env {env_id}: {with_hint(error)}") from error
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise ConfigurationError(_unknown_argument(env_id, str(error), option)) from error
        origin = error.__context__ or error  # Gymnasium wraps some errors
        frames = traceback.extract_tb(origin.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        place: Any = error if isinstance(error, SyntaxError) else (own or frames)[-1]
        reason = " ".join(traceback.format_exception_only(error)[-1].split())
        raise ConfigurationError(
            f"--env {env_id}: {reason} ({place.filename}, line {place.lineno})"
        ) from error


def _unknown_argument(env_id: str, text: str, option: str) -> str:
    """Return the message for an unknown keyword argument, with the closest known one."""
    name = text.partition("unexpected keyword argument ")[2].split()[0].strip("'\".")
    entry_point = getattr(gym.registry.get(env_id.rpartition(":")[2]), "entry_point", None)
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    kinds = getattr(creator, "__mro__", ())[:-1]
    known = [each for kind in kinds for each in inspect.signature(kind.__init__).parameters]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{option}: unexpected keyword argument {name!r} for {env_id}.{hint}"


class Environment(NamedTuple):
    """An environment of a command line, with its first states."""

    env_kwargs: dict[str, Any]
    make_env: Callable[[], Any]
    states: list[dict[str, Any]]
    """`info` of its first resets."""
    num_tasks: int | None
    """Number of tasks; None if endless."""


def inspect_environment(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    tokenizer: Any = None,
    notify: Callable[[str], None] = print,
    option: str = "--env_kwargs",
) -> Environment:
    """Make an environment, reset it a few times, and close it.

    The ``module:`` part of `env_id` may be in the working directory. Errors about `env_kwargs` name
    `option`. With a tokenizer, check that it knows the words of the environment, and describe the
    tools in the messages if the chat template cannot.
    """

    def make_env() -> Any:
        add_working_directory()
        with _named_errors(env_id, option):
            return gym.make(env_id, **env_kwargs)

    with contextlib.closing(make_env()) as env, _named_errors(env_id, option):
        states = [read_reset(resolve(env.reset(seed=seed))) for seed in range(NUM_STATES)]
        num_tasks = getattr(env.unwrapped, "num_tasks", None)
    environment = Environment(dict(env_kwargs), make_env, states, num_tasks)
    if tokenizer is None:
        return environment
    renderer, unknown = ChatRenderer(tokenizer), tokenizer.unk_token_id
    prompts = [renderer.prompt_ids(i["messages"], template_tools(i), None) for i in states]
    ids = [token for prompt in prompts for token in prompt]
    share = 0.0 if unknown is None else ids.count(unknown) / max(1, len(ids))
    if share > MAX_UNKNOWN_SHARE:
        raise ConfigurationError(
            f"The model does not know the words of {env_id}: {share:.0%} of the tokens of its "
            "first states are unknown. Make a tiny policy for it with python -m "
            f"agent_trainers.tiny_policy --env {env_id}, or pass a language model with --model."
        )
    tools = template_tools(states[0])
    if not tools or "tool_format" in env_kwargs or renderer.shows_tools(tools):
        return environment
    notify(
        "The model's chat template shows no tools, so the environment describes them: "
        "tool_format='tags'."
    )
    return inspect_environment(env_id, {**env_kwargs, "tool_format": "tags"}, tokenizer, notify)


def add_working_directory() -> None:
    """Make modules of the working directory importable."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def first_tasks(num_tasks: int | None, count: int) -> list[int]:
    """Return the first `count` tasks, or all if there are fewer."""
    return list(range(count if num_tasks is None else min(count, num_tasks)))


class Split(NamedTuple):
    """Tasks to train on (None: all) and tasks to evaluate on, with a description of the latter."""

    train: list[int] | None
    eval: list[int]
    words: str


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


@dataclass
class ProgramArguments:
    """Options of a program that runs the episodes."""

    program: str | None = HfArg(
        default=None,
        help="Instead of an environment, a program that talks to OpenAI's API: "
        "my_module:my_function, called with (session, task); or a command line.",
    )
    tasks: str | None = HfArg(default=None, help="Its tasks: a .jsonl, .json or .parquet file.")
    reward: str | None = HfArg(
        default=None,
        help="Reward of a task and the program's return value: "
        f"{', '.join(REWARDS)}, or my_module:my_function. The program returns it if not given.",
    )
    program_runner: str = HfArg(
        default="thread",
        help=f"How programs run. {'; '.join(f'{name}: {RUNNERS[name]}' for name in RUNNERS)}.",
    )
    program_env: list[str] | None = HfArg(
        default=None, help="Environment variables that are passed to a process or container."
    )
    program_concurrency: int | None = HfArg(
        default=None, help="Programs at once; by default all of a batch in threads, else 4 a core."
    )
    program_max_calls: int = HfArg(default=64, help="Model calls per episode.")
    ignored_parameters: list[str] | None = HfArg(
        default=None, help="Request parameters to ignore, such as temperature, not to refuse."
    )

    def program_tasks(self, path: str | None, **options: Any) -> ProgramTasks:
        """Return the program with the tasks of a file."""
        if path is None:
            raise ConfigurationError("--program needs --tasks: a file with a row for each task.")
        check_range(self, "at least 1", "program_concurrency", "program_max_calls")
        add_working_directory()
        return ProgramTasks(
            str(self.program),
            path,
            reward=self.reward,
            runner=self.program_runner,
            variables=self.program_env or (),
            max_concurrency=self.program_concurrency,
            max_calls=self.program_max_calls,
            ignored_parameters=self.ignored_parameters or (),
            **options,
        )


def check_program(options: ProgramArguments) -> None:
    """Raise `ConfigurationError` for program options without a program, and the reverse."""
    defaults = type(options)()
    unused: Sequence[str] = OF_PROGRAMS
    reason = "does nothing without --program: add --program"
    if options.program is not None:
        unused, reason = OF_ENVIRONMENTS, "is for environments and --program is given: remove one"
    for name in unused:
        if getattr(options, name, None) != getattr(defaults, name, None):
            raise ConfigurationError(f"--{name} {reason}.")


class Source(NamedTuple):
    """Source of the episodes that ``agent-r1-train`` trains on: environments or a program."""

    title: str
    settings: dict[str, Any]
    """Settings for ``settings.json`` and ``results.json``."""
    trained: list[EnvMember]
    variants: list[EnvMember]
    """Environments for evaluation only."""


def read_source(options: Any) -> Source:
    """Read the options of ``agent-r1-train``; see `read_members` for errors."""
    check_program(options)
    if options.program is not None:
        names = ("program", "tasks", "eval_tasks", "reward", "frozen_roles")
        return Source(options.program, {name: getattr(options, name) for name in names}, [], [])
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    eval_kwargs = json_object(options.eval_env_kwargs, "--eval_env_kwargs")
    members = [
        replace(m, kwargs={**kwargs, **m.kwargs}, eval_kwargs={**eval_kwargs, **m.eval_kwargs})
        for m in read_members([DEFAULT_ENV] if options.env is None else options.env, "env")
    ]
    evaluated: list[EnvMember] = []
    if options.eval_envs is not None:
        evaluated = read_members(options.eval_envs, "eval_envs", is_weighted=False)
    trained, variants = name_members(members, evaluated)
    first = trained[0]
    if len(trained) == 1:  # the weight of a single environment has no effect
        trained = [replace(first, weight=1.0)]
    title = " + ".join(f"{m.name} x {m.weight:g}" for m in trained)
    settings: dict[str, Any] = {"env": None, "env_kwargs": {}, "eval_env_kwargs": {}}
    if len(trained) == 1 and first.tasks is None:
        title = str(first.id)
        settings = {"env": title, "env_kwargs": first.kwargs, "eval_env_kwargs": first.eval_kwargs}
    else:
        settings["envs"] = [member.as_json() for member in trained]
    if variants:
        settings["eval_envs"] = [member.as_json() for member in variants]
    return Source(title, settings, trained, variants)


def find_tasks(
    options: Any, source: Source, tokenizer: Any, seed: int, notify: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """Return the trainer's arguments for a source, and a description of its evaluation tasks."""
    count = options.num_eval_tasks
    if options.program is not None:
        program = options.program_tasks(options.tasks, frozen_roles=options.frozen_roles or ())
        evaluated, split = program, hold_out(program.num_tasks, count, seed)
        if options.eval_tasks is not None:
            evaluated = options.program_tasks(options.eval_tasks)
            split = Split(None, first_tasks(evaluated.num_tasks, count), options.eval_tasks)
        return {"env": program, "eval_env": evaluated, **_datasets(split)}, split.words

    def fit(member: EnvMember) -> tuple[EnvMember, int | None]:
        """Return an environment in a tool format that fits the tokenizer."""
        fitted = inspect_environment(str(member.id), member.kwargs, tokenizer, notify)
        return replace(member, kwargs=fitted.env_kwargs), fitted.num_tasks

    trained = [fit(member) for member in source.trained]
    members = [member for member, _ in trained]
    splits = [split_tasks(member, num_tasks, count, seed) for member, num_tasks in trained]
    eval_envs = [
        replace(m, tasks=m.tasks or first_tasks(num_tasks, count))
        for m, num_tasks in map(fit, source.variants)
    ]
    arguments = {
        "eval_env": [member.in_evaluation() for member in members],
        "eval_envs": eval_envs or None,
    }
    if len(members) == 1 and members[0].tasks is None:
        env = [replace(members[0], eval_kwargs={})]
        return {**arguments, "env": env, **_datasets(splits[0])}, splits[0].words
    pairs = [*zip(members, splits, strict=True)]
    arguments["env"] = [replace(m, eval_kwargs={}, tasks=s.train) for m, s in pairs]
    rows = [{"env": m.name, "task": task} for m, s in pairs for task in s.eval]
    arguments["eval_dataset"] = _dataset(rows)
    return arguments, "; ".join(f"{m.name}: {s.words}" for m, s in pairs)


def recorded_member(settings: Mapping[str, Any], env: str | None, place: str) -> EnvMember | None:
    """Return the environment `env` of the settings of a run, by default its only one, if any."""
    if not settings:  # the default run's
        settings = {"env": DEFAULT_ENV, "eval_env_kwargs": {"split": "test"}}
    if not (settings.get("env") or settings.get("envs")):  # of a program
        return None
    shared = {"id": "env", "kwargs": "env_kwargs", "eval_kwargs": "eval_env_kwargs"}
    single = {key: settings.get(name) for key, name in shared.items()}
    members, _ = name_members(read_members(settings.get("envs") or [single], place))
    if env is None and len(members) > 1:
        names = ", ".join(member.name for member in members)
        raise ConfigurationError(f"{place} has several environments: choose one by --env {names}.")
    return next((member for member in members if env in (None, member.name, member.id)), None)


def split_tasks(member: EnvMember, num_tasks: int | None, count: int, seed: int) -> Split:
    """Return the tasks of an environment of a run: its own, or some of them held out."""
    tasks = member.tasks
    if member.eval_kwargs:
        kwargs = {**member.kwargs, **member.eval_kwargs}
        evaluated = inspect_environment(str(member.id), kwargs, option="--eval_env_kwargs")
        words = json.dumps(dict(member.eval_kwargs))
        return Split(tasks, first_tasks(evaluated.num_tasks, count), words)
    if tasks is None:
        return hold_out(num_tasks, count, seed)
    split = hold_out(len(tasks), count, seed)
    indices = range(len(tasks)) if split.train is None else split.train
    return Split([tasks[i] for i in indices], [tasks[i] for i in split.eval], split.words)


def _datasets(split: Split) -> dict[str, Any]:
    train, evaluated = ([{"task": task} for task in part or ()] for part in split[:2])
    return {"train_dataset": _dataset(train), "eval_dataset": _dataset(evaluated)}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    return Dataset.from_list(rows) if rows else None
