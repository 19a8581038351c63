"""The papers' table in miniature: ``python -m benchmarks.papers_table``.

Trains the embedded policy by every method with the same budget of environment steps: first with
several learning rates on tuning seeds and tasks, then with the best rate on the reported seeds.
"""

import datetime
import itertools
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers.hf_argparser import HfArg

from agent_envs.data.files import write_json, write_text
from agent_envs.scoring.statistics import (
    ALPHA,
    holm,
    mean_interval,
    paired_test,
)
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.cli.results import versions
from benchmarks.grid import Grid, Result, Spec, read_json
from benchmarks.learning_run import COLUMNS, LearningRun, check_seeds

PROGRAM: Final = "python -m benchmarks.papers_table"
POWER: Final = 0.8
NUM_DRAWS: Final = 1_000
"""Simulated experiments per difference that `detectable_ratio` tries."""
NAIVE_RAG: Final = "naive RAG"
ONE_HOP: Final = "one hop"
"""The only column in which naive RAG, with its single search, is a fair competitor."""
_BASE: Final = "base tool call"
_TRL: Final = "TRL environment_factory"
_TRAINED: Final = ("ppo", "reinforce++", "reinforce++-baseline", "rloo", "gigpo", "step_ppo")
_NO_LOSS_MASK: Final = ("--loss_mask", "false")
_NO_ADVANTAGE_MASK: Final = ("--advantage_mask", "false")
ROWS: Final[Mapping[str, Mapping[str, Any]]] = {
    _BASE: {"method": "base"},
    NAIVE_RAG: {"method": "grpo", "env_kwargs": {"hops": 1}, "is_naive_rag": True},
    **{method: {"method": method} for method in ("grpo", *_TRAINED)},
    _TRL: {"method": "trl"},
    "ppo, no advantage mask": {"method": "ppo", "options": _NO_ADVANTAGE_MASK},
    "ppo, no mask": {"method": "ppo", "options": _NO_ADVANTAGE_MASK + _NO_LOSS_MASK},
    "grpo, no loss mask": {"method": "grpo", "options": _NO_LOSS_MASK},
}
"""Fields of `LearningRun` by row."""
PAIRS: Final = (
    *(("grpo", other) for other in (NAIVE_RAG, *_TRAINED, _TRL, "grpo, no loss mask")),
    ("ppo", "ppo, no advantage mask"),
    ("ppo", "ppo, no mask"),
)
"""Rows to compare; the papers found the first of each pair better."""
TRAINED_ON: Final = {"outdated": 0.5}
"""Half of the worlds hold outdated facts, so the columns with and without them are in-domain."""
TUNING_SEEDS: Final = (101, 102)
FIRST_TUNING_TASK: Final = 1_000_000
"""Learning rates are chosen on seeds and held-out tasks that the table does not report."""
NUM_TUNING_TASKS: Final = 100

Results = Mapping[str, Sequence[Result]]
"""Results by row, one per seed; see `benchmarks.learning_run.run`."""


@dataclass
class PapersTableArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(
        default_factory=lambda: list(range(1, 11)), help="Seeds of each method."
    )
    learning_rates: list[float] = HfArg(
        default_factory=lambda: [1e-3, 2e-3, 4e-3],
        help="Each method is reported with the best of them.",
    )
    budget: int = HfArg(default=10_000, help="Environment steps of training per run.")
    num_tasks: int = HfArg(default=300, help="Held-out tasks per column.")
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/papers_table", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the table.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, PapersTableArguments, program=PROGRAM,
        description="Train the embedded policy by every method and write the papers' table.",
    )  # fmt: skip
    check_seeds(options.seeds, TUNING_SEEDS)
    with Grid(options.work) as grid:
        rates, tried = _tune(grid, options)
        runs = {
            row: [_learning_run(row, seed, rates[row], options) for seed in options.seeds]
            for row in ROWS
        }
        results = compute_runs(grid, runs, options.jobs)
        done = [record["result"] for record in grid.stored().values()]
    facts = {
        **run_facts(PROGRAM, arguments, options, done), "learning_rates": rates, "tuning": tried,
    }  # fmt: skip
    write_page(
        options.output, "papers_table", {"rows": results, **facts}, _markdown(results, facts)
    )


