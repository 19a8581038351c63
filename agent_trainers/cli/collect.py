"""``agent-r1-eval collect``: sample episodes of each task and keep the best (rejection sampling).

Tasks run in portions. Each portion is saved when it is done, and the same command resumes after
the last one.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import check_range, notifier, parse
from agent_trainers.cli.environments import first_tasks
from agent_trainers.cli.output_folder import open_run, settings_of
from agent_trainers.cli.policies import (
    FittedEnvironment,
    PolicyArguments,
    check_episodes,
    check_output,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory, load_trajectories, save_trajectories

PROGRAM: Final = "agent-r1-eval collect"
notify = notifier(PROGRAM)


@dataclass
class CollectArguments(PolicyArguments):
    """Options of ``agent-r1-eval collect``."""

    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    samples_per_task: int = HfArg(default=4, help="Episodes of each task.")
    keep: int = HfArg(default=1, help="Largest number of episodes of a task to keep.")
    keep_failures: bool = HfArg(
        default=False, help="Keep the best episodes of a task even if none succeeds."
    )
    tasks_at_once: int = HfArg(default=16, help="Tasks per portion.")
    seed: int = HfArg(default=0, help="Random seed.")
    output: str = HfArg(
        default="collected.jsonl.gz", help="File of the kept episodes: .jsonl, .jsonl.gz, .parquet."
    )


def run(arguments: Sequence[str]) -> None:
    """Run the episodes, and write the best to one file."""
    options = parse(
        arguments, CollectArguments, program=PROGRAM, description="Keep the best episodes of tasks."
    )
    check_range(options, "at least 1", lambda value: value >= 1, "keep", "tasks_at_once")
    check_policy(options)
    check_output("--output", options.output, is_trajectories=True)
    output = Path(options.output)
    parts = output.with_name(f"{output.name}.parts")
    with open_portions(options, parts, "--output", output, notify) as environment:
        with open_policy(options, environment) as policy:

            def play(tasks: Sequence[int]) -> list[Trajectory]:
                with contextlib.closing(Rollout(environment.make_env, policy)) as rollout:
                    specs = plan_samples(tasks, options.samples_per_task, options.seed)
                    episodes = rollout.collect(specs)
                check_episodes(episodes)  # before saving, so that a failed portion runs again
                return _best(episodes, options)

            kept = [t for part in play_portions(options, environment, parts, play) for t in part]
        save_trajectories(output, kept)
    shutil.rmtree(parts)
    num_solved = len({t.group_id for t in kept if t.success})
    num_tasks = len(first_tasks(environment.facts.num_tasks, options.num_tasks))
    notify(f"{len(kept)} episodes of {num_tasks} tasks, {num_solved} of them solved: {output}")
    if kept:
        hint = f" --env {options.env}" if "tool_format" not in environment.env_kwargs else ""
        notify(f"Train on them with: agent-r1-sft --trajectories {output}{hint}")


@contextlib.contextmanager
def open_portions(
    options: Any, folder: Path, option: str, result: Path, notify: Callable[[str], None]
) -> Iterator[FittedEnvironment]:
    """Lock the folder of a command that plays in portions, and open its environment."""
    if result.exists():
        raise ConfigurationError(f"{option}: {result} exists. Choose another name.")
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    settings = settings_of({"env": options.env, "env_kwargs": env_kwargs}, options)
    with open_run(folder, settings, notify, resume=folder.is_dir(), option=option) as begin:
        environment = open_environment(options, notify)
        begin()
        yield environment


def play_portions(
    options: Any,
    environment: FittedEnvironment,
    parts: Path,
    play: Callable[[Sequence[int]], list[Trajectory]],
) -> Iterator[list[Trajectory]]:
    """Yield what `play` returns for each portion of the tasks, from a file if it was played."""
    tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
    with tqdm(total=len(tasks), unit="task") as bar:
        for first in range(0, len(tasks), options.tasks_at_once):
            portion = tasks[first : first + options.tasks_at_once]
            part = parts / f"{first // options.tasks_at_once:06d}.jsonl.gz"
            if not part.exists():
                save_trajectories(part, play(portion))
            yield load_trajectories(part)
            bar.update(len(portion))


def _best(episodes: Sequence[Trajectory], options: CollectArguments) -> list[Trajectory]:
    """Return the best episodes of each task: the highest return, then the shortest."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in episodes:
        if trajectory.is_scorable and (trajectory.success or options.keep_failures):
            by_task.setdefault(trajectory.group_id, []).append(trajectory)
    for group in by_task.values():
        group.sort(key=lambda t: (-t.success, -t.return_, len(t.transitions)))
    return [trajectory for group in by_task.values() for trajectory in group[: options.keep]]
