"""The papers' tables in miniature: ``python -m benchmarks.papers_table``.

Trains the embedded policy by every method with the same budget of environment steps: first with
several learning rates on tuning seeds and tasks, then with the best rate on the reported seeds.
A second table compares masks.
"""

import datetime
import json
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import MAX_EXACT_PERMUTATION
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.cli.results import versions
from benchmarks.grid import Grid, Result, Spec, read_json
from benchmarks.learning_run import COLUMNS, LearningRun
from benchmarks.papers_report import NAIVE_RAG, write_report

PROGRAM: Final = "python -m benchmarks.papers_table"


class Study(NamedTuple):
    """A table: fields of `LearningRun` by row name."""

    title: str
    rows: Mapping[str, Mapping[str, Any]]
    pairs: Sequence[tuple[str, str]] = ()
    """Rows to compare; the papers found the first of each pair better."""


def _rows(*methods: str, **fields: Any) -> dict[str, dict[str, Any]]:
    return {method: {"method": method, **fields} for method in methods}


_NO_LOSS_MASK: Final = ("--loss_mask", "false")
_NO_ADVANTAGE_MASK: Final = ("--advantage_mask", "false")
_TRAINED: Final = ("ppo", "reinforce++", "reinforce++-baseline", "rloo", "gigpo", "step_ppo")
_TRL: Final = "TRL environment_factory"
STUDIES: Final[Mapping[str, Study]] = {
    "rows": Study("Methods", {
        "base tool call": {"method": "base"},
        NAIVE_RAG: {"method": "grpo", "env_kwargs": {"hops": 1}, "is_naive_rag": True},
        **_rows("grpo", *_TRAINED),
        _TRL: {"method": "trl"},
    }, [("grpo", other) for other in (NAIVE_RAG, *_TRAINED, _TRL)]),
    "masks": Study("Masks", {
        "ppo, both masks": {"method": "ppo"},
        "ppo, no advantage mask": {"method": "ppo", "options": _NO_ADVANTAGE_MASK},
        "ppo, no mask": {"method": "ppo", "options": _NO_ADVANTAGE_MASK + _NO_LOSS_MASK},
        "grpo, loss mask": {"method": "grpo"},
        "grpo, no loss mask": {"method": "grpo", "options": _NO_LOSS_MASK},
    }, [("ppo, both masks", "ppo, no advantage mask"), ("ppo, both masks", "ppo, no mask"),
        ("grpo, loss mask", "grpo, no loss mask")]),
}  # fmt: skip
TRAINED_ON: Final = {"outdated": 0.5}
"""Half of the worlds hold outdated facts, so the columns with and without them are in-domain."""
TUNING_SEEDS: Final = (101, 102)
FIRST_TUNING_TASK: Final = 1_000_000
"""Learning rates are chosen on seeds and held-out tasks that no table reports."""
NUM_TUNING_TASKS: Final = 100
_FACTS: Final = ("jobs", "num_tasks", "seeds", "budget", "learning_rates")


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
    studies: list[str] = HfArg(
        default_factory=lambda: list(STUDIES), help="Tables: " + ", ".join(STUDIES) + "."
    )
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/papers_table", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the tables.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, PapersTableArguments, program=PROGRAM,
        description="Train the embedded policy by every method and write the papers' tables.",
    )  # fmt: skip
    if (count := len(options.seeds)) > MAX_EXACT_PERMUTATION:
        raise ConfigurationError(
            f"--seeds: {count} seeds; the exact test takes at most {MAX_EXACT_PERMUTATION}."
        )
    studies = {name: lookup(STUDIES, name, kind="study") for name in options.studies}
    rows = [(name, row) for name, study in studies.items() for row in study.rows]
    with Grid(options.work) as grid:
        success = _tune(grid, rows, options)
        rates = {row: _best_rate(success.get(row), options.learning_rates) for row in rows}
        cells = {
            (*row, seed): learning_run(*row, seed, rates[row], options)
            for row in rows
            for seed in options.seeds
        }
        results = _compute(grid, list(cells.values()), options.jobs)
        seconds = sum(record["result"]["seconds"] for record in grid.stored().values())
        num_runs = len(grid.stored())
    settings = asdict(options)
    write_report(
        Path(options.output),
        {
            name: {
                row: [results[key_of(cells[name, row, seed])] for seed in options.seeds]
                for row in study.rows
            }
            for name, study in studies.items()
        },
        titles={name: study.title for name, study in studies.items()},
        pairs={name: study.pairs for name, study in studies.items()},
        facts={
            "command": shlex.join([*PROGRAM.split(), *arguments]),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "run_seconds": round(seconds),
            "num_runs": num_runs,
            **{name: settings[name] for name in _FACTS},
            "tuning": [
                {"study": study, "method": row, "chosen": rates[study, row], "success": tried}
                for (study, row), tried in success.items()
            ],
            "versions": versions(),
        },
    )


