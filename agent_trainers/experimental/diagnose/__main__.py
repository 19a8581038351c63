"""Find the step that lost each failed episode of a file.

``python -m agent_trainers.experimental.diagnose trajectories.jsonl`` continues from the state
before each step, by the oracle or a model, and writes a table, figures (JSON) and a page (HTML).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import json_object
from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import environment_maker, inspect_environment
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_output,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.cli.task_sources import evaluation_defaults
from agent_trainers.experimental.diagnose.diagnosis import (
    Diagnoses,
    Diagnosis,
    diagnose_by_policy,
    find_start,
)
from agent_trainers.experimental.diagnose.oracle import diagnose_by_oracle
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import TrajectorySample
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.diagnose"
ORACLE, MODEL = "oracle", "model"
_CONTINUED_BY: Final = {
    ORACLE: "the environment's reference actions",
    MODEL: "a model, sampled --k times from each state",
}
_ACTION_CHARS: Final = 48
_SUFFIX: Final = ".diagnosis"
notify = notifier(PROGRAM)


@dataclass
class DiagnoseArguments(PolicyArguments):
    """Options of the command."""

    trajectories: str | None = HfArg(
        default=None, help="File of episodes, as agent-r1-eval --trajectories writes it."
    )
    by: str = HfArg(
        default=ORACLE,
        help="What continues from each state. "
        + "; ".join(f"{n}: {m}" for n, m in _CONTINUED_BY.items())
        + ".",
    )
    k: int = HfArg(default=16, help="Continuations of each state, with --by model.")
    num_episodes: int | None = HfArg(
        default=None, help="Number of failed episodes, from the first; by default all."
    )
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output: str | None = HfArg(
        default=None, help="JSON file for the figures; by default next to the trajectories."
    )
    page: str | None = HfArg(default=None, help="HTML page; by default next to the trajectories.")


def run(arguments: Sequence[str]) -> None:
    """Diagnose the episodes of a file."""
    options = parse(
        name_file(arguments),
        DiagnoseArguments,
        program=PROGRAM,
        description="Name the step that lost each failed episode, by continuing from the state "
        "before each step.",
    )
    path = _check(options)
    rows = _read_failed(path, options)
    found = _diagnose(options, path, rows)
    stem = path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + _SUFFIX)
    output = Path(options.output or f"{stem}.json")
    page = Path(options.page or f"{stem}.html")
    numbers = [number for number, _ in rows]
    write_json(output, as_json(options, numbers, found))
    _write_page(page, options, numbers, found.episodes)
    _print_table(options, numbers, found)
    sys.stdout.write(f"Figures: {output}\nPage of all steps: {page}\n")


def name_file(arguments: Sequence[str]) -> list[str]:
    """Turn a leading file name into the option ``--trajectories``."""
    is_file = arguments and not arguments[0].startswith("-")
    return ["--trajectories", *arguments] if is_file else list(arguments)


def as_json(options: DiagnoseArguments, numbers: Sequence[int], found: Diagnoses) -> dict[str, Any]:
    """Return all figures; `numbers` are the rows of the episodes in the file."""
    return {
        "trajectories": options.trajectories,
        "env": options.env,
        "by": options.by,
        "model": options.model,
        "k": options.k if options.by == MODEL else None,
        "seed": options.seed,
        "environment_steps": found.environment_steps,
        "usage": asdict(found.usage),
        "episodes": [
            {
                "row": number,
                "task_id": diagnosis.trajectory.task_id,
                "return": diagnosis.trajectory.return_,
                "lost_step": None if diagnosis.lost_step is None else diagnosis.lost_step + 1,
                "drop": diagnosis.drop,
                "note": diagnosis.note,
                "steps": [
                    {"step": t + 1, "action": transition.action, **state._asdict()}
                    for t, (transition, state) in enumerate(
                        zip(diagnosis.trajectory.transitions, diagnosis.states, strict=False)
                    )
                ],
            }
            for number, diagnosis in zip(numbers, found.episodes, strict=True)
        ],
    }


def _check(options: DiagnoseArguments) -> Path:
    lookup(_CONTINUED_BY, options.by, kind="--by")
    if options.trajectories is None:
        raise ConfigurationError(f"Pass a file of episodes: {PROGRAM} trajectories.jsonl")
    check_range(options, "at least 1", lambda value: value >= 1, "k", "num_episodes")
    check_policy(options)
    if options.by == ORACLE and (options.model or options.base_url):
        raise ConfigurationError(
            "--model and --base_url need --by model; the oracle uses no model."
        )
    for name in ("output", "page"):
        if (path := getattr(options, name)) is not None:
            check_output(f"--{name}", path)
    return Path(options.trajectories)


def _read_failed(path: Path, options: DiagnoseArguments) -> list[tuple[int, Trajectory]]:
    """Return the failed episodes with their rows in the file, from 1."""
    rows = list(enumerate(load_trajectories(path), start=1))
    if not rows:
        raise DataError(f"{path}: contains no episodes.")
    for number, trajectory in rows:
        _check_fields(trajectory, f"{path}, row {number}")
    scored = [(number, t) for number, t in rows if t.is_scorable]
    for number, trajectory in scored:
        if "success" not in trajectory.metrics:
            raise DataError(
                f"{path}, row {number}: the episode's metrics have no 'success' (found: "
                f"{', '.join(trajectory.metrics) or 'none'}). The environment must report it."
            )
    if unscored := [str(number) for number, t in rows if not t.is_scorable]:
        notify(f"Skipping rows that could not be scored: {', '.join(unscored)}.")
    failed = [(number, t) for number, t in scored if not t.success]
    if not failed:
        raise DataError(
            f"{path}: none of the {len(rows)} episodes failed ({len(rows) - len(scored)} could not "
            "be scored)."
        )
    return failed[: options.num_episodes]


def _check_fields(trajectory: Trajectory, place: str) -> None:
    """Check the types of the fields that a replay needs."""
    is_right: dict[str, bool] = {
        "metrics": isinstance(trajectory.metrics, dict),
        "task": isinstance(trajectory.task, int | None),
        "seed": isinstance(trajectory.seed, int | None),
        "start": isinstance(trajectory.start, int),
    }
    for transition in trajectory.transitions:
        messages = transition.messages
        is_list = isinstance(messages, list) and bool(messages)
        is_right |= {
            "messages": is_list and all(isinstance(m, dict) and "content" in m for m in messages),
            "action": isinstance(transition.action, str),
            "reward": isinstance(transition.reward, int | float),
            "info": isinstance(transition.info, dict),
        }
        if not all(is_right.values()):
            break
    if wrong := [name for name, each in is_right.items() if not each]:
        raise DataError(
            f"{place}: field {wrong[0]!r} is not as agent-r1-eval --trajectories writes it."
        )


def _diagnose(
    options: DiagnoseArguments, path: Path, rows: Sequence[tuple[int, Trajectory]]
) -> Diagnoses:
    make_env = _find_environment(options, [trajectory for _, trajectory in rows])
    located: list[Trajectory] = []
    unknown: dict[int, str] = {}
    env = make_env()
    try:
        for number, trajectory in rows:
            try:
                located.append(find_start(env, trajectory))
            except DataError as error:
                unknown[number] = str(error)
    finally:
        env.close()
    if not located:
        number, reason = next(iter(unknown.items()))
        raise DataError(f"{path}, row {number}: {reason}")
    found = _continue(options, make_env, located)
    each = iter(found.episodes)
    episodes = [
        Diagnosis(trajectory=trajectory, note=unknown[number]) if number in unknown else next(each)
        for number, trajectory in rows
    ]
    return replace(found, episodes=episodes)


def _continue(
    options: DiagnoseArguments, make_env: Callable[[], Any], failed: Sequence[Trajectory]
) -> Diagnoses:
    if options.by == ORACLE:
        return diagnose_by_oracle(make_env, failed)
    environment = open_environment(options, notify, **evaluation_defaults(options.env))
    with open_policy(options, environment) as policy:
        rng = np.random.default_rng(options.seed)
        return diagnose_by_policy(environment.make_env, policy, failed, k=options.k, rng=rng)


def _find_environment(
    options: DiagnoseArguments, recorded: Sequence[Trajectory]
) -> Callable[[], Any]:
    """Return a maker of the environment in the tool format of the recorded episodes."""
    kwargs = evaluation_defaults(options.env) | json_object(options.env_kwargs, "--env_kwargs")
    if options.tool_format:
        kwargs["tool_format"] = options.tool_format
    make_env = environment_maker(options.env, kwargs)
    infos = [t.info for trajectory in recorded for t in trajectory.transitions[:1]]
    then = infos[0].get("tool_format") if infos else None
    now = inspect_environment(make_env, options.env).states[0].get("tool_format")
    if then in (None, now) or "tool_format" in kwargs:
        return make_env
    notify(f"Using --tool_format {then}, as in the recorded episodes.")
    options.tool_format = str(then)
    return environment_maker(options.env, {**kwargs, "tool_format": then})


def _write_page(
    path: Path,
    options: DiagnoseArguments,
    numbers: Sequence[int],
    diagnoses: Sequence[Diagnosis],
) -> None:
    samples = [
        TrajectorySample(
            label=f"row {number}",
            trajectory=diagnosis.trajectory,
            optimiser_step=0,
            diagnosis=diagnosis,
        )
        for number, diagnosis in zip(numbers, diagnoses, strict=True)
    ]
    title = f"Which step lost it? {options.env}, continued by {_name(options)}"
    write_trajectory_page(path, samples, tokenizer=None, title=title)


def _print_table(options: DiagnoseArguments, numbers: Sequence[int], found: Diagnoses) -> None:
    diagnoses = found.episodes
    table = Table(
        Column("row", justify="right"), "task", Column("lost at", no_wrap=True),
        Column("chance", no_wrap=True), Column("drop, 95 %", no_wrap=True), "action",
        title=f"Chance of success, continued by {_name(options)}",
    )  # fmt: skip
    for number, diagnosis in zip(numbers, diagnoses, strict=True):
        table.add_row(str(number), diagnosis.trajectory.task_id, *_cells(diagnosis))
    named = sum(diagnosis.lost_step is not None for diagnosis in diagnoses)
    table.caption = f"{len(diagnoses)} failed episodes, {named} with a named step"
    for note in sorted({diagnosis.note for diagnosis in diagnoses if diagnosis.note}):
        count = sum(diagnosis.note == note for diagnosis in diagnoses)
        table.caption += f"\n{count} without a named step: {note}"
    table.caption += f"\nCost: {found.environment_steps:,} environment steps"
    if options.by == MODEL:
        usage = found.usage
        tokens = f"{usage.prompt_tokens:,} prompt and {usage.completion_tokens:,} completion tokens"
        table.caption += f", {usage.calls:,} model turns, {tokens}"
    Console().print(table)


def _cells(diagnosis: Diagnosis) -> list[str]:
    trajectory, lost = diagnosis.trajectory, diagnosis.lost_step
    if lost is None or diagnosis.drop is None:
        return ["none", "", "", ""]
    before, (drop, low, high) = diagnosis.states[lost].chance, diagnosis.drop
    action = " ".join(trajectory.transitions[lost].action.split())
    shown = action if len(action) <= _ACTION_CHARS else f"{action[:_ACTION_CHARS]}…"
    return [
        f"{lost + 1} of {len(trajectory.transitions)}",
        f"{before:.2f} to {before - drop:.2f}",
        f"{low:.2f} to {high:.2f}",
        shown.encode("utf-8", "replace").decode("utf-8"),
    ]


def _name(options: DiagnoseArguments) -> str:
    if options.by == ORACLE:
        return "the oracle"
    return options.model or "the embedded policy"


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
