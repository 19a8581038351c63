"""``python -m agent_trainers.make_tiny_policy``."""

import argparse
import shlex
import sys
from pathlib import Path

from agent_envs.errors import AgentEnvsError
from agent_trainers.cli.arguments import json_object
from agent_trainers.cli.environments import environment_maker
from agent_trainers.make_tiny_policy import embedded, own
from agent_trainers.tiny_policy import TINY_POLICY


def main() -> None:
    """Make a policy, measure it, and save it."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_trainers.make_tiny_policy",
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
    options = parser.parse_args()
    if options.env is None:
        embedded.make(options.output or TINY_POLICY, options.seed)
        return
    output = options.output or Path("runs/tiny_policy")
    try:
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        reached = own.make(
            options.env,
            environment_maker(options.env, kwargs),
            output,
            seed=options.seed,
            num_tasks=options.num_tasks,
            num_steps=options.num_steps,
            success=options.success,
        )
    except AgentEnvsError as error:
        sys.exit(f"make_tiny_policy: {error}")
    sys.stdout.write(f"{output}: solves {reached:.0%} of tasks that it was not shown.\n")
    if reached == 0.0:
        sys.stdout.write(
            "Reinforcement learning would have nothing to reward: give it more --num_steps or "
            "--num_tasks, or make the first tasks easier.\n"
        )
    given = f" --env_kwargs {shlex.quote(options.env_kwargs)}" if options.env_kwargs else ""
    sys.stdout.write(f"Train it with: agent-r1-train --env {options.env}{given} --model {output}\n")


if __name__ == "__main__":
    main()
