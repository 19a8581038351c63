"""True advantages by branching, and every estimator scored against them.

``python -m benchmarks.credit`` rolls out batches of policies at three stages of training, measures
their true advantages, and scores every estimator. ``--truth FILE`` scores on published true
advantages without any rollout.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.cli.environments import add_working_directory
from benchmarks.credit.report import write_report
from benchmarks.credit.scores import all_estimators, rows_of
from benchmarks.credit.true_advantages import folder_of, load_batches, save_batches
from benchmarks.grid import Grid, Result

PROGRAM: Final = "python -m benchmarks.credit"
TRUTH_FILE: Final = "credit_truth.jsonl.gz"
ENVIRONMENT_NAMES: Final = (
    "multi-hop", "long horizon", "long horizon, outcome", "arithmetic", "tables", "bifurcation",
)  # fmt: skip
STAGES: Final = ("start", "middle", "late")
_MAY_CHANGE: Final = frozenset(
    {"envs", "stages", "seeds", "estimator", "truth", "jobs", "work", "output"}
)
"""Options that may change between calls; the cells depend on all others."""


@dataclass
class CreditArguments:
    """Options of the command."""

    envs: list[str] = HfArg(
        default_factory=lambda: list(ENVIRONMENT_NAMES),
        help="Environments: names of the benchmark's own, or Gymnasium ids of others, such as "
        "my_module:MyEnv-v0, that have reference_actions().",
    )
    stages: list[str] = HfArg(default_factory=lambda: list(STAGES), help="Stages of training.")
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds.")
    estimator: list[str] = HfArg(
        default_factory=list,
        help="Custom estimators, my_module:my_estimator, besides the package's.",
    )
    truth: str | None = HfArg(
        default=None, help="Score on this file of true advantages, without rollouts."
    )
    num_tasks: int = HfArg(default=6, help="Tasks of a batch.")
    group_size: int = HfArg(default=8, help="Episodes of each task.")
    reliability: float = HfArg(default=0.85, help="Required reliability of the true advantages.")
    max_branches: int = HfArg(default=64, help="Branches of a state at most.")
    branch_steps: float = HfArg(
        default=1.0,
        help="Steps of the branches that vine and tree see, in units of the batch's.",
    )
    budget: int = HfArg(
        default=4000, help="Environment steps of the training that gives the stages."
    )
    jobs: int = HfArg(default=1, help="Batches at the same time, on one core each.")
    work: str = HfArg(default="runs/credit", help="Folder of the results by cell.")
    output: str = HfArg(default="runs/credit/results", help="Folder of the tables.")


class Cell(NamedTuple):
    """The true advantages of one batch."""

    environment: str
    stage: str
    seed: int

    @property
    def key(self) -> str:
        """Path of its results in the work folder."""
        return f"{folder_of(self.environment)}/{self.stage}-{self.seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def read_options(arguments: Sequence[str]) -> CreditArguments:
    """Return the options of a command line."""
    description = "Score estimators of advantages against true advantages measured by branching."
    options = parse(arguments, CreditArguments, program=PROGRAM, description=description)
    check_range(options, "at least 1", "num_tasks", "budget", "jobs")
    check_range(options, "at least 2", "group_size", "max_branches")
    check_range(options, "in (0, 1)", "reliability")
    check_range(options, "at least 0", "branch_steps")
    for stage in options.stages:
        lookup(dict.fromkeys(STAGES), stage, kind="stage")
    return options


def plan(options: CreditArguments) -> list[Cell]:
    """Return the cells in order.

    Neighbours are of different environments, since cells of one wait for the same policies.
    """
    return [
        Cell(environment, stage, seed)
        for seed in options.seeds
        for stage in options.stages
        for environment in options.envs
    ]


def compute(grid: Grid, cell: Cell, options: CreditArguments) -> Result:
    """Measure a batch in its own process and save it next to the cell's key."""
    settings = json.dumps({**asdict(options), **cell._asdict()})
    folder = grid.work / cell.key
    command = ["python", "-m", "benchmarks.credit.policies", settings]
    seconds = grid.command([*command, str(grid.work), f"{folder}.jsonl.gz"], folder)
    return {"seconds": seconds}


def _run(arguments: list[str]) -> None:
    options = read_options(arguments)
    add_working_directory()
    rows = rows_of(all_estimators(options.estimator))
    facts: dict[str, Any] = {
        "command": shlex.join([*PROGRAM.split(), *arguments]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": asdict(options), "wanted": [],
    }  # fmt: skip
    output = Path(options.output)
    if options.truth is not None:
        batches = load_batches(options.truth)
        if not batches:
            raise DataError(f"{options.truth}: contains no batches.")
        sys.stdout.write(write_report(output, rows, batches, facts))
        return
    cells = {cell.key: cell for cell in plan(options)}
    facts["wanted"] = [tuple(cell) for cell in cells.values()]
    settings = {n: value for n, value in asdict(options).items() if n not in _MAY_CHANGE}
    with Grid(options.work, settings) as grid:
        for key in grid.stored():
            if not (path := grid.work / f"{key}.jsonl.gz").exists():
                raise ConfigurationError(
                    f"{path} is missing, although results.jsonl lists it as measured. Restore it, "
                    "or choose another --work."
                )

        def report() -> str:
            paths = [f"{grid.work / c.key}.jsonl.gz" for c in cells.values()]
            measured = [b for path in paths if Path(path).exists() for b in load_batches(path)]
            save_batches(output / TRUTH_FILE, measured)
            return write_report(output, rows, measured, facts)

        try:
            grid.run(
                dict.fromkeys(cells),
                lambda key, _: compute(grid, cells[key], options),
                jobs=options.jobs,
            )
        finally:
            text = report()
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
