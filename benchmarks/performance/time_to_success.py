"""Time until the default run reaches 90 % success, compared with another version.

``python -m benchmarks.performance.time_to_success --against REF`` trains with the default recipe of
this checkout and of the Git reference, interleaved and with the same seeds. The checkpoints of both
are evaluated on the same held-out tasks: two hops in the first phrasing, which every version trains
on. Seconds are those of the optimiser steps until the first of two consecutive checkpoints that
solve 90 %. Each run is printed as a line of JSON.
"""

import argparse
import functools
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.core.command_line import CommandLineParser, positive_int
from benchmarks.performance.interleaved import measure_interleaved
from benchmarks.performance.models import ENVIRONMENT

GOAL: Final = 0.9
_TIMES: Final = ("rollout", "generate", "environment", "score", "train")
_OF_A_STEP: Final = ("rollout", "score", "train")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", required=True, help="Git reference of the other version")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num_tasks", type=positive_int, default=300, help="held-out tasks")
    parser.add_argument(
        "--every", type=positive_int, default=2, help="optimiser steps between checkpoints"
    )
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        archive = ["git", "archive", options.against, "agent_envs", "agent_trainers"]
        packed = subprocess.run(archive, cwd=root, check=True, capture_output=True).stdout  # noqa: S603
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(other, filter="data")
        sides = {
            name: functools.partial(_train, name, checkout, iter(options.seeds), options)
            for name, checkout in (("this", root), (options.against, other))
        }
        measure_interleaved(sides, len(options.seeds), description="training")


def summarize(steps: Sequence[Mapping[str, float]], solved: Mapping[int, float]) -> dict[str, Any]:
    """Return when the goal was reached, or None, and the mean seconds of a step by part.

    Args:
        steps: Logged metrics of each optimiser step.
        solved: Success by number of steps, of the evaluated checkpoints.
    """
    means = {n: statistics.fmean(s.get(f"time/{n}_seconds", 0.0) for s in steps) for n in _TIMES}
    of_steps = (sum(s[f"time/{n}_seconds"] for n in _OF_A_STEP) for s in steps)
    seconds = list(itertools.accumulate(of_steps))
    pairs = itertools.pairwise(sorted(solved))
    reached = next((a for a, b in pairs if solved[a] >= GOAL and solved[b] >= GOAL), None)
    return {
        "reached": reached and {"steps": reached, "seconds": seconds[reached - 1]},
        "solved": solved,
        "seconds_per_step": means,
    }


def _train(name: str, checkout: Path, seeds: Iterator[int], options: argparse.Namespace) -> None:
    """Train a version with the next seed and evaluate its checkpoints until two reach the goal."""
    seed = next(seeds)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        _run(checkout, "train", "--seed", str(seed), "--output_dir", str(output),
             "--num_eval_tasks", "0", "--save_strategy", "steps", "--save_steps",
             str(options.every), "--save_total_limit", "1000")  # fmt: skip

        def success(model: Path) -> float:
            result = Path(folder) / "two_hops.json"
            _run(checkout, "evaluate", "--model", str(model), "--output", str(result),
                 "--env", ENVIRONMENT, "--env_kwargs", '{"split": "test"}',
                 "--num_tasks", str(options.num_tasks))  # fmt: skip
            return float(json.loads(result.read_text(encoding="utf-8"))["metrics"]["success"])

        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [row for row in map(json.loads, lines) if "time/rollout_seconds" in row]
        solved: dict[int, float] = {}
        for number in sorted(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")):
            solved[number] = success(output / f"checkpoint-{number}")
            if all(value >= GOAL for value in [0.0, *solved.values()][-2:]):
                break
        found = {"version": name, "seed": seed, "held_out_success": success(output)}
    sys.stdout.write(json.dumps(found | summarize(steps, solved)) + "\n")


def _run(checkout: Path, command: str, *arguments: str) -> None:
    program = f"from agent_trainers.cli.commands import {command}; {command}()"
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    subprocess.run(  # noqa: S603 - this interpreter, our own module
        [sys.executable, "-c", program, *arguments],
        cwd=checkout, env=environment, check=True, capture_output=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
