"""``agent-r1-collect``: play tasks and keep the best episodes, to learn from them (`agent-r1-sft`).

Rejection sampling: several episodes of each task by any model or server, of which those that
succeed, or the best of them, are kept. Tasks are played in portions, each kept as a file of its own
as soon as it is done; the same command goes on after the last.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import check_range, parse, run_command, speaker
from agent_trainers.cli.environments import first_tasks
from agent_trainers.cli.output_folder import differences, hold, settings_of, write_settings
from agent_trainers.cli.policies import (
    PolicyArguments,
    Venue,
    check_output,
    check_played,
    check_policy,
    open_policy,
    open_venue,
)
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory, load_trajectories, save_trajectories

PROGRAM: Final = "agent-r1-collect"
say = speaker(PROGRAM)


@dataclass
class CollectArguments(PolicyArguments):
    """What to play, and what to keep."""

    num_tasks: int = HfArg(default=200, help="How many tasks, from the first.")
    samples_per_task: int = HfArg(default=4, help="Episodes of each task.")
    keep: int = HfArg(default=1, help="Episodes of a task that are kept at most, the best ones.")
    keep_failures: bool = HfArg(
        default=False, help="Keep the best episodes of a task even if none succeeds."
    )
    tasks_at_once: int = HfArg(default=16, help="Tasks of a portion.")
    seed: int = HfArg(default=0, help="Seed of every draw.")
    output: str = HfArg(
        default="collected.jsonl.gz", help="File of the kept episodes: .jsonl, .jsonl.gz, .parquet."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, run, arguments)


def run(arguments: Sequence[str]) -> None:
    """Play, keep the best, and write them to one file."""
    options = parse(
        arguments, CollectArguments, program=PROGRAM, description="Play tasks and keep the best."
    )
    check_range(options, "at least 1", lambda value: value >= 1, "num_tasks", "samples_per_task",
                "keep", "tasks_at_once")  # fmt: skip
    check_policy(options)
    check_output("--output", options.output, is_trajectories=True)
    output = Path(options.output)
    parts = output.with_name(f"{output.name}.parts")
    with hold(parts, "--output"):
        if output.exists():
            raise ConfigurationError(f"--output {output} is there already. Choose another name.")
        env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
        settings = settings_of({"env": options.env, "env_kwargs": env_kwargs}, options)
        if differing := differences(parts, settings):
            raise ConfigurationError(  # portions would not belong together
                f"{parts} was begun with other settings ({'; '.join(differing.values())}). Give "
                "the same again, choose another --output, or delete that folder."
            )
        venue = open_venue(options, say)
        write_settings(parts, settings)
        num_kept = _collect(options, venue, parts)
    shutil.rmtree(parts)
    if num_kept == 0:
        return
    hint = f" --env {options.env}" if "tool_format" not in venue.env_kwargs else ""
    say(f"Learn from them with: agent-r1-sft --trajectories {output}{hint}")


def _collect(options: CollectArguments, venue: Venue, parts: Path) -> int:
    """Play what is not played yet, a portion after the other; write the best, return how many."""
    tasks = first_tasks(venue.look.num_tasks, options.num_tasks)
    portions = [
        tasks[i : i + options.tasks_at_once] for i in range(0, len(tasks), options.tasks_at_once)
    ]
    num_solved = num_played = 0
    kept: list[Trajectory] = []
    with open_policy(options, venue) as policy, tqdm(total=len(tasks), unit="task") as bar:
        for number, portion in enumerate(portions):
            part = parts / f"{number:06d}.jsonl.gz"
            if not part.exists():
                rollout = Rollout(venue.make_env, policy)
                played = rollout.collect(
                    plan_samples(portion, options.samples_per_task, options.seed)
                )
                rollout.close()
                check_played(played)  # before they are kept: a server that is back plays them again
                save_trajectories(part, _best(played, options))
            best = load_trajectories(part)
            kept += best
            num_played += len(portion)
            num_solved += len({t.group_id for t in best if t.success})
            bar.update(len(portion))
            bar.set_postfix(solved=f"{num_solved / num_played:.2f}")
    save_trajectories(options.output, kept)
    say(
        f"{len(kept)} episodes of {num_played} tasks, {num_solved} of them solved: {options.output}"
    )
    return len(kept)


def _best(played: Sequence[Trajectory], options: CollectArguments) -> list[Trajectory]:
    """Return the best episodes of each task: the highest return, of those the shortest."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in played:
        if trajectory.is_scorable and (trajectory.success or options.keep_failures):
            by_task.setdefault(trajectory.group_id, []).append(trajectory)
    return [
        trajectory
        for group in by_task.values()
        for trajectory in sorted(group, key=lambda t: (-t.success, -t.return_, len(t.transitions)))[
            : options.keep
        ]
    ]


if __name__ == "__main__":
    main()
