"""Environments or a program to train in: read from the options, with the tasks of evaluation."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.environments import (
    EnvironmentFacts,
    Split,
    add_working_directory,
    count_tasks,
    environment_maker,
    first_tasks,
    hold_out,
    inspect_environment,
)
from agent_trainers.cli.models import fit_environment
from agent_trainers.programs.program import REWARDS
from agent_trainers.programs.runners import RUNNERS
from agent_trainers.tasks.env_members import EnvMember, name_members, read_members

if TYPE_CHECKING:
    from agent_trainers.programs.tasks import ProgramTasks

DEFAULT_ENV: Final = "AgentR1/SyntheticMultiHop-v0"
OF_ENVIRONMENTS: Final = ("env", "env_kwargs", "eval_env_kwargs", "eval_envs", "tool_format")
OF_PROGRAMS: Final = (
    "tasks", "eval_tasks", "reward", "program_runner", "program_env", "program_concurrency",
    "program_max_calls", "ignored_parameters", "frozen_roles",
)  # fmt: skip


def evaluation_defaults(env: str) -> dict[str, Any]:
    """Return the default keyword arguments of an environment in evaluation: held-out tasks."""
    return {"split": "test"} if env == DEFAULT_ENV else {}


@dataclass
class ProgramArguments:
    """Options of a program that runs the episodes."""

    program: str | None = HfArg(
        default=None,
        help="Instead of an environment, a program that talks to OpenAI's API: "
        "my_module:my_function, called with (session, task); or a command line.",
    )
    tasks: str | None = HfArg(
        default=None, help="Its tasks: a .jsonl, .json or .parquet file with a row for each."
    )
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
        default=None,
        help="Environment variables of this process that are passed to a process or container.",
    )
    program_concurrency: int | None = HfArg(
        default=None,
        help="Programs that run at once; if not given, all of a batch in threads, else 4 a core.",
    )
    program_max_calls: int = HfArg(
        default=64, help="Model calls per episode; it is truncated there."
    )
    ignored_parameters: list[str] | None = HfArg(
        default=None,
        help="Request parameters to ignore, such as temperature; other unsupported ones are "
        "refused by name.",
    )

    def program_tasks(self, path: str | None, **options: Any) -> "ProgramTasks":
        """Return the program with the tasks of a file.

        Raises:
            AgentEnvsError: If options contradict each other or a file is missing.
        """
        if path is None:
            raise ConfigurationError("--program needs --tasks: a file with a row for each task.")
        from agent_trainers.programs.tasks import ProgramTasks  # imports torch

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
    wrong = OF_PROGRAMS if options.program is None else OF_ENVIRONMENTS
    for name in wrong:
        if getattr(options, name, None) == getattr(defaults, name, None):
            continue
        if options.program is None:
            raise ConfigurationError(f"--{name} does nothing without --program: add --program.")
        raise ConfigurationError(
            f"--{name} is for environments and --program is given. Remove one of them."
        )


class TrainingTasks(NamedTuple):
    """Training and evaluation tasks, as `StepGRPOTrainer` takes them."""

    source: Any
    eval_source: Any
    train_tasks: list[int] | None
    """Tasks of a single environment; None for all, or if the source decides."""
    eval_rows: list[dict[str, Any]]
    """Evaluation tasks; with a column ``env`` if there are several environments."""
    words: str
    """Description of the evaluation tasks."""
    eval_envs: list[EnvMember] | None = None
    """Environments for evaluation only."""


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
        if options.eval_tasks is None:
            split = hold_out(source.num_tasks, count, seed)
            return TrainingTasks(source, source, split.train, _rows(split), split.words)
        evaluated = options.program_tasks(options.eval_tasks)
        split = Split(None, first_tasks(evaluated.num_tasks, count), options.eval_tasks)
        return TrainingTasks(source, evaluated, None, _rows(split), split.words)


class EnvironmentSource:
    """One or several environments to train in, and others for evaluation only."""

    def __init__(self, options: Any) -> None:
        """Read the options of ``agent-r1-train``.

        Raises:
            ConfigurationError: If an entry is wrong, or arguments are not a JSON object.
        """
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
        if len(self.trained) == 1:  # the weight of a single environment has no effect
            self.trained = [replace(self.trained[0], weight=1.0)]
        first = self.trained[0]
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
        facts = {}
        for members in (self.trained, self.variants):
            for i, member in enumerate(members):
                env_id = str(member.id)
                facts[member.name] = found = inspect_environment(_maker(member), env_id)
                kwargs = fit_environment(tokenizer, env_id, member.kwargs, found, notify)
                members[i] = replace(member, kwargs=kwargs)
        splits = [_split(m, facts[m.name], count, seed) for m in self.trained]
        eval_source = [EnvMember(id=_maker(m, is_eval=True), name=m.name) for m in self.trained]
        eval_envs = [
            EnvMember(
                id=_maker(m),
                name=m.name,
                tasks=m.tasks or first_tasks(facts[m.name].num_tasks, count),
            )
            for m in self.variants
        ] or None
        if self.is_single:
            (split,) = splits
            source = [EnvMember(id=_maker(m), name=m.name) for m in self.trained]
            rows = _rows(split)
            return TrainingTasks(source, eval_source, split.train, rows, split.words, eval_envs)
        pairs = [*zip(self.trained, splits, strict=True)]
        source = [
            EnvMember(id=_maker(m), name=m.name, weight=m.weight, tasks=s.train) for m, s in pairs
        ]
        rows = [{"env": m.name, "task": task} for m, s in pairs for task in s.eval]
        words = "; ".join(f"{m.name}: {s.words}" for m, s in pairs)
        return TrainingTasks(source, eval_source, None, rows, words, eval_envs)


def _maker(member: EnvMember, *, is_eval: bool = False) -> Callable[[], Any]:
    kwargs = {**member.kwargs, **(member.eval_kwargs if is_eval else {})}
    option = "--eval_env_kwargs" if is_eval and member.eval_kwargs else "--env_kwargs"
    return environment_maker(str(member.id), kwargs, option)


def _split(member: EnvMember, facts: EnvironmentFacts, count: int, seed: int) -> Split:
    tasks = member.tasks
    if member.eval_kwargs:
        num_tasks = count_tasks(_maker(member, is_eval=True))
        return Split(tasks, first_tasks(num_tasks, count), json.dumps(dict(member.eval_kwargs)))
    if tasks is None:
        return hold_out(facts.num_tasks, count, seed)
    split = hold_out(len(tasks), count, seed)
    indices = range(len(tasks)) if split.train is None else split.train
    return Split([tasks[i] for i in indices], [tasks[i] for i in split.eval], split.words)


def _rows(split: Split) -> list[dict[str, Any]]:
    return [{"task": task} for task in split.eval]


Source = ProgramSource | EnvironmentSource


def read_source(options: Any) -> Source:
    """Return the environments or the program that the options of ``agent-r1-train`` name.

    Raises:
        ConfigurationError: If options contradict each other.
    """
    check_program(options)
    return EnvironmentSource(options) if options.program is None else ProgramSource(options)
