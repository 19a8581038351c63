"""Environments or a program named on a command line: made with clear errors, and their tasks."""

import difflib
import functools
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from transformers.hf_argparser import HfArg

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.async_bridge import resolve
from agent_envs.core.command_line import json_object
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.programs.program import REWARDS
from agent_trainers.programs.runners import RUNNERS
from agent_trainers.rollout.environments import read_reset, template_tools
from agent_trainers.tasks.env_members import EnvMember, name_members, read_members

if TYPE_CHECKING:
    from agent_trainers.programs.rollout import ProgramTasks

DEFAULT_ENV: Final = "AgentR1/SyntheticMultiHop-v0"
MAX_UNKNOWN_SHARE: Final = 0.1
NUM_STATES: Final = 4
"""Number of resets that `inspect_environment` takes."""
OF_ENVIRONMENTS: Final = ("env", "env_kwargs", "eval_env_kwargs", "eval_envs", "tool_format")
OF_PROGRAMS: Final = (
    "tasks", "eval_tasks", "reward", "program_runner", "program_env", "program_concurrency",
    "program_max_calls", "ignored_parameters", "frozen_roles",
)  # fmt: skip


def evaluation_defaults(env: str) -> dict[str, Any]:
    """Return the default keyword arguments of an environment in evaluation: held-out tasks."""
    return {"split": "test"} if env == DEFAULT_ENV else {}


def environment_maker(
    env_id: str, kwargs: Mapping[str, Any], option: str = "--env_kwargs"
) -> Callable[[], Any]:
    """Return a function that makes an environment and takes further keyword arguments.

    The ``module:`` part of `env_id` may be in the working directory. Errors about `kwargs` name
    `option`.
    """
    return functools.partial(_make, env_id, kwargs, option)


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
    spec = gym.registry.get(env_id.rpartition(":")[2])
    entry_point = None if spec is None else spec.entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    kinds = getattr(creator, "__mro__", ())[:-1]
    known = [each for kind in kinds for each in inspect.signature(kind.__init__).parameters]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{option}: unexpected keyword argument {name!r} for {env_id}.{hint}"


def _user_error(env_id: str, what: str, error: Exception) -> ConfigurationError:
    """Return an error of one line with the file and line of the user's code that failed."""
    origin = error.__context__ or error  # Gymnasium wraps some errors
    frames = traceback.extract_tb(origin.__traceback__)
    ours = (str(Path(gym.__file__).parent), str(Path(__file__).parent.parent), "<frozen")
    places = [(f.filename, f.lineno) for f in frames if not f.filename.startswith(ours)]
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
    """Make an environment, reset it a few times, and close it."""
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


def fit_environment(
    tokenizer: Any,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    facts: EnvironmentFacts,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Return an environment's arguments with a tool format that the chat template can show."""
    renderer, unknown = ChatRenderer(tokenizer), tokenizer.unk_token_id
    prompts = [renderer.prompt_ids(i["messages"], template_tools(i), None) for i in facts.states]
    ids = [token for prompt in prompts for token in prompt]
    share = 0.0 if unknown is None else ids.count(unknown) / max(1, len(ids))
    if share > MAX_UNKNOWN_SHARE:
        raise ConfigurationError(
            f"The model does not know the words of {env_id}: {share:.0%} of the tokens of its "
            "first states are unknown. Make a tiny policy for it with python -m "
            f"agent_trainers.tiny_policy --env {env_id}, or pass a language model with --model."
        )
    tools = template_tools(facts.states[0])
    if not tools or "tool_format" in env_kwargs or renderer.shows_tools(tools):
        return dict(env_kwargs)
    notify(
        "The model's chat template shows no tools, so the environment describes them: "
        "tool_format='tags'."
    )
    return {**env_kwargs, "tool_format": "tags"}


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

    def program_tasks(self, path: str | None, **options: Any) -> "ProgramTasks":
        """Return the program with the tasks of a file."""
        if path is None:
            raise ConfigurationError("--program needs --tasks: a file with a row for each task.")
        from agent_trainers.programs.rollout import ProgramTasks  # imports torch

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
    for name in OF_PROGRAMS if options.program is None else OF_ENVIRONMENTS:
        if getattr(options, name, None) == getattr(defaults, name, None):
            continue
        if options.program is None:
            raise ConfigurationError(f"--{name} does nothing without --program: add --program.")
        raise ConfigurationError(
            f"--{name} is for environments and --program is given. Remove one of them."
        )


class TrainingTasks(NamedTuple):
    """Training and evaluation tasks."""

    arguments: dict[str, Any]
    """Those of `StepGRPOTrainer`."""
    words: str
    """Description of the evaluation tasks."""


def _dataset(rows: list[dict[str, Any]] | None) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows) if rows else None


def _rows(tasks: list[int] | None) -> Any:
    return _dataset([{"task": task} for task in tasks or ()])


