"""``agent-r1-eval``: evaluate a language model in an environment, or in a program.

``agent-r1-eval collect`` keeps the best episodes for ``agent-r1-sft`` (rejection sampling). Its
tasks run in portions that are saved when they are done; the same command resumes after the last.
"""

import contextlib
import functools
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import (
    ProgramArguments,
    check_program,
    evaluation_defaults,
    first_tasks,
)
from agent_trainers.cli.output_folder import open_run, settings_of
from agent_trainers.cli.policies import (
    EMBEDDED,
    PolicyArguments,
    check_episodes,
    check_output,
    open_environment,
    open_policy,
    take_turn_length,
)
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import Evaluation, evaluate, plan_samples
from agent_trainers.trajectory import Trajectory, load_trajectories, save_trajectories

PROGRAM: Final = "agent-r1-eval"
notify = notifier(PROGRAM)


@dataclass
class EvaluateArguments(ProgramArguments, PolicyArguments):
    """Options of ``agent-r1-eval``."""

    samples_per_task: int = HfArg(default=1, help="Episodes of each task.")
    pass_at: list[int] | None = HfArg(
        default=None, help="Values of k for pass@k; 1 and samples_per_task if not given."
    )
    output: str | None = HfArg(default=None, help="JSON file to write.")
    trajectories: str | None = HfArg(
        default=None, help="File for every episode: .jsonl, .jsonl.gz, .parquet."
    )


@dataclass
class CollectArguments(PolicyArguments):
    """Options of ``agent-r1-eval collect``."""

    samples_per_task: int = HfArg(default=4, help="Episodes of each task.")
    keep: int = HfArg(default=1, help="Largest number of episodes of a task to keep.")
    keep_failures: bool = HfArg(
        default=False, help="Keep the best episodes of a task even if none succeeds."
    )
    tasks_at_once: int = HfArg(default=16, help="Tasks per portion.")
    output: str = HfArg(
        default="collected.jsonl.gz", help="File of the kept episodes: .jsonl, .jsonl.gz, .parquet."
    )


def run(arguments: Sequence[str]) -> None:
    """Evaluate the model, write the files and print the table."""
    if arguments[:1] == ["collect"]:
        collect(arguments[1:])
        return
    options = parse(
        arguments,
        EvaluateArguments,
        program=PROGRAM,
        description="Evaluate a language model in a Gymnasium environment, or in a program. "
        f"{PROGRAM} collect keeps the best episodes; see {PROGRAM} collect --help.",
    )
    check_program(options)
    if options.output is not None:
        check_output("--output", options.output)
    if options.trajectories is not None:
        check_output("--trajectories", options.trajectories, is_trajectories=True)
    ks = options.pass_at or sorted({1, options.samples_per_task})
    if not 1 <= min(ks) <= max(ks) <= options.samples_per_task:
        raise ConfigurationError(
            f"--pass_at: k is from 1 to --samples_per_task {options.samples_per_task}, not {ks}."
        )
    settings: dict[str, Any] = {"samples_per_task": options.samples_per_task, "seed": options.seed}
    if options.program is not None:
        source = options.program_tasks(options.tasks)
        tasks = first_tasks(source.num_tasks, options.num_tasks)
        take_turn_length(options, notify)
        with open_policy(options) as policy:
            evaluation = evaluate(source.make_rollout(policy), tasks, ks=ks, **settings)
        where = {name: getattr(options, name) for name in ("program", "tasks", "reward")}
    else:
        environment = open_environment(options, notify, **evaluation_defaults(options.env))
        tasks = first_tasks(environment.num_tasks, options.num_tasks)
        with open_policy(options, environment) as policy:
            rollout = Rollout(environment.make_env, policy)
            evaluation = evaluate(rollout, tasks, ks=ks, **settings)
        where = {"env": options.env, "env_kwargs": environment.env_kwargs}
    if options.output:
        sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        write_json(
            options.output,
            {
                "model": options.model or EMBEDDED,
                "base_url": options.base_url,
                **where,
                "sampling": "greedy" if options.greedy else sampling,
                "max_completion_length": options.max_completion_length,
                **settings,
                "num_tasks": len({t.group_id for t in evaluation.trajectories}),
                "num_failed": evaluation.num_failed,
                "success_of_all": evaluation.success_of_all,
                "usage": asdict(evaluation.usage),
                "metrics": evaluation.metrics,
                "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
            },
        )
    if options.trajectories:
        save_trajectories(options.trajectories, evaluation.trajectories)
    _print_table(options, evaluation)
    check_episodes(evaluation.trajectories)