def run_facts(
    program: str, arguments: Sequence[str], options: Any, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return command, date, cost, settings and versions of a table."""
    return {
        "command": shlex.join([*program.split(), *arguments]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hours": sum(result["seconds"] for result in results) / 3600,
        "num_runs": len(results),
        "settings": asdict(options),
        "versions": versions(),
    }


def write_page(output: str, name: str, data: Mapping[str, Any], text: str) -> None:
    """Write ``name.json`` and ``name.md`` into a folder."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", data)
    write_text(folder / f"{name}.md", text)


def _learning_run(
    row: str, seed: int, rate: float | None, options: PapersTableArguments
) -> LearningRun:
    fields = {"env_kwargs": TRAINED_ON, **ROWS[row]}
    return LearningRun(
        seed=seed, learning_rate=rate, budget=options.budget, num_tasks=options.num_tasks,
        columns=tuple(COLUMNS), **fields,
    )  # fmt: skip


def _tune(
    grid: Grid, options: PapersTableArguments
) -> tuple[dict[str, float | None], dict[str, dict[float, float]]]:
    """Return the best learning rate of each row, and the success of each rate on tuning seeds.

    The lower rate wins a tie.
    """
    trained = [row for row in ROWS if row != _BASE]
    best, tried = choose_rates(
        grid,
        {
            (row, rate): [
                replace(
                    _learning_run(row, seed, rate, options),
                    columns=(ONE_HOP,) if row == NAIVE_RAG else ("clean facts", "outdated facts"),
                    num_tasks=min(options.num_tasks, NUM_TUNING_TASKS),
                    first_task=FIRST_TUNING_TASK,
                )
                for seed in TUNING_SEEDS
            ]
            for row in trained
            for rate in sorted(options.learning_rates)
        },
        options.jobs,
    )
    return {_BASE: None, **best}, tried


def choose_rates(
    grid: Grid, runs: Mapping[tuple[str, float], Sequence[LearningRun]], jobs: int
) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """Return the best learning rate of each row, and the success of each rate.

    The first rate wins a tie.
    """
    tried: dict[str, dict[float, float]] = {}
    for (row, rate), results in compute_runs(grid, runs, jobs).items():
        scores = [score for result in results for score in result["scores"].values()]
        tried.setdefault(row, {})[rate] = statistics.fmean(scores)
    return {row: max(success, key=success.__getitem__) for row, success in tried.items()}, tried


def compute_runs(
    grid: Grid, runs: Mapping[Any, Sequence[LearningRun]], jobs: int
) -> dict[Any, list[Result]]:
    """Return the results of some runs by the same keys."""
    cells = {_cell_name(key, run): asdict(run) for key, row in runs.items() for run in row}
    found = grid.run(cells, lambda name, spec: compute_run(grid, name, spec), jobs=jobs)
    return {key: [found[_cell_name(key, run)] for run in row] for key, row in runs.items()}


def _cell_name(key: object, run: LearningRun) -> str:
    return re.sub(r"[^\w.]+", "-", f"{key} {run.seed}").strip("-")


def compute_run(grid: Grid, name: str, spec: Spec) -> Result:
    """Run one cell in its own process."""
    folder = grid.work / name
    command = ["python", "-m", "benchmarks.learning_run", str(folder), json.dumps(spec)]
    grid.command(command, folder)
    return {**read_json(folder / "result.json", None), "command": shlex.join(command)}


