"""What a command line says is played: an environment, or a program and its tasks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.errors import ConfigurationError
from agent_trainers.cli.environments import (
    FirstLook,
    Split,
    count_tasks,
    environment_maker,
    first_tasks,
    hold_out,
    see_modules_here,
)
from agent_trainers.cli.models import fit_environment
from agent_trainers.programs.program import REWARDS
from agent_trainers.programs.runners import RUNNERS

if TYPE_CHECKING:
    from agent_trainers.programs.tasks import ProgramTasks
    from agent_trainers.trainers.episode_plan import MakeEnv, TaskSource

OF_ENVIRONMENTS: Final = ("env", "env_kwargs", "eval_env_kwargs", "tool_format")
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
    program_env: list[str] | None = field(
        default=None,
        metadata={
            "help": "Environment variables of this process that a process or container gets, too."
        },
    )
    program_concurrency: int | None = HfArg(
        default=None,
        help="Programs that run at once; if not given, all of a batch in threads, else 4 a core.",
    )
    program_max_calls: int = HfArg(
        default=64, help="Calls to the model an episode may make; it is truncated there."
    )

    ignored_parameters: list[str] | None = field(
        default=None,
        metadata={
            "help": "Parameters of a program's requests that count for nothing, such as "
            "temperature: others than those honoured are refused by name."
        },
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
    """What is trained on, and what it is measured on."""

    source: "MakeEnv | TaskSource"
    eval_source: "MakeEnv | TaskSource"
    split: Split


def programs_played(options: Any, seed: int) -> Played:
    """Return a program with its tasks, and which of them are held out where no others are given."""
    source = options.program_tasks(options.tasks, frozen_roles=options.frozen_roles or ())
    if options.eval_tasks is None:
        return Played(source, source, hold_out(source.num_tasks, options.num_eval_tasks, seed))
    measured = options.program_tasks(options.eval_tasks)
    tasks = list(range(min(measured.num_tasks, options.num_eval_tasks)))
    return Played(source, measured, Split(None, tasks, options.eval_tasks))


def environments_played(
    environment: Mapping[str, Any],
    look: FirstLook,
    tokenizer: Any,
    num_eval_tasks: int,
    seed: int,
    say: Callable[[str], None],
) -> Played:
    """Return an environment that the model can read, and the one in which it is measured."""
    env_id, of_evaluation = environment["env"], environment["eval_env_kwargs"]
    env_kwargs = fit_environment(tokenizer, env_id, environment["env_kwargs"], look, say)
    make_env = environment_maker(env_id, env_kwargs)
    make_eval_env = environment_maker(env_id, env_kwargs | of_evaluation, "--eval_env_kwargs")
    if of_evaluation:
        tasks = first_tasks(count_tasks(make_eval_env), num_eval_tasks)
        return Played(make_env, make_eval_env, Split(None, tasks, json.dumps(of_evaluation)))
    return Played(make_env, make_eval_env, hold_out(look.num_tasks, num_eval_tasks, seed))
