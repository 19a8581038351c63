"""Time until the default run reaches 90 % success, compared with another version.

``python -m benchmarks.performance.time_to_success --against REF`` trains with the default recipe of
this checkout and of the Git reference, interleaved and with the same seeds. The checkpoints of both
are evaluated on the same held-out tasks: two hops in the first phrasing, which every version trains
on. Seconds are those of the optimiser steps until the first of two consecutive checkpoints that
solve 90 %.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.performance.interleaved import measure_interleaved
from benchmarks.performance.models import ENVIRONMENT

GOAL: Final = 0.9
CONSECUTIVE: Final = 2
PARTS: Final = ("time/rollout_seconds", "time/score_seconds", "time/train_seconds")
ROLLOUT_PARTS: Final = ("time/generate_seconds", "time/environment_seconds")
RESULT: Final = "two_hops.json"
"""Evaluation in the folder of a checkpoint."""
_TRAIN: Final = "from agent_trainers.cli.commands import train; train()"
_EVALUATE: Final = f"""
import json
import sys

from agent_trainers.cli.commands import evaluate

start = sys.argv.index("--env")
folders, options = sys.argv[1:start], sys.argv[start:]
consecutive = 0
for folder in folders:
    result = folder + "/{RESULT}"
    sys.argv = ["agent-r1-eval", "--model", folder, "--output", result, *options]
    evaluate()
    is_at_goal = json.load(open(result))["metrics"]["success"] >= {GOAL}
    consecutive = consecutive + 1 if is_at_goal else 0
    if consecutive == {CONSECUTIVE}:
        break
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", required=True, help="Git reference of the other version")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num_tasks", type=int, default=300, help="held-out tasks")
    parser.add_argument("--every", type=int, default=2, help="optimiser steps between checkpoints")
    parser.add_argument("--options", default="", help="further options of agent-r1-train, for both")
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        check_out(root, options.against, other)
        sides = {
            name: partial(_train, checkout, Path(folder) / name, iter(options.seeds), options)
            for name, checkout in (("this", root), (options.against, other))
        }
        runs = measure_interleaved(sides, len(options.seeds), description="training")
    sys.stdout.write(report(runs))
    if options.output is not None:
        write_json(options.output, {"seeds": options.seeds, "runs": runs})


def check_out(root: Path, reference: str, folder: Path) -> None:
    """Write the packages of a Git reference into `folder`."""
    folder.mkdir(parents=True)
    archive = ["git", "archive", reference, "agent_envs", "agent_trainers"]
    packed = subprocess.run(archive, cwd=root, check=True, capture_output=True).stdout  # noqa: S603
    subprocess.run(["tar", "-x"], cwd=folder, input=packed, check=True)  # noqa: S607


def summarize(steps: Sequence[Mapping[str, float]], solved: Mapping[int, float]) -> dict[str, Any]:
    """Return when the goal was reached, or None, and the seconds by part.

    Args:
        steps: Logged metrics of each optimiser step.
        solved: Success by number of steps, of the evaluated checkpoints.
    """
    seconds = list(itertools.accumulate(sum(step[part] for part in PARTS) for step in steps))
    numbers = sorted(solved)
    reached = None
    for i in range(len(numbers) - CONSECUTIVE + 1):
        if all(solved[number] >= GOAL for number in numbers[i : i + CONSECUTIVE]):
            reached = {"steps": numbers[i], "seconds": seconds[numbers[i] - 1]}
            break
    return {
        "reached": reached,
        "seconds": seconds[-1],
        "steps": len(steps),
        "solved": {str(number): solved[number] for number in numbers},
        "seconds_per_step": {
            part.removeprefix("time/").removesuffix("_seconds"): statistics.fmean(
                step.get(part, 0.0) for step in steps
            )
            for part in (*PARTS, *ROLLOUT_PARTS)
        },
    }


def report(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table, and the ratio of both versions."""
    lines = [
        [
            name,
            str(run["seed"]),
            "never" if run["reached"] is None else f"{run['reached']['seconds']:.1f}",
            "" if run["reached"] is None else str(run["reached"]["steps"]),
            f"{100 * run['held_out_success']:.1f} %",
            *(f"{value:.3f}" for value in run["seconds_per_step"].values()),
        ]
        for name, own in runs.items()
        for run in own
    ]
    parts = [f"{p} s/step" for p in next(iter(runs.values()))[0]["seconds_per_step"]]
    head = ["version", "seed", "seconds to 90 %", "steps", "held out", *parts]
    pairs = [
        a["reached"]["seconds"] / b["reached"]["seconds"]
        for a, b in zip(*runs.values(), strict=True)
        if a["reached"] and b["reached"]
    ]
    ratio = "No seed reached 90 % in both versions."
    if pairs:
        ratio = (
            "Ratio of seconds to 90 %, this version to the other, by seed: "
            f"{' '.join(f'{r:.2f}' for r in pairs)}; median {statistics.median(pairs):.2f}."
        )
    return f"{markdown_table(head, lines)}\n\n{ratio}\n"


def _train(
    checkout: Path, folder: Path, seeds: Iterator[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Train a version with the next seed and evaluate its checkpoints."""
    seed = next(seeds)
    output = folder.with_name(f"{folder.name}-{seed}")
    _run(
        checkout, _TRAIN, "--seed", str(seed), "--output_dir", str(output), "--num_eval_tasks", "0",
        "--save_strategy", "steps", "--save_steps", str(options.every),
        "--save_total_limit", "1000", *options.options.split(),
    )  # fmt: skip
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if PARTS[0] in row]
    saved = {int(path.name.rpartition("-")[2]): path for path in output.glob("*-*[0-9]")}
    tasks = ("--env", ENVIRONMENT, "--env_kwargs", '{"split": "test"}',
             "--num_tasks", str(options.num_tasks))  # fmt: skip
    _run(checkout, _EVALUATE, *(str(saved[number]) for number in sorted(saved)), *tasks)
    _run(checkout, _EVALUATE, str(output), *tasks)
    solved = {n: _success(path) for n, path in saved.items() if (path / RESULT).exists()}
    return summarize(steps, solved) | {"seed": seed, "held_out_success": _success(output)}


def _run(checkout: Path, program: str, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    subprocess.run(  # noqa: S603 - this interpreter, our own module
        [sys.executable, "-c", program, *arguments],
        cwd=checkout, env=environment, check=True, capture_output=True,
    )  # fmt: skip


def _success(folder: Path) -> float:
    metrics = json.loads((folder / RESULT).read_text(encoding="utf-8"))["metrics"]
    return float(metrics["success"])


if __name__ == "__main__":
    main()
