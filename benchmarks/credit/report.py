"""Write the scores of estimators as Markdown and JSON, with the parts that were not run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json, write_text
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.credit.scores import (
    CEILINGS,
    NOT_APPLICABLE,
    NOT_RUN,
    UNKNOWN,
    BatchSums,
    Row,
    Score,
    Scores,
    combine,
    estimates_of,
    reliability,
    sees_branches,
    sums_of,
)
from benchmarks.credit.true_advantages import CreditBatch

_METHOD: Final = (
    "Cosine: of the gradient that the estimated advantages give with that of the true ones, on the "
    "same batch, averaged over stages and seeds. Worth: how many batches of `grpo` a batch is "
    "worth, per environment step that the estimator is given (seen): the ratio of their "
    "noise-to-signal. Noise is the variance of the gradient of a group, signal the squared norm of "
    "its expectation (a U-statistic over pairs of groups), pooled over stages and seeds. It counts "
    "noise, not bias, which lowers the cosine; *not estimable* where the interval of a signal "
    "includes 0. Correlation: Pearson's, of estimated with true advantages of a batch's steps, "
    "divided by the root of the truth's reliability. Sign: share of steps with the right sign "
    "among those whose true advantage is more than two standard errors from 0; an estimate of 0 "
    "counts half. Brackets: 95 % bootstrap intervals over seeds, then tasks. Advantages per token "
    "are averaged over each step."
)
_HEADROOM: Final = (
    "What perfect credit is worth in batches of `grpo`: the better row of true advantages. Credit "
    "can matter where the interval over all stages is above 1."
)
NOT_ESTIMABLE: Final = "not estimable"
ALL_STAGES: Final = "all stages"

Table = dict[str, dict[str, Scores | str]]
"""Scores by environment or stage, and row; a text says why there are none."""


def score_all(rows: Sequence[Row], batches: Sequence[CreditBatch]) -> dict[str, Table]:
    """Score every row on every environment, over all stages and for each stage."""
    table: dict[str, Table] = {}
    for environment in dict.fromkeys(batch.environment for batch in batches):
        own = [batch for batch in batches if batch.environment == environment]
        stages = dict.fromkeys([ALL_STAGES, *(batch.stage for batch in own)])
        scores: Table = {stage: {} for stage in stages}
        for row in rows:
            estimates = [estimates_of(row, batch) for batch in own]
            sums = [
                estimated if isinstance(estimated, str) else sums_of(batch, estimated)
                for batch, estimated in zip(own, estimates, strict=True)
            ]
            for stage in stages:
                chosen = [
                    (b, s) for b, s in zip(own, sums, strict=True) if stage in (ALL_STAGES, b.stage)
                ]
                scores[stage][row.name] = _score(row, chosen)
        table[environment] = scores
    return table


def write_report(
    folder: Path,
    rows: Sequence[Row],
    batches: Sequence[CreditBatch],
    facts: Mapping[str, Any],
) -> str:
    """Write ``credit.md`` and ``.json``; return the Markdown.

    `facts` are the command, the date, and ``wanted``: environment, stage and seed of the planned
    batches.
    """
    table = score_all(rows, batches)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "credit.json", {
        **{name: value for name, value in facts.items() if name != "wanted"},
        "environments": {name: _as_json(scores[ALL_STAGES]) for name, scores in table.items()},
        "stages": {
            name: {stage: _as_json(rows) for stage, rows in scores.items() if stage != ALL_STAGES}
            for name, scores in table.items()
        },
        "truth": [
            {name: value for name, value in dataclasses.asdict(b).items() if name != "episodes"}
            for b in batches
        ],
    })  # fmt: skip
    parts = ["# Estimated and true advantages", f"`{facts['command']}`, {facts['date']}.", _METHOD]
    for environment, scores in table.items():
        measured = [batch for batch in batches if batch.environment == environment]
        lines = _environment_table(rows, scores[ALL_STAGES], measured)
        parts += [f"## {environment}", lines]
    parts += ["## Can credit matter?", _HEADROOM, _headroom_table(table)]
    parts += ["## True advantages", _truth_table(batches, facts["wanted"])]
    text = "\n\n".join(parts) + "\n"
    write_text(folder / "credit.md", text)
    return text


def _score(row: Row, chosen: Sequence[tuple[CreditBatch, BatchSums | str]]) -> Scores | str:
    reasons = [sums for _, sums in chosen if isinstance(sums, str)]
    if NOT_APPLICABLE in reasons or len(reasons) == len(chosen):
        return reasons[0]
    known = [(batch, sums) for batch, sums in chosen if not isinstance(sums, str)]
    return combine([sums for _, sums in known], cost=_cost(row, [batch for batch, _ in known]))


def _cost(row: Row, batches: Sequence[CreditBatch]) -> float:
    """Return the environment steps that a row is given, in units of the batches' own."""
    if not sees_branches(row):
        return 1.0
    steps = sum(batch.costs["episode_steps"] for batch in batches)
    return 1.0 + sum(batch.costs["branch_steps"] for batch in batches) / steps


