"""Success against cost: ``python -m benchmarks.pareto`` trains one policy per cost of a tool call.

All start from one policy, trained without a cost. Tasks take one to three searches, so a policy
that weighs cost against success learns which tasks are worth it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.data.files import write_json
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.grid import Grid, Result, Spec

PROGRAM: Final = "python -m benchmarks.pareto"
COST_TERM: Final = "agent_envs.core.rewards:extra_call_term"
MEASURED: Final = {
    "success": "eval_success",
    "tool calls": "eval_metrics/num_tool_calls",
    "tokens": "eval_completions/mean_length",
}
"""Metric of each figure of an episode."""


@dataclass
class ParetoArguments:
    """Options of the command."""

    costs: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 1.1],
        metadata={"help": "Costs of a tool call; a solved task earns 1."},
    )
    first_steps: int = HfArg(default=200, help="Optimiser steps without a cost.")
    steps: int = HfArg(default=100, help="Optimiser steps with each cost.")
    num_tasks: int = HfArg(default=200, help="Held-out tasks.")
    seed: int = HfArg(default=1, help="Seed of each training.")
    work: str = HfArg(default="runs/pareto", help="Folder of the runs.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, ParetoArguments, program=PROGRAM,
        description="Train policies with several costs of a tool call, and show the Pareto front.",
    )  # fmt: skip
    kept = {name: getattr(options, name) for name in ("first_steps", "steps", "num_tasks", "seed")}
    with Grid(options.work, kept) as grid:

        def train(key: str, spec: Spec) -> Result:
            folder = grid.work / key
            rewards = {"exact_match": 1.0, "format": 0.02, COST_TERM: spec["cost"]}
            kwargs = {"hops": [1, 2, 3], "rewards": rewards}
            command = ["agent-r1-train", "--seed", str(options.seed), "--overwrite"]
            command += ["--output_dir", str(folder), "--num_eval_tasks", str(options.num_tasks)]
            command += ["--disable_tqdm", "true"]
            if spec["from"] is None:
                kwargs["rewards"] = {"exact_match": 1.0, "new_gold_passage": 0.2, "format": 0.02}
                command += ["--max_steps", str(options.first_steps)]
            else:
                command += ["--model", str(grid.work / spec["from"])]
                command += ["--max_steps", str(options.steps)]
            grid.command([*command, "--env_kwargs", json.dumps(kwargs)], folder)
            return measured(folder / "metrics.jsonl")

        cells: dict[str, Spec] = {"without_cost": {"cost": 0.0, "from": None}}
        cells |= {
            f"cost_{cost:g}": {"cost": cost, "from": "without_cost"} for cost in options.costs
        }
        results = grid.run(cells, train)
    best = front(results, "tool calls")
    write_json(Path(options.work) / "pareto.json", {"results": results, "front": sorted(best)})
    rows = [
        [key, *(f"{result[name]:.3f}" for name in MEASURED), "yes" if key in best else ""]
        for key, result in results.items()
    ]
    print(markdown_table(["policy", *MEASURED, "on the front"], rows))  # noqa: T201


def measured(path: Path) -> Result:
    """Return the figures of the last evaluation in a run's metrics."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = next(entry for entry in reversed(entries) if MEASURED["success"] in entry)
    return {name: last[metric] for name, metric in MEASURED.items()}


def front(results: Mapping[str, Result], cost: str) -> set[str]:
    """Return the results that no other beats in success or cost without losing in the other."""

    def beats(one: Result, other: Result) -> bool:
        is_no_worse = one["success"] >= other["success"] and one[cost] <= other[cost]
        return is_no_worse and (one["success"], one[cost]) != (other["success"], other[cost])

    return {k for k, own in results.items() if not any(beats(r, own) for r in results.values())}


if __name__ == "__main__":
    main()
