"""Find the step that lost each failed episode of a file.

``python -m agent_trainers.experimental.diagnose trajectories.jsonl`` tries the environment's
reference actions from the states of each episode, and writes a table and a page.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.cli.environments import (
    DEFAULT_ENV,
    environment_maker,
    evaluation_defaults,
    inspect_environment,
)
from agent_trainers.experimental.diagnose.oracle import Diagnosis, diagnose_by_oracle
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import TrajectorySample
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.diagnose"
_ACTION_CHARS: Final = 48
notify = notifier(PROGRAM)


@dataclass
class DiagnoseArguments:
    """Options of the command."""

    trajectories: str | None = HfArg(
        default=None, help="File of episodes, as agent-r1-eval --trajectories writes it."
    )
    env: str = HfArg(default=DEFAULT_ENV, help="Gymnasium id of their environment.")
    env_kwargs: str | None = HfArg(
        default=None, help="Its keyword arguments as JSON; by default those of agent-r1-eval."
    )


def run(arguments: Sequence[str]) -> None:
    """Diagnose the episodes of a file."""
    options = parse(
        name_file(arguments),
        DiagnoseArguments,
        program=PROGRAM,
        description="Name the step that lost each failed episode, by trying the reference actions "
        "from its states.",
    )
    if options.trajectories is None:
        raise ConfigurationError(f"Pass a file of episodes: {PROGRAM} trajectories.jsonl")
    path = Path(options.trajectories)
    rows = _read_failed(path)
    failed = [trajectory for _, trajectory in rows]
    numbers = [number for number, _ in rows]
    found = diagnose_by_oracle(_find_environment(options, failed), failed)
    stem = path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + ".diagnosis")
    samples = [
        TrajectorySample(label=f"row {number}", trajectory=each.trajectory, diagnosis=each)
        for number, each in zip(numbers, found, strict=True)
    ]
    title = f"Which step lost it? {options.env}"
    write_trajectory_page(f"{stem}.html", samples, tokenizer=None, title=title)
    for number, each in zip(numbers, found, strict=True):
        sys.stdout.write(f"row {number}, {each.trajectory.task_id}: {_describe(each)}\n")
    num_named = sum(each.lost_step is not None for each in found)
    sys.stdout.write(f"{len(found)} failed episodes, {num_named} with a named step\n")
    sys.stdout.write(f"Page of all steps: {stem}.html\n")


def name_file(arguments: Sequence[str]) -> list[str]:
    """Turn a leading file name into the option ``--trajectories``."""
    is_file = arguments and not arguments[0].startswith("-")
    return ["--trajectories", *arguments] if is_file else list(arguments)


def _read_failed(path: Path) -> list[tuple[int, Trajectory]]:
    """Return the failed episodes with their rows in the file, from 1."""
    rows = list(enumerate(load_trajectories(path), start=1))
    scored = [(n, t) for n, t in rows if t.is_scorable and "success" in t.metrics]
    failed = [(number, t) for number, t in scored if not t.success]
    if not failed:
        raise DataError(
            f"{path}: none of the {len(rows)} episodes failed ({len(rows) - len(scored)} could not "
            "be scored, or have no metric 'success')."
        )
    return failed


def _find_environment(options: DiagnoseArguments, recorded: Sequence[Trajectory]) -> MakeEnv:
    """Return a maker of the environment in the tool format of the recorded episodes."""
    kwargs = evaluation_defaults(options.env) | json_object(options.env_kwargs, "--env_kwargs")
    make_env = environment_maker(options.env, kwargs)
    then = recorded[0].transitions[0].info.get("tool_format")
    now = inspect_environment(make_env, options.env).states[0].get("tool_format")
    if then in (None, now) or "tool_format" in kwargs:
        return make_env
    notify(f"The tool format is {then}, as in the recorded episodes.")
    return environment_maker(options.env, {**kwargs, "tool_format": then})


def _describe(diagnosis: Diagnosis) -> str:
    steps, lost = diagnosis.trajectory.transitions, diagnosis.lost_step
    if lost is None:
        return diagnosis.note
    action = " ".join(steps[lost].action.split()).encode("utf-8", "replace").decode("utf-8")
    return f"lost at {lost + 1} of {len(steps)}, {action[:_ACTION_CHARS]}"


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
