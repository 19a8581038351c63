"""Success against cost: ``python -m benchmarks.pareto`` trains one policy per cost of a tool call.

All start from a policy that was trained without a cost: with one, it would learn to do nothing.
Questions take one to four searches and a solved one earns 1, so with a cost of c per search those
of more than 1 / c are not worth their searches.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.grid import Grid, Result, Spec
from benchmarks.papers_table import run_facts, write_page

PROGRAM: Final = "python -m benchmarks.pareto"
START: Final = "start"
COST: Final = "agent_envs.core.rewards:extra_call_term"
MEASURED: Final = {"success": "eval_success", "calls": "eval_metrics/num_tool_calls"}
"""Metric of each figure of an episode."""


@dataclass
class ParetoArguments:
    """Options of the command."""

    costs: list[float] = HfArg(
        default_factory=lambda: [0.1, 0.29, 0.32, 0.4, 0.7, 0.9, 1.2],
        help="Costs of a tool call; a solved task earns 1.",
    )
    steps: int = HfArg(default=120, help="Optimiser steps of each policy, as of the start.")
    num_tasks: int = HfArg(default=400, help="Held-out tasks.")
    seed: int = HfArg(default=1, help="Seed of each training.")
    jobs: int = HfArg(default=1, help="Policies trained at the same time, on one core each.")
    work: str = HfArg(default="runs/pareto", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, ParetoArguments, program=PROGRAM,
        description="Train policies with several costs of a tool call, and show the Pareto front.",
    )  # fmt: skip
    with Grid(
        options.work, {n: getattr(options, n) for n in ("steps", "num_tasks", "seed")}
    ) as grid:
        results = grid.run({START: 0.0}, lambda k, cost: _train(grid, k, cost, options))
        cells = {f"{cost:g}": cost for cost in options.costs}
        costly = grid.run(cells, lambda k, cost: _train(grid, k, cost, options), jobs=options.jobs)
        results |= costly
    best = front(results)
    rows = [
        [key, *(f"{result[name]:.3f}" for name in MEASURED), "yes" if key in best else "no"]
        for key, result in results.items()
    ]
    facts = run_facts(PROGRAM, arguments, options, [*results.values()])
    table = markdown_table(["cost of a call", *MEASURED, "on the front"], rows)
    print(table)  # noqa: T201
    head = f"# Success against cost\n\n`{facts['command']}`, {facts['date']}\n\n"
    write_page(options.output, "pareto", {"results": results, **facts}, f"{head}{table}\n")
    draw(Path(options.output) / "pareto.png", results, best)


def _train(grid: Grid, key: str, cost: Spec, options: ParetoArguments) -> Result:
    """Train with a cost from the start policy, or without one from the embedded policy."""
    is_start = key == START
    terms = {"new_gold_passage": 0.2} if is_start else {COST: cost}
    rewards = {"exact_match": 1.0, "format": 0.02, **terms}
    kwargs = {"hops": [1, 2, 3, 4], "max_episode_steps": 6, "rewards": rewards}
    start = [] if is_start else ["--model", str(grid.work / START)]
    entries, seconds = train(grid, key, options, options.seed, kwargs, *start)
    last = [entry for entry in entries if MEASURED["success"] in entry][-1]
    return {**{name: last[metric] for name, metric in MEASURED.items()}, "seconds": seconds}


def train(
    grid: Grid, key: str, options: Any, seed: int, env_kwargs: Mapping[str, Any], *more: str
) -> tuple[list[dict[str, Any]], float]:
    """Train and evaluate a policy; return what was logged, and the seconds it took."""
    folder = grid.work / key
    seconds = grid.command([
        "agent-r1-train", *more, "--seed", str(seed), "--max_steps", str(options.steps),
        "--num_eval_tasks", str(options.num_tasks), "--env_kwargs", json.dumps(env_kwargs),
        "--output_dir", str(folder), "--disable_tqdm", "true", "--overwrite",
    ], folder)  # fmt: skip
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], seconds


def front(results: Mapping[str, Result]) -> set[str]:
    """Return the results that no other beats in success or calls without losing in the other."""

    def beats(one: Result, other: Result) -> bool:
        points = [(each["success"], -each["calls"]) for each in (one, other)]
        return points[0] != points[1] and all(a >= b for a, b in zip(*points, strict=True))

    return {k for k, own in results.items() if not any(beats(r, own) for r in results.values())}


def draw(path: Path, results: Mapping[str, Result], best: set[str]) -> None:
    """Draw success over calls, with a line through the front."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(5, 3.5), dpi=120, layout="constrained")).add_subplot()
    line = sorted((results[key]["calls"], results[key]["success"]) for key in best)
    axes.plot(*zip(*line, strict=True), "o-", color="#2563eb")
    for number, (key, result) in enumerate(sorted(results.items(), key=lambda r: r[1]["calls"])):
        point = (result["calls"], result["success"])
        axes.scatter(*point, color="#2563eb" if key in best else "grey")
        place = (4, -12 - 10 * (number % 4))
        axes.annotate(key, point, place, textcoords="offset points", fontsize="small")
    axes.set(
        xlabel="tool calls per episode", ylabel="success", xlim=(-0.1, None), ylim=(-0.15, 1.05)
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
