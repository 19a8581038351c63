"""How soon the default run reaches 90 %, against that of another version.

``python -m benchmarks.performance.time_to_success --against REF`` trains by the default recipe of
this checkout and by that of the Git reference, in turns and with the same seeds, so that both meet
the same machine. What each has saved on the way then plays the same held-out tasks: two hops in the
first phrasing, which every version trained on, whatever else it did.

Seconds are those of the optimiser steps, without evaluation, checkpoints and start, until the
first of two checkpoints in a row that solve 90 %.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.performance.comparison import measure_in_turns

ENVIRONMENT: Final = "AgentR1/SyntheticMultiHop-v0"
TASKS: Final = {"split": "test"}
"""Two hops in the first phrasing, which every version trained on."""
GOAL: Final = 0.9
IN_A_ROW: Final = 2
PARTS: Final = ("time/rollout_seconds", "time/score_seconds", "time/train_seconds")
WITHIN: Final = ("time/generate_seconds", "time/environment_seconds")
"""Parts of the rollout."""
RESULT: Final = "two_hops.json"
"""What a checkpoint solved, in its folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in turns, print the table, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", required=True, help="Git reference of the other version")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num_tasks", type=int, default=300, help="held-out tasks")
    parser.add_argument(
        "--every", type=int, default=2, help="optimiser steps between two checkpoints"
    )
    parser.add_argument("--options", default="", help="further options of agent-r1-train, for both")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        check_out(root, options.against, other)
        sides = {
            name: _Side(
                checkout,
                Path(folder) / name,
                options.seeds,
                options.options.split(),
                options.num_tasks,
                options.every,
            )
            for name, checkout in (("this", root), (options.against, other))
        }
        turns = {name: side.train for name, side in sides.items()}
        runs = measure_in_turns(turns, len(options.seeds), description="training in turns")
    sys.stdout.write(report(runs))
    if options.output is not None:
        write_json(options.output, {"seeds": options.seeds, "runs": runs})


def check_out(root: Path, reference: str, folder: Path) -> None:
    """Write the packages of a Git reference into `folder`."""
    folder.mkdir(parents=True)
    archive = ["git", "archive", reference, "agent_envs", "agent_trainers"]
    packed = subprocess.run(archive, cwd=root, check=True, capture_output=True).stdout  # noqa: S603
    subprocess.run(["tar", "-x"], cwd=folder, input=packed, check=True)  # noqa: S607


_TRAIN: Final = "from agent_trainers.cli.commands import train; train()"
_EVALUATE: Final = f"""
import json
import sys

from agent_trainers.cli.commands import evaluate

start = sys.argv.index("--env")
folders, options = sys.argv[1:start], sys.argv[start:]
in_a_row = 0
for folder in folders:
    result = folder + "/{RESULT}"
    sys.argv = ["agent-r1-eval", "--model", folder, "--output", result, *options]
    evaluate()
    is_at_goal = json.load(open(result))["metrics"]["success"] >= {GOAL}
    in_a_row = in_a_row + 1 if is_at_goal else 0
    if in_a_row == {IN_A_ROW}:
        break
"""


class _Side:
    """One version; trains with the next seed each time."""

    def __init__(
        self,
        checkout: Path,
        folder: Path,
        seeds: Sequence[int],
        options: Sequence[str],
        num_tasks: int,
        every: int,
    ) -> None:
        self._checkout, self._folder, self._options = checkout, folder, list(options)
        self._seeds, self._num_tasks, self._every = iter(seeds), num_tasks, every

    def train(self) -> dict[str, Any]:
        seed = next(self._seeds)
        output = self._folder.with_name(f"{self._folder.name}-{seed}")
        self._call(
            _TRAIN, "--seed", str(seed), "--output_dir", str(output), "--num_eval_tasks", "0",
            "--save_strategy", "steps", "--save_steps", str(self._every),
            "--save_total_limit", "1000", *self._options,
        )  # fmt: skip
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [row for row in map(json.loads, lines) if PARTS[0] in row]
        saved = {int(folder.name.rpartition("-")[2]): folder for folder in output.glob("*-*[0-9]")}
        inputs = ("--env", ENVIRONMENT, "--env_kwargs", json.dumps(TASKS))
        tasks = (*inputs, "--num_tasks", str(self._num_tasks))
        self._call(_EVALUATE, *(str(saved[number]) for number in sorted(saved)), *tasks)
        self._call(_EVALUATE, str(output), *tasks)
        solved = {n: _success(folder) for n, folder in saved.items() if (folder / RESULT).exists()}
        return summarize(steps, solved) | {"seed": seed, "held_out_success": _success(output)}

    def _call(self, program: str, *arguments: str) -> None:
        # a version's own packages, and nothing of the folder this was called from
        environment = os.environ | {"PYTHONPATH": str(self._checkout), "HF_HUB_OFFLINE": "1"}
        subprocess.run(  # noqa: S603 - this interpreter, our own module
            [sys.executable, "-c", program, *arguments],
            cwd=self._checkout, env=environment, check=True, capture_output=True,
        )  # fmt: skip


def _success(folder: Path) -> float:
    metrics = json.loads((folder / RESULT).read_text(encoding="utf-8"))["metrics"]
    return float(metrics["success"])


def summarize(steps: Sequence[Mapping[str, float]], solved: Mapping[int, float]) -> dict[str, Any]:
    """Return when the goal was reached, if it was, and where the seconds went.

    Args:
        steps: What was logged of each optimiser step.
        solved: The share of the held-out tasks that was solved after so many steps; not all of
            them need be known.
    """
    seconds = list(itertools.accumulate(sum(step[part] for part in PARTS) for step in steps))
    numbers = sorted(solved)
    reached = None
    for i in range(len(numbers) - IN_A_ROW + 1):
        if all(solved[number] >= GOAL for number in numbers[i : i + IN_A_ROW]):
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
            for part in (*PARTS, *WITHIN)
        },
    }


def report(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table, and how the two versions compare."""
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
    parts = next(iter(runs.values()))[0]["seconds_per_step"]
    head = [
        "version",
        "seed",
        "seconds to 90 %",
        "steps",
        "held out",
        *(f"{p} s/step" for p in parts),
    ]
    this, other = runs.values()
    pairs = [
        a["reached"]["seconds"] / b["reached"]["seconds"]
        for a, b in zip(this, other, strict=True)
        if a["reached"] and b["reached"]
    ]
    ratio = (
        f"Seconds to 90 %, this over the other, by seed: {' '.join(f'{r:.2f}' for r in pairs)}; "
        f"median {statistics.median(pairs):.2f}.\n"
        if pairs
        else "No seed reached 90 % in both versions.\n"
    )
    return f"{markdown_table(head, lines)}\n\n{ratio}"


if __name__ == "__main__":
    main()
