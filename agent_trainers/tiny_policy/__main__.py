"""Make a tiny policy for an environment: ``python -m agent_trainers.tiny_policy``."""

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import check_range, run_command
from agent_trainers.cli.environments import inspect_environment
from agent_trainers.recipes import MODEL_RECIPE

PROGRAM: Final = "python -m agent_trainers.tiny_policy"


def run(arguments: Sequence[str]) -> None:
    """Make a policy that knows an environment's words and some of its answers, and save it."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=run.__doc__)
    add = parser.add_argument
    add("--env", required=True, help="Gymnasium id, such as my_module:MyEnv-v0")
    add("--env_kwargs", help="the environment's keyword arguments as JSON")
    add("--output", type=Path, default=Path("runs/tiny_policy"), help="folder to write")
    add("--seed", type=int, default=0, help="seed of weights and demonstrations")
    add("--num_tasks", type=int, default=256, help="demonstrated tasks at most")
    add("--num_steps", type=int, default=600, help="updates of supervised training at most")
    add("--success", type=float, default=0.4,
        help="success at most before reinforcement learning")  # fmt: skip
    options = parser.parse_args(arguments)
    check_range(options, "at least 1", lambda value: value >= 1, "num_tasks", "num_steps")
    check_range(options, "in [0, 1]", lambda value: 0 <= value <= 1, "success")
    output = options.output
    if output.is_dir() and any(output.iterdir()) and not (output / MODEL_RECIPE).is_file():
        raise ConfigurationError(
            f"--output {output}: exists and is not a tiny policy. Choose another folder."
        )
    check_writable(output, "--output")
    from agent_trainers.tiny_policy import make  # imports torch

    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    source = make.EnvironmentSource(inspect_environment(options.env, env_kwargs))
    reached = make.make_tiny_policy(
        source, output, seed=options.seed, num_tasks=options.num_tasks,
        num_steps=options.num_steps, success=options.success,
    )  # fmt: skip
    sys.stdout.write(f"{output}: solves {reached:.0%} of held-out tasks.\n")
    if reached == 0.0:
        sys.stdout.write(
            "Reinforcement learning would have nothing to reward: increase --num_steps or "
            "--num_tasks, or make the first tasks easier.\n"
        )
    kwargs = f" --env_kwargs {shlex.quote(options.env_kwargs)}" if options.env_kwargs else ""
    sys.stdout.write(
        f"Train it with: agent-r1-train --env {options.env}{kwargs} --model {output}\n"
    )


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""

if __name__ == "__main__":
    main()