def _markdown(results: Results, facts: Mapping[str, Any]) -> str:
    settings = facts["settings"]
    rates = "; ".join(f"{row}: {rate:g}" for row, rate in facts["learning_rates"].items() if rate)
    parts = [
        "# The papers' table in miniature",
        f"The embedded policy in the synthetic environments. `{facts['command']}`, "
        f"{facts['date']}: {facts['num_runs']} runs of {facts['hours']:.1f} hours in total, "
        f"{settings['jobs']} at a time on one core each. "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"Success in % of {settings['num_tasks']} held-out tasks per column, sampled at "
        f"temperature 1: mean and 95 % interval by Student's t over {len(settings['seeds'])} "
        f"seeds. Each run trains for {settings['budget']:,} environment steps in batches of 128 "
        "episodes. The learning rate decays to 0. In-domain: *clean facts* and *outdated facts*, "
        "half of the training worlds each. Out of domain: *one hop* and *three questions*. Naive "
        "RAG searches once with the question and is trained, with the same budget, to answer from "
        "the results.",
        f"Learning rates, the best by success on tuning seeds and tasks: {rates}.",
        _table(results),
        "Comparisons are paired by seed: mean difference with its 95 % interval by Student's t, "
        "and the exact sign-flip test with Holm's correction.",
        compare_rows(results, PAIRS),
        "`papers_table.json` holds the command of every run, and the curves.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(results: Results) -> str:
    lines = []
    for row, runs in results.items():
        scores = [[run["scores"][column] for run in runs] for column in COLUMNS]
        steps = statistics.fmean(run["curve"][-1][0] if run["curve"] else 0 for run in runs)
        cells = [mean_text(values) for values in (*scores, mean_scores(runs))]
        lines.append([row, *cells, f"{steps:,.0f}"])
    return markdown_table(["method", *COLUMNS, "mean", "environment steps"], lines)


def compare_rows(results: Results, pairs: Sequence[tuple[str, str]]) -> str:
    """Compare pairs of rows, paired by seed; return a list item per comparison."""
    differences = [_differences(results, *pair) for pair in pairs]
    adjusted = holm([paired_test(values) for values in differences])
    lines = []
    for (first, second), values, p_value in zip(pairs, differences, adjusted, strict=True):
        where = f" in *{ONE_HOP}*" if NAIVE_RAG in (first, second) else ""
        verdict = f"*{first}* and *{second}*: no significant difference"
        if p_value < ALPHA:
            is_better = statistics.fmean(values) > 0
            winner, loser = (first, second) if is_better else (second, first)
            verdict = f"*{winner}* beats *{loser}*"
        lines.append(
            f"{verdict}: {mean_text(values, '+')} points{where}, better with "
            f"{sum(value > 0 for value in values)} of {len(values)} seeds, p = {p_value:.3f}."
        )
    lines += too_few_seeds(len(differences[0]), len(pairs))
    return "\n".join(f"- {line}" for line in lines)


def too_few_seeds(num_seeds: int, num_comparisons: int) -> list[str]:
    """Return a warning if no difference can be significant with so many paired seeds."""
    # the smallest p-value of an exact paired test of n seeds is 2 ** (1 - n)
    needed = next(n for n in itertools.count(1) if 2.0 ** (1 - n) * num_comparisons < ALPHA)
    if num_seeds >= needed:
        return []
    return [
        f"{num_seeds} seeds are too few for a significant difference among {num_comparisons} "
        f"comparisons: that takes {needed}."
    ]


def detectable_ratio(num_seeds: int, num_tests: int, rng: np.random.Generator) -> float | None:
    """Return the difference, in standard deviations, that is found with probability `POWER`.

    Differences by seed are drawn from a normal distribution and tested with the exact sign-flip
    test at the level that the smallest p-value must reach under Holm's correction,
    ``ALPHA / num_tests`` (so an upper bound for the others). The noncentral t distribution
    (Cohen, 1988, chapter 2) would be too optimistic: with 10 seeds and 14 tests all signs must
    agree, and ``cdf(d) ** 10 = 0.8`` takes 2.01 deviations.
    """
    if too_few_seeds(num_seeds, num_tests):
        return None
    draws = rng.standard_normal((NUM_DRAWS, num_seeds))
    low, high = 0.0, 8.0
    while high - low > 0.01:
        middle = (low + high) / 2
        found = [paired_test(draw + middle) * num_tests < ALPHA for draw in draws]
        low, high = (low, middle) if statistics.fmean(found) >= POWER else (middle, high)
    return high


def _differences(results: Results, first: str, second: str) -> list[float]:
    scores = (
        [run["scores"][ONE_HOP] for run in results[row]]
        if NAIVE_RAG in (first, second)
        else mean_scores(results[row])
        for row in (first, second)
    )
    return [a - b for a, b in zip(*scores, strict=True)]


def mean_scores(runs: Sequence[Result]) -> list[float]:
    """Return the mean over columns for each seed."""
    return [statistics.fmean(run["scores"].values()) for run in runs]


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Format the mean of shares with its 95 % interval by Student's t, in percent (points)."""
    interval = mean_interval(values)
    mean, half = 100 * interval.mean, 100 * (interval.high - interval.mean)
    return f"{mean:{sign}.1f} ± {half:.1f}" if math.isfinite(half) else f"{mean:{sign}.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
