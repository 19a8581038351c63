"""Published claims tested under one protocol: ``python -m benchmarks.claims``.

Every arm trains the embedded policy with the same budget of sampled tokens, two optimiser steps per
batch (with one, importance ratios are 1 and clipping never acts) and paired seeds. A claim compares
the means of two sets of arms, so a main effect of a factorial design is one, too.
"""

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import (
    ALPHA,
    Interval,
    holm,
    mean_interval,
    p_value_text,
    paired_test,
)
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.grid import Grid, Result
from benchmarks.learning_run import LONG_HORIZON, LearningRun, check_seeds
from benchmarks.papers_table import (
    FIRST_TUNING_TASK,
    NUM_TUNING_TASKS,
    POWER,
    TRAINED_ON,
    TUNING_SEEDS,
    choose_rates,
    compute_runs,
    detectable_ratio,
    mean_scores,
    mean_text,
    run_facts,
    too_few_seeds,
    write_page,
)

PROGRAM: Final = "python -m benchmarks.claims"
START: Final = "long_horizon/policy"
"""Folder in the work folder of the initial policy of the long horizon, which solves some tasks."""
_MAKE_START: Final = (
    "import sys; from pathlib import Path; from benchmarks.credit.policies import make_start; "
    "make_start('long horizon', Path(sys.argv[1]))"
)
_WINDOW: Final = {"context": {"name": "window", "turns": 1}}
_SKILLS: Final = '{"agent_trainers.experimental.skills:SkillDistillation":{"weight":0.1}}'
_QUESTIONS: Final = {"questions": 9, "max_episode_steps": 30}
_LONG: Final[Mapping[str, Any]] = {
    "env": LONG_HORIZON, "env_kwargs": _QUESTIONS, "eval_kwargs": _QUESTIONS,
    "columns": ("three questions",),
}  # fmt: skip


def _arm(method: str, options: str = "", **fields: Any) -> dict[str, Any]:
    """Return the fields of a `LearningRun`; the loss is a mean over tokens unless overridden."""
    shared = "--num_iterations 2 --loss_denominator token"
    return {"method": method, "options": (*shared.split(), *options.split()), **fields}


def cell(credit: str, ratio: str, mean: str) -> str:
    """Return the arm of the 2x2x2 design of StepPPO's changes; levels are "token" and "step"."""
    return f"ppo {credit}/{ratio}/{mean}"


LEVELS: Final = tuple(itertools.product(("token", "step"), repeat=3))
"""Credit, importance ratio and mean of the loss of each cell."""
PPO: Final = cell("token", "token", "token")
STEP_PPO: Final = cell("step", "step", "step")
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{
        # gamma 1: a discount of .99 per token and one of .99 per step differ by more than credit
        cell(credit, ratio, mean): _arm(
            "ppo", f"--gamma 1.0 --advantage_estimator gae_{credit} "
            f"--importance_sampling_level {ratio} --loss_denominator {mean}",
        )
        for credit, ratio, mean in LEVELS
    },
    "ppo, no advantage mask": _arm("ppo", "--gamma 1.0 --advantage_mask false"),
    "grpo": _arm("grpo"),
    "grpo, trajectory mean": _arm("grpo", "--loss_denominator trajectory"),
    "dr_grpo": _arm("dr_grpo"),
    "grpo, epsilon_high .28": _arm("grpo", "--epsilon_high 0.28"),
    "grpo, dynamic sampling": _arm("grpo", "--max_extra_groups 16"),
    "grpo, no loss mask": _arm("grpo", "--loss_mask false"),
    "grpo, skills": _arm("grpo", f"--extensions {_SKILLS}"),
    "grpo, window": _arm("grpo", env_kwargs=TRAINED_ON | _WINDOW, eval_kwargs=_WINDOW),
    "grpo, long horizon": _arm("grpo", "--per_device_train_batch_size 16", **_LONG),
    "gigpo, long horizon": _arm("gigpo", "--per_device_train_batch_size 16", **_LONG),
}  # fmt: skip
"""Fields of `LearningRun` by arm."""


