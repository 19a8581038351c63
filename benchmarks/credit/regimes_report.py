"""Report of the comparison by regime: tables, paired tests, predicted orders and a picture."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.scoring.statistics import (
    ALPHA,
    Interval,
    holm,
    mean_interval,
    p_value_text,
    paired_test,
)
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.papers_table import detectable_ratio, too_few_seeds

HALF: Final = 0.5
BASELINE: Final = "grpo"


Steps = int | None
"""Environment steps of a run until its success reached `HALF`; None if it never did."""
Outcomes = Mapping[str, Sequence[Sequence[Steps]]]
"""Steps by arm; for each seed, one number per start policy, in the same order for all arms."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Environment steps of an arm less those of the baseline, paired by seed."""

    arm: str
    difference: Interval
    """Over seeds, each the mean over start policies."""
    p_value: float
    """Exact sign-flip test, two-sided, with Holm's correction over the arms of the table."""
    detectable: float | None
    """Smallest true difference found with probability `POWER`; None with too few seeds."""
    num_fewer: tuple[int, int]
    """Number of seeds, and of start policies, in which the arm needs fewer steps on average."""


def counted_steps(steps: Steps, budget: int) -> int:
    """Return the steps that a run counts with: at most the budget, which is that of never."""
    return budget if steps is None else min(steps, budget)


def compare(outcomes: Outcomes, budget: int) -> list[Comparison]:
    """Compare every arm with the baseline; a run that never got there counts as `budget`."""
    steps = {
        arm: [[counted_steps(run, budget) for run in row] for row in rows]
        for arm, rows in outcomes.items()
    }
    arms = [arm for arm in outcomes if arm != BASELINE]
    tables = {
        arm: [
            [own - other for own, other in zip(*rows, strict=True)]
            for rows in zip(steps[arm], steps[BASELINE], strict=True)
        ]
        for arm in arms
    }
    by_seed = {arm: [statistics.fmean(row) for row in table] for arm, table in tables.items()}
    adjusted = holm([paired_test(by_seed[arm]) for arm in arms])
    num_seeds = len(by_seed[arms[0]])
    ratio = detectable_ratio(num_seeds, len(arms), np.random.default_rng(0))
    return [
        Comparison(
            arm=arm,
            difference=mean_interval(by_seed[arm]),
            p_value=p_value,
            detectable=None if ratio is None else ratio * statistics.stdev(by_seed[arm]),
            num_fewer=(
                sum(value < 0 for value in by_seed[arm]),
                sum(statistics.fmean(column) < 0 for column in zip(*tables[arm], strict=True)),
            ),
        )
        for arm, p_value in zip(arms, adjusted, strict=True)
    ]


def mean_steps(rows: Sequence[Sequence[Steps]], budget: int) -> Interval:
    """Estimate the mean steps to `HALF` over seeds, each the mean over start policies."""
    return mean_interval(
        [statistics.fmean(counted_steps(run, budget) for run in row) for row in rows]
    )


def predictions(
    outcomes: Outcomes, budget: int, predicted: Sequence[tuple[str, str]], unit: str = "steps"
) -> list[str]:
    """Return for each predicted pair, faster arm first, whether the means agree."""
    means = {arm: mean_steps(rows, budget).mean for arm, rows in outcomes.items()}
    return [
        f"*{fast}* needs at most the {unit} of *{slow}*: "
        + ("held" if means[fast] <= means[slow] else "**did not hold**")
        + f" ({means[fast]:,.0f} and {means[slow]:,.0f})."
        for fast, slow in predicted
    ]


def verdict(found: Comparison, num_seeds: int, num_starts: int, unit: str = "steps") -> str:
    """Return a comparison in words."""
    seeds, starts = found.num_fewer
    difference = found.difference
    size = f"{difference.mean:+,.0f} {unit}"
    if math.isfinite(difference.high):
        size += f" [{difference.low:+,.0f}, {difference.high:+,.0f}]"
    text = f"*{found.arm}* and *{BASELINE}*: no significant difference"
    if found.p_value < ALPHA:
        text = f"*{found.arm}* needs {'fewer' if difference.mean < 0 else 'more'} {unit} than "
        text += f"*{BASELINE}*"
    p_value = p_value_text(found.p_value)
    p_text = f"p = {p_value}" if p_value[0] != "<" else f"p {p_value}"
    return (
        f"{text} ({p_text}): {size}, fewer with {seeds} of {num_seeds} seeds"
        + (f" and {starts} of {num_starts} start policies." if num_starts > 1 else ".")
        + ("" if found.detectable is None else f" Detectable: {found.detectable:,.0f}.")
    )


def regime_section(
    name: str,
    outcomes: Outcomes,
    budget: int,
    *,
    facts: Mapping[str, Any],
    predicted: Sequence[tuple[str, str]],
    unit: str = "steps",
) -> str:
    """Return table, comparisons and predictions of a regime as Markdown.

    `facts` are its ``description``, and by arm ``rates`` and ``kl``.
    """
    lines = []
    for arm, rows in outcomes.items():
        runs = [run for row in rows for run in row]
        lines.append([
            arm, _interval_text(mean_steps(rows, budget)),
            f"{sum(run is None for run in runs)} of {len(runs)}",
            f"{facts['rates'][arm]:g}", f"{facts['kl'][arm]:.4f}",
        ])  # fmt: skip
    header = ["arm", f"{unit} to 50 %", "never", "learning rate", "KL"]
    first = next(iter(outcomes.values()))
    found = compare(outcomes, budget)
    items = [verdict(one, len(first), len(first[0]), unit) for one in found]
    if predicted:
        held_or_not = predictions(outcomes, budget, predicted, unit)
        items += [f"Predicted: {line}" for line in held_or_not]
    else:
        held = all(one.p_value >= ALPHA for one in found)
        items.append(f"Predicted: all tie: {'held' if held else '**did not hold**'}.")
    if too_few_seeds(len(first), len(found)):
        items.append(f"{len(first)} seeds are too few for a significant difference here.")
    bullets = "\n".join(f"- {item}" for item in items)
    return f"## {name}\n\n{facts['description']}\n\n{markdown_table(header, lines)}\n\n{bullets}"


def draw(
    path: Path, outcomes: Mapping[str, Outcomes], budgets: Mapping[str, int],
    unit: str = "environment steps",
) -> None:  # fmt: skip
    """Draw the steps to 50 % of every run, by regime and arm; hollow if it never got there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(outcomes), 3), layout="constrained")
    for axes, (regime, arms) in zip(
        figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes.items(), strict=True
    ):
        for y, rows in enumerate(arms.values()):
            for s, row in enumerate(rows):
                for start, run in enumerate(row):
                    steps = counted_steps(run, budgets[regime])
                    height = y + (s / len(rows) - 0.5) * 0.5
                    fill = "none" if run is None else f"C{start}"
                    axes.scatter(steps, height, s=14, facecolors=fill, edgecolors=f"C{start}")
            axes.scatter(mean_steps(rows, budgets[regime]).mean, y, marker="|", s=300, color="k")
        axes.set_yticks(range(len(arms)), list(arms))
        axes.invert_yaxis()
        axes.set(title=regime, xlabel=f"{unit} to 50 %", xlim=(0, None))
    figure.savefig(path, dpi=120)


def _interval_text(interval: Interval) -> str:
    half = interval.high - interval.mean
    return f"{interval.mean:,.0f}" + (f" ± {half:,.0f}" if math.isfinite(half) else "")
