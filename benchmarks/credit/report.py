"""Write the scores of estimators as Markdown and JSON, with the parts that were not run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json, write_text
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.credit.scores import BRANCHING, Row, Score, Scores, estimates_of, reliability, score
from benchmarks.credit.true_advantages import CreditBatch

NOT_RUN: Final = "not run"
_METHOD: Final = (
    "Correlation: Pearson's, of estimated with true advantages of a batch's steps, divided by the "
    "root of the truth's reliability, averaged over stages and seeds. Sign: share of steps with "
    "the right sign among those whose true advantage is more than two standard errors from 0; an "
    "estimate of 0 counts half. Brackets: 95 % bootstrap intervals over seeds, then tasks. Seen: "
    "environment steps that the estimator is given, in units of the batch's own."
)

Table = dict[str, dict[str, Scores | None]]
"""Scores by environment and row; None if a critic's values are missing."""


def score_all(rows: Sequence[Row], batches: Sequence[CreditBatch]) -> Table:
    """Score every row on every environment."""
    return {
        environment: {
            row.name: _score(row, [b for b in batches if b.environment == environment])
            for row in rows
        }
        for environment in dict.fromkeys(batch.environment for batch in batches)
    }


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
        "environments": _as_json(table),
        "truth": [
            {name: value for name, value in dataclasses.asdict(b).items() if name != "episodes"}
            for b in batches
        ],
    })  # fmt: skip
    parts = ["# Estimated and true advantages", f"`{facts['command']}`, {facts['date']}.", _METHOD]
    for environment, scores in table.items():
        measured = [batch for batch in batches if batch.environment == environment]
        parts += [f"## {environment}", _environment_table(rows, scores, measured)]
    parts += ["## True advantages", _truth_table(batches, facts["wanted"])]
    text = "\n\n".join(parts) + "\n"
    write_text(folder / "credit.md", text)
    return text


def _score(row: Row, batches: Sequence[CreditBatch]) -> Scores | None:
    estimates = [estimates_of(row, batch) for batch in batches]
    known = [(b, e) for b, e in zip(batches, estimates, strict=True) if e is not None]
    return score([b for b, _ in known], [e for _, e in known]) if known else None


def _environment_table(
    rows: Sequence[Row],
    scores: Mapping[str, Scores | None],
    batches: Sequence[CreditBatch],
) -> str:
    steps = sum(batch.costs["episode_steps"] for batch in batches)
    with_branches = steps + sum(batch.costs["branch_steps"] for batch in batches)
    lines = []
    for row in rows:
        found = scores[row.name]
        seen = with_branches / steps if row.estimator in BRANCHING else 1.0
        shown = [_shown(found.correlation), _shown(found.sign)] if found else [NOT_RUN] * 2
        lines.append([row.name, *shown, f"{seen:.2f}"])
    header = ["estimator", "correlation", "right sign", "seen"]
    return markdown_table(header, lines)


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


def _as_json(table: Table) -> dict[str, Any]:
    return {
        environment: {
            name: found and {n: dataclasses.asdict(s) for n, s in found._asdict().items()}
            for name, found in scores.items()
        }
        for environment, scores in table.items()
    }


def _shown(value: Score) -> str:
    if math.isnan(value.value):
        return "undefined"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
