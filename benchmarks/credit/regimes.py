"""Training by several estimators where credit should matter, and where it should not.

``python -m benchmarks.credit.regimes`` makes the start policies of each regime, chooses a learning
rate for each arm by the KL divergence of its updates on other seeds, trains every arm from every
start with every seed, and writes ``regimes.md``. Results are kept in ``--work``: a stopped call
resumes.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_envs.core.lookup import lookup
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.credit.regime_run import run_cell
from benchmarks.credit.regimes_report import (
    BASELINE,
    HALF,
    compare,
    draw,
    regime_section,
)
from benchmarks.grid import Cells, Result, running_cells
from benchmarks.learning_run import (
    LONG_HORIZON,
    MULTI_HOP,
    LearningRun,
    check_distinct,
    check_seeds,
)
from benchmarks.papers_table import POWER, run_facts, write_page

PROGRAM: Final = "python -m benchmarks.credit.regimes"
TARGET_KL: Final = (0.005, 0.01)
"""Mean KL divergence per token and update; see `benchmarks.credit.regime_run.UpdateKL`."""
BIFURCATION: Final = "AgentR1/SyntheticBifurcation-v0"
ORACLE: Final = "oracle"
ORACLE_BRANCHES: Final = 2.0
"""Environment steps of the oracle's branches, which do not count, per step of its episodes."""
_SHARED: Final = (
    "--loss_denominator", "token", "--importance_sampling_level", "token",
    "--scale_rewards", "group",
)  # fmt: skip
_FREE: Final = {"agent_trainers.experimental.branching:Branching": {"budget": ORACLE_BRANCHES}}
_PAYS_BRANCHES: Final = ("vine", "tree")
BRANCH_SHARE: Final = 0.75
"""Episodes of `_PAYS_BRANCHES` in a batch: with branches, a third of their steps, as many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Environment and arms of a comparison."""

    description: str
    start: str
    """Kind of start policy; see `benchmarks.credit.regime_run`."""
    env: str
    arms: Sequence[str]
    budget: int
    """Environment steps of a run."""
    num_episodes: int
    """Episodes of a batch."""
    window: int = 32
    """Last episodes of training whose mean success is compared with 50 %."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    predicted: Sequence[tuple[str, str]] = ()
    """Pairs of arms, the one that should need fewer steps first; none if all should tie."""


_NINE: Final = {"questions": 9, "max_episode_steps": 30}
REGIMES: Final[Mapping[str, Regime]] = {
    "step": Regime(
        description="Nine questions, 27 turns, process rewards: step credit should matter.",
        start="nine questions", env=LONG_HORIZON, kwargs=_NINE, budget=8000, num_episodes=8,
        arms=("grpo", "grpo_step", "gigpo", "gagpo", ORACLE),
        predicted=((ORACLE, "grpo_step"), ("grpo_step", "grpo"), ("gigpo", "grpo")),
    ),
    "branch": Regime(
        description="Nine questions, reward 1 if all answers are right, otherwise 0: branches "
        "should matter.",
        start="nine questions", env=LONG_HORIZON,
        kwargs={**_NINE, "rewards": {"all_correct": 1.0}}, budget=20_000, num_episodes=32,
        arms=("grpo", "gagpo", "vine", "tree", ORACLE),
        predicted=((ORACLE, "vine"), ("vine", "grpo"), ("tree", "grpo")),
    ),
    "bifurcation": Regime(
        description="One of the steps decides, at a position that is not shown; outcome reward.",
        start="bifurcation", env=BIFURCATION, kwargs={"tool_format": "tags"}, budget=6000,
        num_episodes=32, window=128,  # tasks differ: four share each batch
        arms=("grpo", "grpo_step", "gagpo", "vine"),
        predicted=(("gagpo", "grpo"), ("vine", "grpo")),
    ),
    "control": Regime(
        description="One question, two to four turns, process rewards: credit should not matter.",
        start="multi-hop", env=MULTI_HOP, budget=2500, num_episodes=32, window=64,
        arms=("grpo", "grpo_step", "gagpo", "vine"),
    ),
}  # fmt: skip
Rates = dict[str, dict[str, float]]
"""Learning rate by regime and arm."""


@dataclass
class RegimesArguments:
    """Options of the command."""

    regimes: list[str] = HfArg(
        default_factory=lambda: list(REGIMES), help=f"Some of {', '.join(REGIMES)}."
    )
    seeds: list[int] = HfArg(default_factory=lambda: list(range(1, 9)), help="Seeds of runs.")
    starts: list[int] = HfArg(
        default_factory=lambda: [1, 2, 3], help="Numbers of the start policies; also their seeds."
    )
    tuning_seeds: list[int] = HfArg(
        default_factory=lambda: [101, 102], help="Seeds on which learning rates are chosen."
    )
    learning_rates: list[float] = HfArg(
        default_factory=lambda: [2e-4, 3e-4, 5e-4],
        help="Each arm uses the one whose mean KL divergence per update is nearest to the target.",
    )
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/regimes", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the report.")

    def __post_init__(self) -> None:
        """Check the options."""
        for name in self.regimes:
            lookup(REGIMES, name, kind="regime")
        check_range(self, "at least 1", "jobs")
        check_seeds(self.seeds, self.tuning_seeds)
        check_distinct("starts", self.starts)
        check_distinct("learning_rates", self.learning_rates)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, RegimesArguments, program=PROGRAM, description=(__doc__ or "").split("\n\n")[0]
    )
    with running_cells(options.work, options.jobs, run_cell) as run:
        starts = run(start_cells(options))
        tuned = run(run_cells(options, options.starts[:1], options.tuning_seeds))
        rates = choose_rates(options, tuned)
        results = run(run_cells(options, options.starts, options.seeds, rates))
    done = [*starts.values(), *tuned.values(), *results.values()]
    facts = {
        **run_facts(PROGRAM, arguments, options, done), "learning_rates": rates,
        "starts": {name: result["success"] for name, result in starts.items()},
        "tuning": {name: [r["kl"], r["seconds"]] for name, r in tuned.items()}, "runs": results,
    }  # fmt: skip
    report(options, results, rates, facts)


def start_cells(options: RegimesArguments) -> Cells:
    """Return the cells of start policies; regimes with one kind share them."""
    return {
        _start_name(regime, number): {
            "start": regime.start, "number": number, "env": regime.env,
            "env_kwargs": {k: v for k, v in regime.kwargs.items() if k != "rewards"},
        }
        for regime in map(REGIMES.__getitem__, options.regimes)
        for number in options.starts
    }  # fmt: skip


def run_cells(
    options: RegimesArguments,
    starts: Sequence[int],
    seeds: Sequence[int],
    rates: Rates | None = None,
) -> Cells:
    """Return the cells of all arms; without `rates` those of tuning, with every learning rate."""
    cells: Cells = {}
    for name in options.regimes:
        for arm in REGIMES[name].arms:
            for rate in options.learning_rates if rates is None else [rates[name][arm]]:
                for start in starts:
                    for seed in seeds:
                        run = learning_run(name, arm, start, seed, rate, options)
                        key = cell_name(name, arm, start, seed, rate)
                        cells[key] = {"run": asdict(run)}
    return cells


def learning_run(
    name: str, arm: str, start: int, seed: int, rate: float, options: RegimesArguments
) -> LearningRun:
    """Return the run of an arm."""
    regime, is_oracle = REGIMES[name], arm == ORACLE
    share = BRANCH_SHARE if arm in _PAYS_BRANCHES else 1.0
    free = ("--extensions", json.dumps(_FREE)) if is_oracle else ()
    work = Path(options.work).resolve()
    return LearningRun(
        method="vine" if is_oracle else arm, seed=seed, budget=regime.budget, num_tasks=0,
        columns=(), env=regime.env, env_kwargs=regime.kwargs, learning_rate=rate,
        options=(*_SHARED, *free), start=str(work / _start_name(regime, start) / "policy"),
        num_episodes=int(share * regime.num_episodes), are_branches_free=is_oracle,
        until=HALF, window=regime.window,
    )  # fmt: skip


def choose_rates(options: RegimesArguments, tuned: Mapping[str, Result]) -> Rates:
    """Return for each arm the rate whose mean KL divergence is nearest to the target, by ratio."""
    target = math.sqrt(math.prod(TARGET_KL))

    def distance(name: str, arm: str, rate: float) -> float:
        runs = (
            tuned[cell_name(name, arm, options.starts[0], seed, rate)]
            for seed in options.tuning_seeds
        )
        divergence = mean_kl(runs)
        return abs(math.log(divergence / target)) if divergence > 0 else math.inf

    return {
        name: {
            arm: min(sorted(options.learning_rates), key=partial(distance, name, arm))
            for arm in REGIMES[name].arms
        }
        for name in options.regimes
    }


def mean_kl(runs: Iterator[Result] | Sequence[Result]) -> float:
    """Return the mean KL divergence of the updates of some runs, 0 without any."""
    return statistics.fmean([value for run in runs for value in run["kl"]] or [0.0])


def report(
    options: RegimesArguments, results: Mapping[str, Result], rates: Rates, facts: dict[str, Any]
) -> None:
    """Write tables, comparisons and the picture."""
    outcomes, sections = {}, [_method(options, facts)]
    for name in options.regimes:
        regime, kl = REGIMES[name], {}
        outcomes[name] = {arm: [] for arm in regime.arms}
        for arm in regime.arms:
            runs = [
                [
                    results[cell_name(name, arm, start, seed, rates[name][arm])]
                    for start in options.starts
                ]
                for seed in options.seeds
            ]
            outcomes[name][arm] = [[run["steps"] for run in row] for row in runs]
            kl[arm] = mean_kl([run for row in runs for run in row])
        shown = {"description": regime.description, "rates": rates[name], "kl": kl}
        sections.append(
            regime_section(
                name, outcomes[name], regime.budget, facts=shown, predicted=regime.predicted
            )
        )
    budgets = {name: REGIMES[name].budget for name in options.regimes}
    facts["comparisons"] = {
        name: [asdict(found) for found in compare(arms, budgets[name])]
        for name, arms in outcomes.items()
    }
    write_page(options.output, "regimes", facts, "\n\n".join(sections) + "\n")
    draw(Path(options.output) / "regimes.png", outcomes, budgets)


def _method(options: RegimesArguments, facts: Mapping[str, Any]) -> str:
    starts = "; ".join(f"{name}: {100 * value:.1f} %" for name, value in facts["starts"].items())
    return "\n\n".join([
        "# Credit by regime",
        f"`{facts['command']}`, {facts['date']}: {facts['num_runs']} cells, {facts['hours']:.1f} "
        "CPU hours. " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items()) + ".",
        "Environment steps until the mean success of the last training episodes ("
        + ", ".join(f"{name}: {REGIMES[name].window}" for name in options.regimes)
        + f"; in whole batches) reaches 50 %, over {len(options.seeds)} seeds and "
        f"{len(options.starts)} start policies. "
        f"Branches count, except those of *{ORACLE}*: `vine` with "
        f"{ORACLE_BRANCHES:g} branch steps per step, near-true advantages. A run that never gets "
        "there counts with its whole budget, so means are lower bounds where *never* is above 0; "
        "the others end there. Ratio level and loss denominator are the token, advantages are "
        "scaled by group, learning rates fall to 0 over the budget.",
        f"Learning rates: of {', '.join(f'{rate:g}' for rate in options.learning_rates)} the one "
        f"whose mean KL divergence per token and update on seeds {options.tuning_seeds} is nearest "
        f"to the middle of {TARGET_KL[0]} and {TARGET_KL[1]}. It is measured between the policy "
        "that sampled a batch and the policy after the update, on the batch's own tokens; updates "
        "without any advantage are left out. *KL* is that of the reported runs.",
        f"Success of the start policies on held-out tasks: {starts}.",
        f"Arms are compared with *{BASELINE}*, paired by seed after averaging over the start "
        "policies: exact sign-flip test, Holm's correction over the arms of a table, 95 % interval "
        "by Student's t. *Detectable* is the smallest true difference that the test finds with a "
        f"probability of {POWER:.0%} if it has the smallest p.",
        "![Steps to 50 % by regime](regimes.png)",
    ])  # fmt: skip


def cell_name(regime: str, arm: str, start: int, seed: int, rate: float) -> str:
    """Return the key of a run."""
    return f"{regime}/{arm}-{rate:g}/start{start}-seed{seed}"


def _start_name(regime: Regime, number: int) -> str:
    return f"starts/{re.sub(' ', '_', regime.start)}-{number}"


if __name__ == "__main__":
    main(sys.argv[1:])
