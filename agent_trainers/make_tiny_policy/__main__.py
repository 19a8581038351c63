"""``python -m agent_trainers.make_tiny_policy``."""

import argparse
import shlex
import sys
from pathlib import Path

from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.cli.arguments import json_object
from agent_trainers.cli.environments import environment_maker, see_modules_here
from agent_trainers.make_tiny_policy import embedded, own
from agent_trainers.make_tiny_policy.lessons import EnvironmentLessons, Lessons, ProgramLessons
from agent_trainers.programs import ProgramTasks
from agent_trainers.tiny_policy import TINY_POLICY


def main() -> None:
    """Make a policy, measure it, and save it."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_trainers.make_tiny_policy",
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
    options = parser.parse_args()
    if options.env is None and options.program is None:
        embedded.make(options.output or TINY_POLICY, options.seed)
        return
    output = options.output or Path("runs/tiny_policy")
    try:
        lessons = _lessons(options)
        reached = own.make(
            lessons,
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
    sys.stdout.write(f"Train it with: agent-r1-train {lessons.options} --model {output}\n")


def _lessons(options: argparse.Namespace) -> Lessons:
    given = {
        name: value
        for name in ("env", "env_kwargs", "program", "tasks", "reward")
        if (value := getattr(options, name)) is not None
    }
    words = " ".join(f"--{name} {shlex.quote(value)}" for name, value in given.items())
    if options.env is not None:
        kwargs = json_object(options.env_kwargs, "--env_kwargs")
        return EnvironmentLessons(words, environment_maker(options.env, kwargs))
    if options.tasks is None or options.oracle is None:
        raise ConfigurationError("--program needs --tasks and --oracle.")
    see_modules_here()
    source = ProgramTasks(options.program, options.tasks, reward=options.reward)
    return ProgramLessons(words, source, lookup_or_import({}, options.oracle, kind="oracle"))


if __name__ == "__main__":
    main()
