"""Episodes that outcome-only training needs from rare success: ``python -m benchmarks.sparse``.

Only a right answer to a question of three hops pays. Every method trains policies that solve about
25 %, 5 % and 1 % of the questions. Learning rates are chosen on other seeds. Results are kept in
``--work``: a stopped call resumes.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.credit.regime_run import START_SEED, run_cell
from benchmarks.credit.regimes import mean_kl
from benchmarks.credit.regimes_report import (
    BASELINE,
    HALF,
    compare,
    counted_steps,
    draw,
    regime_section,
)
from benchmarks.grid import Cells, Result, running_cells
from benchmarks.learning_run import MULTI_HOP, LearningRun, check_distinct, check_seeds
from benchmarks.papers_table import POWER, run_facts, write_page

PROGRAM: Final = "python -m benchmarks.sparse"
UNIT: Final = "episodes"
THREE_HOPS: Final = {"hops": 3}
OUTCOME_ONLY: Final = {**THREE_HOPS, "rewards": {"exact_match": 1.0}}
NUM_EPISODES: Final = 32
"""Episodes of a batch."""
WINDOW: Final = 2 * NUM_EPISODES
"""Last episodes whose mean success counts: two batches."""
STARTS: Final[Mapping[str, float | None]] = {"25 %": 0.18, "5 %": 0.04, "1 %": None}
"""Success at which the embedded policy, trained with process rewards, becomes the start policy of a
seed; it is a little better by then. None for the embedded policy itself, which solves 1 to 2 %."""
TUNED_ON: Final = "5 %"
DYNAMIC: Final = "grpo, dynamic sampling"
LARGE_GROUPS: Final = "grpo, groups of 32"
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    BASELINE: (BASELINE,),
    LARGE_GROUPS: (BASELINE, "--num_generations", "32"),
    DYNAMIC: (BASELINE, "--max_extra_groups", "16"),
    "max_rl": ("max_rl",),
    "reinforce++": ("reinforce++",),
    "gagpo": ("gagpo",),
}
"""Value of ``--algorithm`` and options by arm."""
PREDICTED: Final = tuple((arm, BASELINE) for arm in (LARGE_GROUPS, DYNAMIC, "max_rl"))
_SHARED: Final = ("--loss_denominator", "token", "--importance_sampling_level", "token")


@dataclass
class SparseArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(default_factory=lambda: list(range(1, 9)), help="Seeds of runs.")
    tuning_seeds: list[int] = HfArg(
        default_factory=lambda: [101, 102],
        help="Seeds on which learning rates are chosen.",
    )
    learning_rates: list[float] = HfArg(
        default_factory=lambda: [2e-4, 5e-4, 1e-3],
        help=f"Each arm uses the one that needs the fewest episodes from the start of {TUNED_ON}.",
    )
    budget: int = HfArg(default=1500, help="Episodes of a run, those of discarded groups included.")
    jobs: int = HfArg(default=1, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/sparse", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the report.")

    def __post_init__(self) -> None:
        """Check the options."""
        check_range(self, "at least 1", "jobs", "budget")
        check_seeds(self.seeds, self.tuning_seeds)
        check_distinct("learning_rates", self.learning_rates)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, SparseArguments, program=PROGRAM, description=(__doc__ or "").split("\n\n")[0]
    )
    with running_cells(options.work, options.jobs, run_cell) as run:
        tuning = [(TUNED_ON, seed) for seed in options.tuning_seeds]
        reported = [(start, seed) for start in STARTS for seed in options.seeds]
        starts = run(start_cells([*tuning, *reported]))
        tuned: dict[str, Result] = {}
        for rate in options.learning_rates:
            tuned |= run(run_cells(options, tuning, dict.fromkeys(ARMS, rate)))
        rates = choose_rates(options, tuned)
        results = run(run_cells(options, reported, rates))
    done = [*starts.values(), *tuned.values(), *results.values()]
    facts = {
        **run_facts(PROGRAM, arguments, options, done),
        "learning_rates": rates, "runs": results,
        "starts": {name: result["success"] for name, result in starts.items()},
        "tuning": {name: counted_steps(r["steps"], options.budget) for name, r in tuned.items()},
    }  # fmt: skip
    _report(options, results, rates, facts)


def start_cells(places: Sequence[tuple[str, int]]) -> Cells:
    """Return the cells that make and evaluate the start policies of pairs of start and seed."""
    return {
        _start_name(start, seed): {
            "start": None if STARTS[start] is None else asdict(LearningRun(
                method="grpo", seed=START_SEED + seed, budget=30_000, num_tasks=0, columns=(),
                env_kwargs=THREE_HOPS, learning_rate=1.5e-4, num_episodes=64,
                until=STARTS[start], window=2 * WINDOW,
            )),
            "env": MULTI_HOP, "env_kwargs": THREE_HOPS,
        }
        for start, seed in places
    }  # fmt: skip


def run_cells(
    options: SparseArguments, places: Sequence[tuple[str, int]], rates: Mapping[str, float]
) -> Cells:
    """Return the cells of all arms at pairs of start and seed."""
    cells: Cells = {}
    for start, seed in places:
        policy = Path(options.work).resolve() / _start_name(start, seed) / "policy"
        for arm in ARMS:
            method, *chosen = ARMS[arm]
            run = LearningRun(
                method=method, seed=seed, budget=options.budget, num_tasks=0, columns=(),
                env_kwargs=OUTCOME_ONLY, learning_rate=rates[arm], options=(*_SHARED, *chosen),
                start=None if STARTS[start] is None else str(policy),
                num_episodes=NUM_EPISODES, until=HALF, window=WINDOW,
            )  # fmt: skip
            spec = {"run": asdict(run), "counts_episodes": True}
            cells[cell_name(start, arm, seed, rates[arm])] = spec
    return cells


def choose_rates(options: SparseArguments, tuned: Mapping[str, Result]) -> dict[str, float]:
    """Return for each arm the rate with the fewest episodes to 50 %, then the most success."""

    def cost(arm: str, rate: float) -> tuple[float, float]:
        runs = [tuned[cell_name(TUNED_ON, arm, seed, rate)] for seed in options.tuning_seeds]
        episodes = statistics.fmean(counted_steps(run["steps"], options.budget) for run in runs)
        return episodes, -statistics.fmean(success for run in runs for _, success in run["curve"])

    return {
        arm: min(sorted(options.learning_rates), key=lambda rate: cost(arm, rate)) for arm in ARMS
    }


def _report(
    options: SparseArguments,
    results: Mapping[str, Result],
    rates: Mapping[str, float],
    facts: dict[str, Any],
) -> None:
    outcomes, sections = {}, [_method(options, facts)]
    for start in STARTS:
        runs = {
            arm: [results[cell_name(start, arm, seed, rates[arm])] for seed in options.seeds]
            for arm in ARMS
        }
        outcomes[start] = {arm: [[run["steps"]] for run in row] for arm, row in runs.items()}
        success = [facts["starts"][_start_name(start, seed)] for seed in options.seeds]
        shown = {
            "description": f"Success of the start policies on held-out tasks: mean "
            f"{statistics.fmean(success):.1%}, from {min(success):.1%} to {max(success):.1%}.",
            "rates": rates, "kl": {arm: mean_kl(row) for arm, row in runs.items()},
        }  # fmt: skip
        sections.append(
            regime_section(
                start, outcomes[start], options.budget, facts=shown, predicted=PREDICTED, unit=UNIT
            )
        )
    facts["comparisons"] = {
        start: [asdict(found) for found in compare(arms, options.budget)]
        for start, arms in outcomes.items()
    }
    write_page(options.output, "sparse", facts, "\n\n".join(sections) + "\n")
    budgets = dict.fromkeys(outcomes, options.budget)
    draw(Path(options.output) / "sparse.png", outcomes, budgets, UNIT)


def _method(options: SparseArguments, facts: Mapping[str, Any]) -> str:
    return "\n\n".join([
        "# Outcome-only learning from rare success",
        f"`{facts['command']}`, {facts['date']}: {facts['num_runs']} cells, {facts['hours']:.1f} "
        "CPU hours. " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items()) + ".",
        "Questions of three hops; only the right answer pays. *Episodes* are all that a run "
        "samples, those of groups that dynamic sampling discards included, until the mean success "
        f"of the last two batches of training reaches 50 %, over {len(options.seeds)} seeds. A run "
        f"that never gets there counts with its whole budget of {options.budget:,}, so means are "
        "lower bounds where *never* is above 0. Batches have "
        f"{NUM_EPISODES} episodes in groups of 8, except where stated. Ratio level and loss "
        "denominator are the token; learning rates fall to 0 over the budget.",
        "Start policies: the embedded policy, trained with process rewards until it has about the "
        "given success, one for each seed; for 1 %, the embedded policy itself.",
        f"Learning rates: of {', '.join(f'{rate:g}' for rate in options.learning_rates)} the one "
        f"with the fewest episodes to 50 % from {TUNED_ON}, on seeds {options.tuning_seeds}.",
        f"Arms are compared with *{BASELINE}*, paired by seed: exact sign-flip test, Holm's "
        "correction over the arms of a table, 95 % interval by Student's t. *Detectable* is the "
        f"smallest true difference that the test finds with a probability of {POWER:.0%} if it "
        "has the smallest p.",
        "![Episodes to 50 % by start](sparse.png)",
    ])  # fmt: skip


def cell_name(start: str, arm: str, seed: int, rate: float) -> str:
    """Return the key of a run."""
    return f"{start}/{arm}-{rate:g}/seed{seed}".replace(" ", "_").replace("%", "percent")


def _start_name(start: str, seed: int) -> str:
    name = f"starts/{start}".replace(" ", "_").replace("%", "percent")
    return name if STARTS[start] is None else f"{name}-{seed}"


if __name__ == "__main__":
    main(sys.argv[1:])
