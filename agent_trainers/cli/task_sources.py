"""Environments or a program to train in: read from the options, with the tasks of evaluation."""

import json
from collections.abc import Callable, Mapping
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
        help="How programs run. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in RUNNERS.items())
        + ".",
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

    def given(names: tuple[str, ...]) -> list[str]:
        return [n for n in names if getattr(options, n, None) != getattr(defaults, n, None)]

    if options.program is None and (names := given(OF_PROGRAMS)):
        raise ConfigurationError(f"--{names[0]} does nothing without --program: add --program.")
    if options.program is not None and (names := given(OF_ENVIRONMENTS)):
        raise ConfigurationError(
            f"--{names[0]} is for environments and --program is given. Remove one of them."
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

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for ``settings.json`` and ``results.json``."""
        names = ("program", "tasks", "eval_tasks", "reward", "frozen_roles")
        return {name: getattr(self._options, name) for name in names}

    def tasks(
        self, tokenizer: Any, num_eval_tasks: int, seed: int, notify: Callable[[str], None]
    ) -> TrainingTasks:
        """Return the tasks; without `eval_tasks`, some are held out of training."""
        options = self._options
        source = options.program_tasks(options.tasks, frozen_roles=options.frozen_roles or ())
        if options.eval_tasks is None:
            split = hold_out(source.num_tasks, num_eval_tasks, seed)
            return TrainingTasks(source, source, split.train, _rows(split), split.words)
        evaluated = options.program_tasks(options.eval_tasks)
        rows = [{"task": task} for task in range(min(evaluated.num_tasks, num_eval_tasks))]
        return TrainingTasks(source, evaluated, None, rows, options.eval_tasks)


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
            replace(
                member,
                kwargs={**kwargs, **member.kwargs},
                eval_kwargs={**eval_kwargs, **member.eval_kwargs},
            )
            for member in read_members(options.env or [DEFAULT_ENV], "env")
        ]
        variants = [
            *(read_members(options.eval_envs, "eval_envs", is_weighted=False)
              if options.eval_envs is not None else ())
        ]  # fmt: skip
        self.trained, self.variants = name_members(members, variants)
        if len(self.trained) == 1:  # the weight of a single environment has no effect
            self.trained = [replace(self.trained[0], weight=1.0)]
        self.is_single = len(self.trained) == 1 and self.trained[0].tasks is None
        self.title = (
            str(self.trained[0].id)
            if self.is_single
            else " + ".join(f"{m.name} x {m.weight:g}" for m in self.trained)
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for ``settings.json`` and ``results.json``."""
        first = self.trained[0]
        settings: dict[str, Any] = {
            "env": first.id if self.is_single else None,
            "env_kwargs": dict(first.kwargs) if self.is_single else {},
            "eval_env_kwargs": dict(first.eval_kwargs) if self.is_single else {},
        }
        if not self.is_single:
            settings["envs"] = [member.as_json() for member in self.trained]
        if self.variants:
            settings["eval_envs"] = [member.as_json() for member in self.variants]
        return settings

    def tasks(
        self, tokenizer: Any, num_eval_tasks: int, seed: int, notify: Callable[[str], None]
    ) -> TrainingTasks:
        """Return the environments in a tool format that fits the tokenizer, and their tasks."""
        facts_of = {
            m.name: inspect_environment(self._maker(m), str(m.id))
            for m in [*self.trained, *self.variants]
        }

        def fitted(member: EnvMember) -> EnvMember:
            facts = facts_of[member.name]
            kwargs = fit_environment(tokenizer, str(member.id), member.kwargs, facts, notify)
            return replace(member, kwargs=kwargs)

        trained, variants = [*map(fitted, self.trained)], [*map(fitted, self.variants)]
        splits = [self._split(m, facts_of[m.name], num_eval_tasks, seed) for m in trained]
        eval_source = [EnvMember(id=self._maker(m, is_eval=True), name=m.name) for m in trained]
        eval_envs = [
            EnvMember(
                id=self._maker(variant),
                name=variant.name,
                tasks=variant.tasks
                or first_tasks(facts_of[variant.name].num_tasks, num_eval_tasks),
            )
            for variant in variants
        ] or None
        if self.is_single:
            source = [EnvMember(id=self._maker(trained[0]), name=trained[0].name)]
            (split,) = splits
            rows = _rows(split)
            return TrainingTasks(source, eval_source, split.train, rows, split.words, eval_envs)
        pairs = [*zip(trained, splits, strict=True)]
        source = [
            EnvMember(id=self._maker(m), name=m.name, weight=m.weight, tasks=split.train)
            for m, split in pairs
        ]
        rows = [{"env": m.name, "task": task} for m, split in pairs for task in split.eval]
        words = "; ".join(f"{m.name}: {split.words}" for m, split in pairs)
        return TrainingTasks(source, eval_source, None, rows, words, eval_envs)

    def _maker(self, member: EnvMember, *, is_eval: bool = False) -> Callable[[], Any]:
        """Return a function that makes the environment, whose errors name the right option."""
        option = f"the arguments of {member.name}"
        if self.is_single and member.name == self.trained[0].name:
            option = "--eval_env_kwargs" if is_eval and member.eval_kwargs else "--env_kwargs"
        kwargs: Mapping[str, Any] = {**member.kwargs, **(member.eval_kwargs if is_eval else {})}
        return environment_maker(str(member.id), kwargs, option)

    def _split(self, member: EnvMember, facts: EnvironmentFacts, count: int, seed: int) -> Split:
        tasks = None if member.tasks is None else list(member.tasks)
        if member.eval_kwargs:
            num_tasks = count_tasks(self._maker(member, is_eval=True))
            words = json.dumps(dict(member.eval_kwargs))
            return Split(tasks, first_tasks(num_tasks, count), words)
        if tasks is None:
            return hold_out(facts.num_tasks, count, seed)
        split = hold_out(len(tasks), count, seed)
        indices = range(len(tasks)) if split.train is None else split.train
        return Split([tasks[i] for i in indices], [tasks[i] for i in split.eval], split.words)


Source = ProgramSource | EnvironmentSource


def read_source(options: Any) -> Source:
    """Return the environments or the program that the options of ``agent-r1-train`` name.

    Raises:
        ConfigurationError: If options contradict each other.
    """
    check_program(options)
    return EnvironmentSource(options) if options.program is None else ProgramSource(options)


def _rows(split: Split) -> list[dict[str, Any]]:
    return [{"task": task} for task in split.eval]