class Claim(NamedTuple):
    """A published claim, and the arms that test it."""

    source: str
    """arXiv number."""
    claimed: str
    better: Sequence[str]
    """Arms whose mean success should be higher."""
    other: Sequence[str]
    """Arms that they are compared with."""


def _main_effect(factor: int, claimed: str) -> Claim:
    step, token = (
        tuple(cell(*levels) for levels in LEVELS if levels[factor] == level)
        for level in ("step", "token")
    )
    published = "published only together with the other two changes"
    return Claim("2604.18401", f"StepPPO: {claimed}; {published}.", step, token)


CLAIMS: Final[Mapping[str, Claim]] = {
    "step_credit": _main_effect(0, "advantages per step instead of per token help"),
    "step_ratio": _main_effect(1, "importance ratios per step instead of per token help"),
    "step_mean": _main_effect(2, "a loss averaged over steps instead of tokens helps"),
    "step_ppo": Claim(
        "2604.18401", "StepPPO, all three, is better than PPO on tokens.", [STEP_PPO], [PPO]),
    "step_ppo_grpo": Claim(
        "2604.18401", "StepPPO is better than GRPO: HotpotQA 63.8 against 56.6, 2Wiki 66.2 against "
        "63.3, MuSiQue 29.9 against 25.1.", [STEP_PPO], ["grpo"]),
    "gigpo": Claim(
        "2505.10978", "GiGPO is better than GRPO over long horizons: by more than 12 % on ALFWorld "
        "and 9 % on WebShop.", ["gigpo, long horizon"], ["grpo, long horizon"]),
    "dr_grpo": Claim(
        "2503.20783", "Dr. GRPO: tokens are used better if advantages are not divided by the "
        "group's standard deviation.", ["dr_grpo"], ["grpo"]),
    "token_mean": Claim(
        "2503.14476", "DAPO: a loss averaged over tokens instead of trajectories helps: AIME 2024 "
        "from 41 to 42.", ["grpo"], ["grpo, trajectory mean"]),
    "clip_higher": Claim(
        "2503.14476", "DAPO: an upper clipping bound of .28 instead of .2 helps: AIME 2024 from 36 "
        "to 38.", ["grpo, epsilon_high .28"], ["grpo"]),
    "dynamic_sampling": Claim(
        "2503.14476", "DAPO: replacing groups with equal returns helps: AIME 2024 from 42 to 50.",
        ["grpo, dynamic sampling"], ["grpo"]),
    "loss_mask": Claim(
        "2511.14460", "The loss mask helps GRPO: mean EM .3877 against .3722.",
        ["grpo"], ["grpo, no loss mask"]),
    "advantage_mask": Claim(
        "2511.14460", "The advantage mask helps PPO: mean EM .3719 against .3136.",
        [PPO], ["ppo, no advantage mask"]),
    "skill_sd": Claim(
        "2604.10674", "Self-distillation from skills helps GRPO: 14.0 points on AppWorld, 10.9 on "
        "Sokoban.", ["grpo, skills"], ["grpo"]),
    "context": Claim(
        "2511.14460v2", "A sliding window of the history is better than all of it.",
        ["grpo, window"], ["grpo"]),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of the test of a claim; differences are shares."""

    verdict: str
    """"confirmed", "contradicted" or "no difference found"."""
    difference: Interval
    """Arms that should be better, less the others; 95 % by Student's t, not adjusted."""
    p_value: float
    """Exact sign-flip test with Holm's correction over all claims."""
    detectable: float | None
    """Smallest true difference found with probability `POWER`; None with too few seeds."""


@dataclass
class ClaimsArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(default_factory=lambda: list(range(1, 11)), help="Seeds of each arm.")
    claims: list[str] = HfArg(
        default_factory=lambda: list(CLAIMS), help=f"Claims to test, of {', '.join(CLAIMS)}."
    )
    learning_rates: list[float] = HfArg(
        default_factory=lambda: [1e-3, 2e-3],
        help="Each family of arms trains with the best of them on tuning seeds.",
    )
    budget: int = HfArg(default=20_000, help="Sampled tokens of training per run.")
    num_tasks: int = HfArg(default=200, help="Held-out tasks per column.")
    jobs: int = HfArg(default=2, help="Runs at the same time, on one core each.")
    work: str = HfArg(default="runs/claims", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, ClaimsArguments, program=PROGRAM,
        description="Test published claims with the embedded policy at equal sampled tokens.",
    )  # fmt: skip
    check_seeds(options.seeds, TUNING_SEEDS)
    if len(options.seeds) < 2:
        raise ConfigurationError("--seeds: give at least two.")
    claims = {name: lookup(CLAIMS, name, kind="claim") for name in options.claims}
    arms = list(dict.fromkeys(arm for c in claims.values() for arm in (*c.better, *c.other)))
    with Grid(options.work) as grid:
        if any("env" in ARMS[arm] for arm in arms):
            _make_start(grid)
        rates, tried = _tune(grid, arms, options)
        runs = {
            arm: [learning_run(arm, seed, rates[_family(arm)], options) for seed in options.seeds]
            for arm in arms
        }
        results = compute_runs(grid, runs, options.jobs)
        done = [record["result"] for record in grid.stored().values()]
    scores = {arm: mean_scores(runs) for arm, runs in results.items()}
    differences = {name: differences_by_seed(claim, scores) for name, claim in claims.items()}
    findings = judge(differences, np.random.default_rng(0))
    facts = {
        **run_facts(PROGRAM, arguments, options, done), "learning_rates": rates, "tuning": tried,
    }  # fmt: skip
    found = {
        name: {**claims[name]._asdict(), **asdict(finding), "differences": differences[name]}
        for name, finding in findings.items()
    }
    text = _markdown(claims, findings, results, facts)
    write_page(options.output, "claims", {"claims": found, "arms": results, **facts}, text)


def learning_run(arm: str, seed: int, rate: float, options: ClaimsArguments) -> LearningRun:
    """Return a run of an arm."""
    fields = {"env_kwargs": TRAINED_ON, "columns": ("clean facts", "outdated facts"), **ARMS[arm]}
    if "env" in fields:
        fields["start"] = str(Path(options.work) / START)
    return LearningRun(
        seed=seed, learning_rate=rate, budget=options.budget, counts_tokens=True,
        num_tasks=options.num_tasks, **fields,
    )  # fmt: skip


def _family(arm: str) -> str:
    """Return the arm with whose learning rate an arm trains."""
    if "env" in ARMS[arm]:
        return "grpo, long horizon"
    return PPO if ARMS[arm]["method"] == "ppo" else "grpo"


def _make_start(grid: Grid) -> None:
    def compute(_: str, __: object) -> Result:
        return {"seconds": grid.command(["python", "-c", _MAKE_START, str(grid.work)], grid.work)}

    grid.run({START: _MAKE_START}, compute)


def _tune(
    grid: Grid, arms: Sequence[str], options: ClaimsArguments
) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """Return the best learning rate of each family, and the success of each on tuning seeds."""
    runs = {
        (family, rate): [
            replace(
                learning_run(family, seed, rate, options),
                num_tasks=min(options.num_tasks, NUM_TUNING_TASKS),
                first_task=FIRST_TUNING_TASK,
            )
            for seed in TUNING_SEEDS
        ]
        for family in dict.fromkeys(map(_family, arms))
        for rate in sorted(options.learning_rates)
    }
    return choose_rates(grid, runs, options.jobs)


def differences_by_seed(claim: Claim, scores: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean of the arms that should be better less that of the others, by seed."""
    better, other = (
        np.mean([scores[arm] for arm in arms], axis=0) for arms in (claim.better, claim.other)
    )
    differences: list[float] = (better - other).tolist()
    return differences


def judge(
    differences: Mapping[str, Sequence[float]], rng: np.random.Generator
) -> dict[str, Finding]:
    """Test claims by their differences by seed, with Holm's correction over all of them."""
    p_values = holm([paired_test(values) for values in differences.values()])
    num_seeds = len(next(iter(differences.values())))
    ratio = detectable_ratio(num_seeds, len(differences), rng)
    findings = {}
    for (name, values), p_value in zip(differences.items(), p_values, strict=True):
        interval = mean_interval(values)
        verdict = "confirmed" if interval.mean > 0 else "contradicted"
        findings[name] = Finding(
            verdict=verdict if p_value < ALPHA else "no difference found",
            difference=interval,
            p_value=p_value,
            detectable=None if ratio is None else ratio * statistics.stdev(values),
        )
    return findings


def _markdown(
    claims: Mapping[str, Claim],
    findings: Mapping[str, Finding],
    results: Mapping[str, Sequence[Result]],
    facts: Mapping[str, Any],
) -> str:
    settings = facts["settings"]
    num_seeds, num_claims = len(settings["seeds"]), len(claims)
    rates = "; ".join(f"*{arm}* {rate:g}" for arm, rate in facts["learning_rates"].items())
    start = f'`python -c "{_MAKE_START}" {settings["work"]}`'
    parts = [
        "# Published claims, tested again",
        f"The embedded policy in the synthetic environments. `{facts['command']}`, "
        f"{facts['date']}: {facts['num_runs']} runs of {facts['hours']:.1f} hours in total. "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"Every run trains with {settings['budget']:,} sampled tokens: those that the policy "
        "generates in training, also in episodes that dynamic sampling discards; prompts, "
        "observations and teachers do not count. The learning rate decays to 0 over the budget. A "
        "batch is used for two optimiser steps, of which only the second can clip. All arms "
        "average the loss over tokens and have gamma 1, except where that is the claim. Multi-hop "
        "questions, half of the worlds with outdated facts, are trained in batches of 128 "
        "episodes; the long horizon, nine questions in a row, in batches of 16 from a policy that "
        f"solves 20 % of three, made by {start}. Success is measured on {settings['num_tasks']} "
        "held-out tasks per column.",
        f"Learning rates, the best of each family by success on tuning seeds and tasks: {rates}.",
        f"Differences are in points, paired by {num_seeds} seeds, with 95 % intervals by Student's "
        f"t; p is that of the exact sign-flip test with Holm's correction over {num_claims} "
        "claims. The detectable difference gives the power: the smallest true difference that so "
        f"many seeds with the observed spread would find with a probability of {POWER:.0%}, if it "
        "had the smallest p. *No difference found* says nothing of smaller ones.",
        *too_few_seeds(num_seeds, num_claims),
        markdown_table(
            ["claim", "source", "claimed", "found", "interval", "p", "detectable difference",
             "command"],
            [_claim_row(name, claim, findings[name]) for name, claim in claims.items()],
            names=4,
        ),
        "A command runs both arms of a claim; `claims.json` has the command of every run, and the "
        "curves.",
        "*ppo a/b/c*: credit per a, importance ratio per b, mean of the loss per c. *Clipped*: "
        "share of the trained tokens, over all optimiser steps.",
        markdown_table(
            ["arm", "success", "tokens", "clipped", "seconds"],
            [_arm_row(arm, runs) for arm, runs in results.items()],
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _claim_row(name: str, claim: Claim, finding: Finding) -> list[str]:
    detectable, difference = finding.detectable, finding.difference
    return [
        name, f"arXiv {claim.source}", claim.claimed,
        f"{finding.verdict}: {100 * difference.mean:+.1f}",
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        p_value_text(finding.p_value),
        "none" if detectable is None else f"{100 * detectable:.1f}",
        f"`{PROGRAM} --claims {name}`",
    ]  # fmt: skip


def _arm_row(arm: str, runs: Sequence[Result]) -> list[str]:
    tokens = statistics.fmean(run["curve"][-1][0] for run in runs)
    clipped = statistics.fmean(run["clip_ratio"] for run in runs)
    seconds = statistics.fmean(run["seconds"] for run in runs)
    success = mean_text(mean_scores(runs))
    return [arm, success, f"{tokens:,.0f}", f"{clipped:.2%}", f"{seconds:.0f}"]


if __name__ == "__main__":
    main(sys.argv[1:])
