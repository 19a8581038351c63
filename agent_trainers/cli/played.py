"""What a command line says is played: an environment, or a program and its tasks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.errors import ConfigurationError
from agent_trainers.cli.env_lists import Environments
from agent_trainers.cli.environments import (
    FirstLook,
    Split,
    count_tasks,
    environment_maker,
    first_tasks,
    hold_out,
    look_at,
    see_modules_here,
)
from agent_trainers.cli.models import fit_environment
from agent_trainers.programs.program import REWARDS
from agent_trainers.programs.runners import RUNNERS
from agent_trainers.tasks.env_members import EnvMember

if TYPE_CHECKING:
    from agent_trainers.programs.tasks import ProgramTasks

OF_ENVIRONMENTS: Final = (
    "env", "env_kwargs", "eval_env_kwargs", "envs", "eval_envs", "tool_format",
)  # fmt: skip
OF_PROGRAMS: Final = (
    "tasks", "eval_tasks", "reward", "program_runner", "program_env", "program_concurrency",
    "program_max_calls", "ignored_parameters", "frozen_roles",
)  # fmt: skip


@dataclass
class ProgramArguments:
    """Which program is run, on which tasks, and how."""

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
        help="What makes a reward of the task and what the program returned: "
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
        help="Environment variables of this process that a process or container gets, too.",
    )
    program_concurrency: int | None = HfArg(
        default=None,
        help="Programs that run at once; if not given, all of a batch in threads, else 4 a core.",
    )
    program_max_calls: int = HfArg(
        default=64, help="Calls to the model an episode may make; it is truncated there."
    )

    ignored_parameters: list[str] | None = HfArg(
        default=None,
        help="Parameters of a program's requests that count for nothing, such as "
        "temperature: others than those honoured are refused by name.",
    )

    def program_tasks(self, path: str | None, **options: Any) -> "ProgramTasks":
        """Return the program with the tasks of a file.

        Raises:
            AgentEnvsError: If options contradict each other, or something is not there.
        """
        assert self.program is not None
        if path is None:
            raise ConfigurationError("--program needs --tasks: a file with a row for each task.")
        from agent_trainers.programs.tasks import ProgramTasks  # with it comes torch

        see_modules_here()
        return ProgramTasks(
            self.program,
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
    """Refuse options of programs without one, and those of environments with one.

    Raises:
        ConfigurationError: Names both, and the ways out.
    """
    defaults = type(options)()
    if options.program is not None:
        for name in OF_ENVIRONMENTS:
            if getattr(options, name, None) != getattr(defaults, name, None):
                raise ConfigurationError(
                    f"--{name} is of environments, and --program is given. Leave one of them out."
                )
        return
    for name in OF_PROGRAMS:
        if getattr(options, name, None) != getattr(defaults, name, None):
            raise ConfigurationError(f"--{name} does nothing without --program: give it, too.")


class Played(NamedTuple):
    """What is trained on, and what it is measured on; as `StepGRPOTrainer` takes it."""

    source: Any
    eval_source: Any
    train_tasks: list[int] | None
    """Of one environment; None for all that there are, or where the source says."""
    eval_rows: list[dict[str, Any]]
    """The tasks that are played to measure what is trained, with ``env`` where they are several."""
    words: str
    """What those are, for people."""
    eval_envs: list[EnvMember] | None = None
    """What else it is measured in."""


def programs_played(options: Any, seed: int) -> Played:
    """Return a program with its tasks, and which of them are held out where no others are given."""
    source = options.program_tasks(options.tasks, frozen_roles=options.frozen_roles or ())
    if options.eval_tasks is None:
        split = hold_out(source.num_tasks, options.num_eval_tasks, seed)
        return Played(source, source, split.train, _rows(split), split.words)
    measured = options.program_tasks(options.eval_tasks)
    tasks = list(range(min(measured.num_tasks, options.num_eval_tasks)))
    split = Split(None, tasks, options.eval_tasks)
    return Played(source, measured, None, _rows(split), split.words)


def look_at_all(environments: Environments) -> dict[str, FirstLook]:
    """Make each environment once and look at it; what is wrong is said before a model is loaded.

    Raises:
        ConfigurationError: If one fails.
    """
    members = [*environments.trained, *environments.variants]
    return {m.name: look_at(_maker(m, environments), str(m.id)) for m in members}


def environments_played(
    environments: Environments,
    looks: Mapping[str, FirstLook],
    tokenizer: Any,
    num_eval_tasks: int,
    seed: int,
    say: Callable[[str], None],
) -> Played:
    """Return environments that the model can read, and those in which it is measured."""

    def fitted(member: EnvMember) -> EnvMember:
        look = looks[member.name]
        return replace(
            member, kwargs=fit_environment(tokenizer, str(member.id), member.kwargs, look, say)
        )

    trained = [fitted(member) for member in environments.trained]
    splits = [_split(m, environments, looks[m.name], num_eval_tasks, seed) for m in trained]
    measured = [
        EnvMember(id=_maker(m, environments, for_evaluation=True), name=m.name) for m in trained
    ]
    variants = [
        EnvMember(
            id=_maker(variant, environments),
            name=variant.name,
            tasks=variant.tasks or first_tasks(looks[variant.name].num_tasks, num_eval_tasks),
        )
        for variant in map(fitted, environments.variants)
    ]
    if environments.is_one:
        rows = _rows(splits[0])
        own = [EnvMember(id=_maker(trained[0], environments), name=trained[0].name)]
        return Played(own, measured, splits[0].train, rows, splits[0].words, variants or None)
    played = [
        EnvMember(id=_maker(m, environments), name=m.name, weight=m.weight, tasks=split.train)
        for m, split in zip(trained, splits, strict=True)
    ]
    rows = [
        {"env": m.name, "task": task}
        for m, split in zip(trained, splits, strict=True)
        for task in split.eval
    ]
    words = "; ".join(f"{m.name}: {s.words}" for m, s in zip(trained, splits, strict=True))
    return Played(played, measured, None, rows, words, variants or None)


def _maker(
    member: EnvMember, environments: Environments, *, for_evaluation: bool = False
) -> Callable[[], Any]:
    """Return what makes an environment; where its arguments are wrong it says where they stand."""
    if environments.is_one and member.name == environments.trained[0].name:
        option = "--eval_env_kwargs" if for_evaluation and member.eval_kwargs else "--env_kwargs"
    else:
        option = f"the arguments of {member.name}"
    kwargs = {**member.kwargs, **(member.eval_kwargs if for_evaluation else {})}
    return environment_maker(str(member.id), kwargs, option)


def _split(
    member: EnvMember, environments: Environments, look: FirstLook, count: int, seed: int
) -> Split:
    """Return which tasks of an environment are trained on, and which are played to measure it."""
    tasks = None if member.tasks is None else list(member.tasks)
    if member.eval_kwargs:
        num_tasks = count_tasks(_maker(member, environments, for_evaluation=True))
        words = json.dumps(dict(member.eval_kwargs))
        return Split(tasks, first_tasks(num_tasks, count), words)
    if tasks is None:
        return hold_out(look.num_tasks, count, seed)
    chosen = hold_out(len(tasks), count, seed)
    places = range(len(tasks)) if chosen.train is None else chosen.train
    return Split([tasks[i] for i in places], [tasks[i] for i in chosen.eval], chosen.words)


def _rows(split: Split) -> list[dict[str, Any]]:
    return [{"task": task} for task in split.eval]