class ProgramSource:
    """A program to train, with its tasks."""

    def __init__(self, options: Any) -> None:
        """Take the options of ``agent-r1-train``."""
        self._options = options
        self.title: str = options.program
        names = ("program", "tasks", "eval_tasks", "reward", "frozen_roles")
        self.settings = {name: getattr(options, name) for name in names}
        """Settings for ``settings.json`` and ``results.json``."""

    def tasks(
        self, tokenizer: Any, count: int, seed: int, notify: Callable[[str], None]
    ) -> TrainingTasks:
        """Return the tasks; without `eval_tasks`, `count` are held out of training."""
        options = self._options
        source = options.program_tasks(options.tasks, frozen_roles=options.frozen_roles or ())
        evaluated, split = source, hold_out(source.num_tasks, count, seed)
        if options.eval_tasks is not None:
            evaluated = options.program_tasks(options.eval_tasks)
            split = Split(None, first_tasks(evaluated.num_tasks, count), options.eval_tasks)
        arguments = {
            "env": source,
            "eval_env": evaluated,
            "train_dataset": _rows(split.train),
            "eval_dataset": _rows(split.eval),
        }
        return TrainingTasks(arguments, split.words)


class EnvironmentSource:
    """One or several environments to train in, and others for evaluation only."""

    def __init__(self, options: Any) -> None:
        """Read the options of ``agent-r1-train``; see `read_members` for errors."""
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        eval_kwargs = json_object(options.eval_env_kwargs, "--eval_env_kwargs")
        members = [
            replace(m, kwargs={**kwargs, **m.kwargs}, eval_kwargs={**eval_kwargs, **m.eval_kwargs})
            for m in read_members(options.env or [DEFAULT_ENV], "env")
        ]
        variants: list[EnvMember] = []
        if options.eval_envs is not None:
            variants = read_members(options.eval_envs, "eval_envs", is_weighted=False)
        self.trained, self.variants = name_members(members, variants)
        first = self.trained[0]
        if len(self.trained) == 1:  # the weight of a single environment has no effect
            self.trained = [replace(first, weight=1.0)]
        self.is_single = len(self.trained) == 1 and first.tasks is None
        self.title = " + ".join(f"{m.name} x {m.weight:g}" for m in self.trained)
        self.settings: dict[str, Any] = {"env": None, "env_kwargs": {}, "eval_env_kwargs": {}}
        """Settings for ``settings.json`` and ``results.json``."""
        if self.is_single:
            self.title = str(first.id)
            arguments = {"env_kwargs": first.kwargs, "eval_env_kwargs": first.eval_kwargs}
            self.settings = {"env": first.id, **arguments}
        else:
            self.settings["envs"] = [member.as_json() for member in self.trained]
        if self.variants:
            self.settings["eval_envs"] = [member.as_json() for member in self.variants]

    def tasks(
        self, tokenizer: Any, count: int, seed: int, notify: Callable[[str], None]
    ) -> TrainingTasks:
        """Return the environments in a tool format that fits the tokenizer, and their tasks."""

        def fit(member: EnvMember) -> tuple[EnvMember, int | None]:
            env_id = str(member.id)
            facts = inspect_environment(environment_maker(env_id, member.kwargs), env_id)
            kwargs = fit_environment(tokenizer, env_id, member.kwargs, facts, notify)
            return replace(member, kwargs=kwargs), facts.num_tasks

        trained = [fit(member) for member in self.trained]
        splits = [_split(member, num_tasks, count, seed) for member, num_tasks in trained]
        members = [member for member, _ in trained]
        eval_envs = [
            replace(m, tasks=m.tasks or first_tasks(num_tasks, count))
            for m, num_tasks in map(fit, self.variants)
        ]
        arguments: dict[str, Any] = {
            "eval_env": [member.in_evaluation() for member in members],
            "eval_envs": eval_envs or None,
        }
        if self.is_single:
            arguments["env"] = [replace(members[0], eval_kwargs={})]
            arguments["train_dataset"] = _rows(splits[0].train)
            arguments["eval_dataset"] = _rows(splits[0].eval)
            return TrainingTasks(arguments, splits[0].words)
        pairs = [*zip(members, splits, strict=True)]
        arguments["env"] = [replace(m, eval_kwargs={}, tasks=s.train) for m, s in pairs]
        rows = [{"env": m.name, "task": task} for m, s in pairs for task in s.eval]
        arguments["eval_dataset"] = _dataset(rows)
        return TrainingTasks(arguments, "; ".join(f"{m.name}: {s.words}" for m, s in pairs))


def _split(member: EnvMember, num_tasks: int | None, count: int, seed: int) -> Split:
    tasks = member.tasks
    if member.eval_kwargs:
        kwargs = {**member.kwargs, **member.eval_kwargs}
        num_tasks = count_tasks(environment_maker(str(member.id), kwargs, "--eval_env_kwargs"))
        return Split(tasks, first_tasks(num_tasks, count), json.dumps(dict(member.eval_kwargs)))
    if tasks is None:
        return hold_out(num_tasks, count, seed)
    split = hold_out(len(tasks), count, seed)
    indices = range(len(tasks)) if split.train is None else split.train
    return Split([tasks[i] for i in indices], [tasks[i] for i in split.eval], split.words)


Source = ProgramSource | EnvironmentSource


def read_source(options: Any) -> Source:
    """Return the environments or the program that the options of ``agent-r1-train`` name."""
    check_program(options)
    return EnvironmentSource(options) if options.program is None else ProgramSource(options)