def _environment_table(
    rows: Sequence[Row],
    scores: Mapping[str, Scores | str],
    batches: Sequence[CreditBatch],
) -> str:
    lines = []
    for row in rows:
        found = scores[row.name]
        if isinstance(found, str):
            shown = [found] * 4
        else:
            worth = _shown(found.worth, NOT_ESTIMABLE)
            shown = [_shown(found.cosine), worth, _shown(found.correlation), _shown(found.sign)]
        lines.append([row.name, *shown, f"{_cost(row, batches):.2f}"])
    header = ["estimator", "cosine", "worth in batches of grpo", "correlation", "right sign",
              "seen"]  # fmt: skip
    return markdown_table(header, lines)


def headroom(scores: Mapping[str, Scores | str]) -> Score:
    """Return the worth of the better row of true advantages; NaN if none is known."""
    worths = [found.worth for name in CEILINGS if isinstance(found := scores.get(name), Scores)]
    known = [worth for worth in worths if not math.isnan(worth.value)]
    return max(known, key=lambda worth: worth.value, default=UNKNOWN)


def _headroom_table(table: Mapping[str, Table]) -> str:
    stages = list(dict.fromkeys(stage for scores in table.values() for stage in scores))
    lines = []
    for environment, scores in table.items():
        found = [headroom(scores.get(stage, {})) for stage in stages]
        verdict = "yes" if found[0].low > 1 else "no" if found[0].high < 1 else "not shown"
        lines.append([environment, *(_shown(worth, NOT_ESTIMABLE) for worth in found), verdict])
    return markdown_table(["environment", *stages, "can credit matter?"], lines)


def _truth_table(batches: Sequence[CreditBatch], wanted: Sequence[tuple[str, str, int]]) -> str:
    done = {(b.environment, b.stage, b.seed): b for b in batches}
    lines = []
    for key in dict.fromkeys([*wanted, *done]):
        place = list(map(str, key))
        if (batch := done.get(key)) is None:
            lines.append([*place, *[NOT_RUN] * 6])
            continue
        lines.append([
            *place, f"{100 * batch.success:.0f} %",
            str(sum(len(e.rewards) for e in batch.measured)),
            str(len({state for e in batch.measured for state in e.states})),
            f"{batch.costs['truth_branches']:,.0f}",
            f"{batch.costs['truth_steps']:,.0f}",
            f"{batch.reliability:.2f} ({batch.reliability_by_variance:.2f})",
        ])  # fmt: skip
    header = ["environment", "stage", "seed", "success", "steps", "states", "branches",
              "their steps", "reliability by halves (by variance)"]  # fmt: skip
    return markdown_table(header, lines) + f"\n\nMean reliability: {reliability(batches):.2f}."


def _as_json(scores: Mapping[str, Scores | str]) -> dict[str, Any]:
    return {
        name: found
        if isinstance(found, str)
        else {n: dataclasses.asdict(value) for n, value in found._asdict().items()}
        for name, found in scores.items()
    }


def _shown(score: Score, unknown: str = "undefined") -> str:
    if math.isnan(score.value):
        return unknown
    return f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]"