def learning_run(
    study: str, row: str, seed: int, rate: float | None, options: PapersTableArguments
) -> LearningRun:
    """Return the run of one cell at a learning rate."""
    fields = {"env_kwargs": TRAINED_ON, **STUDIES[study].rows[row]}
    rate_option = () if rate is None else ("--learning_rate", f"{rate:g}")
    return LearningRun(
        seed=seed,
        budget=options.budget,
        num_tasks=options.num_tasks,
        columns=tuple(COLUMNS),
        **{**fields, "options": (*fields.get("options", ()), *rate_option)},
    )


def key_of(spec: LearningRun) -> str:
    """Return a readable name, the same for the same run in two tables."""
    parts = [
        spec.method,
        *(re.sub(r"\W+", "-", value).strip("-")[-60:] for value in spec.options),
        *(["naive_rag"] if spec.is_naive_rag else []),
        *(["tuning"] if spec.first_task else []),
        str(spec.seed),
    ]
    return "-".join(parts)


def compute_run(grid: Grid, key: str, spec: Spec) -> Result:
    """Run one cell in its own process."""
    folder = grid.work / key
    command = ["python", "-m", "benchmarks.learning_run", str(folder), json.dumps(spec)]
    grid.command(command, folder)
    return {**read_json(folder / "result.json", None), "command": shlex.join(command)}


def _tune(
    grid: Grid, rows: Sequence[tuple[str, str]], options: PapersTableArguments
) -> dict[tuple[str, str], dict[float, float]]:
    """Return the mean success of each learning rate on the tuning seeds, by row."""
    if len(options.learning_rates) == 1:
        return {}
    tried = {
        (row, rate): [_tuning_run(*row, seed, rate, options) for seed in TUNING_SEEDS]
        for row in rows
        if STUDIES[row[0]].rows[row[1]]["method"] != "base"
        for rate in options.learning_rates
    }
    results = _compute(grid, [spec for specs in tried.values() for spec in specs], options.jobs)
    success: dict[tuple[str, str], dict[float, float]] = {}
    for (row, rate), specs in tried.items():
        scores = [statistics.fmean(results[key_of(s)]["scores"].values()) for s in specs]
        success.setdefault(row, {})[rate] = statistics.fmean(scores)
    return success


def _tuning_run(
    study: str, row: str, seed: int, rate: float, options: PapersTableArguments
) -> LearningRun:
    spec = learning_run(study, row, seed, rate, options)
    in_domain = ("one hop",) if spec.is_naive_rag else ("clean facts", "outdated facts")
    return replace(
        spec,
        columns=in_domain,
        num_tasks=min(options.num_tasks, NUM_TUNING_TASKS),
        first_task=FIRST_TUNING_TASK,
    )


def _best_rate(success: Mapping[float, float] | None, rates: Sequence[float]) -> float | None:
    """Return the rate with most success, the lower one of a tie; None without training."""
    if success is None:
        return rates[0] if len(rates) == 1 else None
    return max(sorted(success), key=success.__getitem__)


def _compute(grid: Grid, specs: Sequence[LearningRun], jobs: int) -> dict[str, Result]:
    cells = {key_of(spec): json.loads(json.dumps(asdict(spec))) for spec in specs}
    return grid.run(cells, lambda key, spec: compute_run(grid, key, spec), jobs=jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
