"""How right is credit? ``python -m benchmarks.credit``.

Plays batches of policies at three stages of training, goes on from every state until its value is
known, and scores every estimator against the true advantages; beside it, how well it trains. A
command that was stopped goes on, and what was not run yet is marked. ``--truth FILE`` scores on
true advantages that somebody has measured, without playing anything.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError, DataError
from agent_trainers.cli.arguments import check_range, parse
from agent_trainers.cli.environments import see_modules_here
from benchmarks.credit.report import write_report
from benchmarks.credit.rows import ALGORITHMS, all_estimators, rows_of
from benchmarks.credit.true_advantages import CreditBatch, load_batches, save_batches
from benchmarks.work_folder import check_same_settings

PROGRAM: Final = "python -m benchmarks.credit"
TRUTH_FILE: Final = "credit_truth.jsonl.gz"
STAGES: Final = ("start", "middle", "late")
_MAY_CHANGE: Final = frozenset(
    {"envs", "stages", "seeds", "estimator", "train", "truth", "short", "work", "output"}
)
"""What a call may change from one to the next; all else decides what the cells are."""
_SHORT: Final[dict[str, Any]] = {
    "envs": ["multi-hop", "tables"], "seeds": [1], "num_tasks": 6, "max_branches": 128,
    "budget": 4000, "num_eval_tasks": 100, "train": False,
}  # fmt: skip
"""What ``--short`` sets, unless it is given."""


@dataclass
class CreditArguments:
    """What to measure, and where."""

    envs: list[str] = field(
        default_factory=lambda: ["multi-hop", "long horizon", "arithmetic", "tables"],
        metadata={"help": "Environments: names of the benchmark's own, or Gymnasium ids of others, "
                  "such as my_module:MyEnv-v0, that have reference_actions()."},
    )  # fmt: skip
    stages: list[str] = field(
        default_factory=lambda: list(STAGES), metadata={"help": "Stages of training."}
    )
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Seeds."})
    estimator: list[str] = field(
        default_factory=list,
        metadata={"help": "Estimators of your own, my_module:my_estimator, beside the package's."},
    )
    truth: str | None = field(
        default=None,
        metadata={"help": "Score on this file of true advantages; nothing is played or trained."},
    )
    short: bool = field(
        default=False,
        metadata={"help": "Two environments, one seed, small batches, and no training but that of "
                  "the stages."},
    )  # fmt: skip
    train: bool = field(default=True, metadata={"help": "Whether every estimator is trained, too."})
    num_tasks: int = field(default=16, metadata={"help": "Tasks of a batch."})
    group_size: int = field(default=8, metadata={"help": "Episodes of each task."})
    reliability: float = field(
        default=0.92, metadata={"help": "Branches are played until the truth is so reliable."}
    )
    max_branches: int = field(default=256, metadata={"help": "Branches of a state at most."})
    branch_steps: float = field(
        default=1.0,
        metadata={"help": "Steps of the branches that vine and tree see, in units of the batch's."},
    )
    budget: int = field(
        default=8000, metadata={"help": "Environment steps that each training run may take."}
    )
    num_eval_tasks: int = field(default=200, metadata={"help": "Held-out tasks after training."})
    work: str = field(default="runs/credit", metadata={"help": "Folder of what is done."})
    output: str = field(
        default="runs/credit/results", metadata={"help": "Folder of the tables and the picture."}
    )


class Cell(NamedTuple):
    """A part of the work: the truth of one batch, or the training of one estimator."""

    environment: str
    name: str
    """A stage, or an algorithm, or the import path of an estimator that is trained."""
    seed: int
    is_truth: bool

    @property
    def path(self) -> Path:
        """Where its result lies, in the work folder."""
        folder = Path("".join(c if c.isalnum() else "_" for c in self.environment))
        name = self.name.replace(":", ".")  # which no Windows folder may hold
        if self.is_truth:
            return folder / "truth" / f"{name}-{self.seed}.jsonl.gz"
        return folder / "runs" / f"{name}-{self.seed}" / "result.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = read_options(arguments)
        run(options, shlex.join([*PROGRAM.split(), *arguments]))
    except AgentEnvsError as error:
        sys.exit(f"credit: {error}")
    except KeyboardInterrupt:
        sys.exit("credit: Stopped. The same command goes on.")


def read_options(arguments: Sequence[str]) -> CreditArguments:
    """Return the options of a command line; ``--short`` changes the defaults."""
    description = "Score estimators of advantages against true advantages, known by branching."
    options = parse(arguments, CreditArguments, program=PROGRAM, description=description)
    if options.short:
        for name, value in _SHORT.items():
            if not any(word.partition("=")[0] == f"--{name}" for word in arguments):
                setattr(options, name, value)
    for name in ("num_tasks", "max_branches", "budget", "num_eval_tasks"):
        check_range(options, "at least 1", lambda value: value >= 1, name)
    check_range(options, "at least 2", lambda value: value >= 2, "group_size", "max_branches")
    check_range(options, "in (0, 1)", lambda value: 0 < value < 1, "reliability")
    check_range(options, "at least 0", lambda value: value >= 0, "branch_steps")
    for stage in options.stages:
        lookup(dict.fromkeys(STAGES), stage, kind="stage")
    return options


def run(options: CreditArguments, command: str) -> None:
    """Do what is missing, and write the tables after each part.

    Raises:
        AgentEnvsError: If an option, an estimator or the file of true advantages is wrong.
    """
    see_modules_here()
    rows = rows_of(all_estimators(options.estimator))
    facts: dict[str, Any] = {
        "command": command, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": asdict(options), "wanted": [],
    }  # fmt: skip
    output = Path(options.output)
    if options.truth is not None:
        batches = load_batches(options.truth)
        if not batches:
            raise DataError(f"{options.truth}: holds no batches.")
        sys.stdout.write(write_report(output, rows, batches, {}, facts))
        return
    work = Path(options.work)
    check_same_settings(options, work, may_change=_MAY_CHANGE)
    cells = list(plan(options))
    facts["wanted"] = [(c.environment, c.name, c.seed) for c in cells if c.is_truth]

    def report() -> str:
        batches = _measured(work, cells)
        save_batches(output / TRUTH_FILE, batches)
        trained = _trained(work, cells, options.estimator)
        return write_report(output, rows, batches, trained, facts)

    for number, cell in enumerate(cells, start=1):
        if not (work / cell.path).exists():
            sys.stderr.write(f"credit: {number} of {len(cells)}: {cell.path}\n")
            _do(cell, options, work)
            report()
    sys.stdout.write(report())


def plan(options: CreditArguments) -> Iterator[Cell]:
    """Yield the cells, in the order in which they are done: what others need comes first."""
    from benchmarks.credit.policies import STAGES_OF

    algorithms = [ALGORITHMS.get(name, name) for name in all_estimators(options.estimator)]
    needs_stages = any(stage != "start" for stage in options.stages)
    for seed in options.seeds:
        for environment in options.envs:
            if needs_stages:
                yield Cell(environment, STAGES_OF, seed, is_truth=False)
            for stage in options.stages:
                yield Cell(environment, stage, seed, is_truth=True)
    for seed in options.seeds if options.train else ():
        for environment in options.envs:
            for algorithm in algorithms:
                if not (needs_stages and algorithm == STAGES_OF):
                    yield Cell(environment, algorithm, seed, is_truth=False)


def _do(cell: Cell, options: CreditArguments, work: Path) -> None:
    from benchmarks.credit import policies
    from benchmarks.credit.play import measure_batch

    environment = policies.find_environment(cell.environment)
    path = work / cell.path
    path.parent.mkdir(parents=True, exist_ok=True)
    # the same for all seeds: what differs is what is learned from there
    start = policies.make_start(environment, work / cell.path.parts[0] / "policy")
    if cell.is_truth:
        save_batches(path, [measure_batch(cell, environment, start, work, options)])
        return
    policies.train(
        environment, start, path.parent, algorithm=cell.name, seed=cell.seed,
        budget=options.budget, num_tasks=options.num_eval_tasks,
    )  # fmt: skip


def _measured(work: Path, cells: Sequence[Cell]) -> list[CreditBatch]:
    paths = [work / cell.path for cell in cells if cell.is_truth]
    return [batch for path in paths if path.exists() for batch in load_batches(path)]


def _trained(
    work: Path, cells: Sequence[Cell], own: Sequence[str]
) -> dict[tuple[str, str], dict[int, float]]:
    """Return success after training, by environment and estimator, and by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    estimators = {ALGORITHMS.get(name, name): name for name in all_estimators(own)}
    for cell in cells:
        if not cell.is_truth and (path := work / cell.path).exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            key = (cell.environment, estimators[cell.name])
            found.setdefault(key, {})[cell.seed] = float(result["success"])
    return found


if __name__ == "__main__":
    main()
