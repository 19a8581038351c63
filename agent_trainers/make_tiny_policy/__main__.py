"""``python -m agent_trainers.make_tiny_policy``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from agent_envs.core.command_line import json_object
from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import check_range, refuse, run_command
from agent_trainers.cli.environments import environment_maker, look_at, see_modules_here
from agent_trainers.recipes import MODEL_RECIPE
from agent_trainers.tiny_policy import TINY_POLICY

PROGRAM: Final = "python -m agent_trainers.make_tiny_policy"
_NAMING: Final = ("env", "env_kwargs", "program", "tasks", "reward")
"""Options that say what is learned, here and in ``agent-r1-train``."""
_GOES_WITH: Final = {
    "env_kwargs": "env", "tasks": "program", "reward": "program", "oracle": "program",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(self.prog, message)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, run, arguments)


def run(arguments: Sequence[str]) -> None:
    """Make a policy, measure it, and save it; torch is imported when all is known to be right."""
    options = _parser().parse_args(arguments)
    check_range(options, "at least 1", lambda value: value >= 1, "num_tasks", "num_steps")
    check_range(options, "at least 0", lambda value: value >= 0, "seed")
    check_range(options, "in [0, 1]", lambda value: 0 <= value <= 1, "success")
    _check_source(options)
    if options.env is None and options.program is None:
        from agent_trainers.make_tiny_policy import embedded

        embedded.make(options.output or TINY_POLICY, options.seed)
        return
    output = options.output or Path("runs/tiny_policy")
    _check_output(output)
    if options.env is not None:
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        make_env = environment_maker(options.env, kwargs)
        look_at(make_env, options.env)
    else:
        see_modules_here()
        oracle: Any = lookup_or_import({}, options.oracle, kind="oracle")
    from agent_trainers.make_tiny_policy import own
    from agent_trainers.make_tiny_policy.lessons import EnvironmentLessons, Lessons, ProgramLessons
    from agent_trainers.programs import ProgramTasks

    given = {name: value for name in _NAMING if (value := getattr(options, name)) is not None}
    words = " ".join(f"--{name} {shlex.quote(value)}" for name, value in given.items())
    lessons: Lessons
    if options.env is not None:
        lessons = EnvironmentLessons(words, make_env)
    else:
        source = ProgramTasks(options.program, options.tasks, reward=options.reward)
        lessons = ProgramLessons(words, source, oracle)
    reached = own.make(
        lessons,
        output,
        seed=options.seed,
        num_tasks=options.num_tasks,
        num_steps=options.num_steps,
        success=options.success,
    )
    sys.stdout.write(f"{output}: solves {reached:.0%} of tasks that it was not shown.\n")
    if reached == 0.0:
        sys.stdout.write(
            "Reinforcement learning would have nothing to reward: give it more --num_steps or "
            "--num_tasks, or make the first tasks easier.\n"
        )
    sys.stdout.write(f"Train it with: agent-r1-train {words} --model {output}\n")


def _check_source(options: argparse.Namespace) -> None:
    """Refuse options that do nothing beside those that are given, or lack some."""
    for name, needed in _GOES_WITH.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            raise ConfigurationError(f"--{name} goes with --{needed}.")
    if options.program is None:
        return
    if options.env is not None:
        raise ConfigurationError("--env and --program: give one of the two.")
    if options.tasks is None or options.oracle is None:
        raise ConfigurationError("--program needs --tasks and --oracle.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Make a tiny policy that knows the words of an environment, or of a program, "
        "and solves some of its tasks, for reinforcement learning to mend. Without --env and "
        "--program: the embedded policy.",
    )
    parser.add_argument("--env", help="Gymnasium id, as my_module:MyEnv-v0")
    parser.add_argument("--env_kwargs", help="its keyword arguments as JSON")
    parser.add_argument("--program", help="a program instead, as agent-r1-train takes it")
    parser.add_argument("--tasks", help="with --program: the file of its tasks")
    parser.add_argument("--reward", help="with --program: what scores its answers")
    parser.add_argument(
        "--oracle", help="with --program: my_module:my_function(task, messages), which returns "
        "what the model should say",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="folder to write; default: runs/tiny_policy")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    parser.add_argument(
        "--num_tasks", type=int, default=256, help="tasks whose reference is shown, at most"
    )
    parser.add_argument(
        "--num_steps", type=int, default=600, help="updates of supervised training, at most"
    )
    parser.add_argument(
        "--success", type=float, default=0.4,
        help="share of tasks to solve at most before reinforcement learning",
    )  # fmt: skip
    return parser


def _check_output(output: Path) -> None:
    """Refuse a folder that holds what is no tiny policy: another run's model, somebody's files."""
    is_another = output.is_dir() and any(output.iterdir())
    if is_another and not (output / MODEL_RECIPE).is_file():
        raise ConfigurationError(
            f"--output {output}: holds what is no tiny policy, and would be written over. Choose "
            "another folder."
        )
    check_writable(output, "--output")


if __name__ == "__main__":
    main()
