"""``python -m agent_trainers.make_tiny_policy``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import check_range, json_object, refuse, run_command
from agent_trainers.cli.environments import environment_maker, look_at
from agent_trainers.recipes import MODEL_RECIPE
from agent_trainers.tiny_policy import TINY_POLICY

PROGRAM: Final = "python -m agent_trainers.make_tiny_policy"


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
    if options.env is None:
        if options.env_kwargs is not None:
            raise ConfigurationError("--env_kwargs goes with --env.")
        from agent_trainers.make_tiny_policy import embedded

        embedded.make(options.output or TINY_POLICY, options.seed)
        return
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    make_env = environment_maker(options.env, kwargs)
    output = options.output or Path("runs/tiny_policy")
    _check_output(output)
    look_at(make_env, options.env)
    from agent_trainers.make_tiny_policy import own

    reached = own.make(
        options.env,
        make_env,
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
    given = f" --env_kwargs {shlex.quote(options.env_kwargs)}" if options.env_kwargs else ""
    sys.stdout.write(f"Train it with: agent-r1-train --env {options.env}{given} --model {output}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Make a tiny policy that knows the words of an environment and solves some of "
        "its tasks, for reinforcement learning to mend. Without --env: the embedded policy.",
    )
    parser.add_argument("--env", help="Gymnasium id, as my_module:MyEnv-v0")
    parser.add_argument("--env_kwargs", help="its keyword arguments as JSON")
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