def _print_table(options: EvaluateArguments, evaluation: Evaluation) -> None:
    title = f"{options.model or EMBEDDED} on {options.program or options.env}"
    mean = Column("mean", justify="right")
    table = Table("metric", mean, "95 % interval", title=title, min_width=60)
    num_errors, num_episodes = evaluation.num_failed, len(evaluation.trajectories)
    for name, value in evaluation.metrics.items():
        interval = ""
        if name == "success" and options.samples_per_task == 1 and num_episodes > num_errors:
            low, high = wilson_interval(value, num_episodes - num_errors)
            interval = f"{low:.3f} to {high:.3f}"
        table.add_row(name, f"{value:.3f}", interval)
        if name == "success" and num_errors:  # otherwise errors could be read as success
            table.add_row("  of all, errors as failures", f"{evaluation.success_of_all:.3f}")
            table.add_row("  errors: episodes not scored", f"{num_errors} of {num_episodes}")
    for k, value in evaluation.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{value:.3f}")
    usage = evaluation.usage
    table.caption = (
        f"{num_episodes} episodes, {num_errors} errors; {usage.calls} model turns, "
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
    )
    Console().print(table)


def collect(arguments: Sequence[str]) -> None:
    """Run episodes of each task, and write the best to one file."""
    options = parse(
        arguments,
        CollectArguments,
        program=f"{PROGRAM} collect",
        description="Keep the best episodes of tasks.",
    )
    check_range(options, "at least 1", lambda value: value >= 1, "keep", "tasks_at_once")
    check_output("--output", options.output, is_trajectories=True)
    output = Path(options.output)
    if output.exists():
        raise ConfigurationError(f"--output: {output} exists. Choose another name.")
    parts = output.with_name(f"{output.name}.parts")
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    settings = settings_of({"env": options.env, "env_kwargs": env_kwargs}, options)
    kept: list[Trajectory] = []
    with open_run(parts, settings, notify, resume=parts.is_dir(), option="--output") as begin:
        environment = open_environment(options, notify)
        begin()
        tasks = first_tasks(environment.num_tasks, options.num_tasks)
        with open_policy(options, environment) as policy:
            for first in tqdm(range(0, len(tasks), options.tasks_at_once), unit="portion"):
                part = parts / f"{first:06d}.jsonl.gz"
                if not part.exists():
                    portion = tasks[first : first + options.tasks_at_once]
                    specs = plan_samples(portion, options.samples_per_task, options.seed)
                    with contextlib.closing(Rollout(environment.make_env, policy)) as rollout:
                        episodes = rollout.collect(specs)
                    check_episodes(episodes)  # before saving, so that a failed portion runs again
                    save_trajectories(part, _best(episodes, options))
                kept += load_trajectories(part)
        save_trajectories(output, kept)
    shutil.rmtree(parts)
    num_solved = len({t.group_id for t in kept if t.success})
    notify(f"{len(kept)} episodes of {len(tasks)} tasks, {num_solved} of them solved: {output}")
    if kept:
        hint = f" --env {options.env}" if "tool_format" not in environment.env_kwargs else ""
        notify(f"Train on them with: agent-r1-sft --trajectories {output}{hint}")


def _best(episodes: Sequence[Trajectory], options: CollectArguments) -> list[Trajectory]:
    """Return the best episodes of each task: the highest return, then the shortest."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in episodes:
        if trajectory.is_scorable and (trajectory.success or options.keep_failures):
            by_task.setdefault(trajectory.group_id, []).append(trajectory)
    for group in by_task.values():
        group.sort(key=lambda t: (-t.success, -t.return_, len(t.transitions)))
    return [trajectory for group in by_task.values() for trajectory in group[: options.keep]]


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""

if __name__ == "__main__":
    main()
