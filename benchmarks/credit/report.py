"""The tables as Markdown and JSON, and the picture; what was not run is named as such."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import atomic_path, write_json, write_text
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.algorithms.advantages import uses_branches
from benchmarks.credit.rows import Row, estimates_of
from benchmarks.credit.scores import Score, Scores, reliability, score
from benchmarks.credit.true_advantages import CreditBatch

NOT_RUN: Final = "not run"
_METHOD: Final = (
    "Correlation: Pearson's, of the estimated with the true advantages of a batch's steps, divided "
    "by the root of the truth's reliability, and averaged over stages and seeds. Sign: the share "
    "of steps with the right sign, of those whose true advantage is more than two standard errors "
    "from 0; an estimate of 0 counts half. In brackets 95 % intervals by a bootstrap that draws "
    "seeds, then tasks. Seen: environment steps that the estimator is given, in units of the "
    "batch's own. Trained: success on held-out tasks after as many environment steps for each."
)

Trained = Mapping[tuple[str, str], Mapping[int, float]]
"""Success after training, by environment and estimator, and by seed."""
Table = dict[str, dict[str, Scores | None]]
"""Scores by environment and name of the row; None where a critic's values are missing."""


def score_all(rows: Sequence[Row], batches: Sequence[CreditBatch]) -> Table:
    """Score every row on every environment."""
    table: Table = {}
    for environment in dict.fromkeys(batch.environment for batch in batches):
        own = [batch for batch in batches if batch.environment == environment]
        table[environment] = {row.name: _score(row, own) for row in rows}
    return table


def write_report(
    folder: Path,
    rows: Sequence[Row],
    batches: Sequence[CreditBatch],
    trained: Trained,
    facts: Mapping[str, Any],
) -> str:
    """Write ``credit.md``, ``.json`` and ``.png``; return the Markdown.

    `facts` are the command, the date, and ``wanted``: the batches there are to be, as tuples of
    environment, stage and seed.
    """
    table = score_all(rows, batches)
    stages = list(dict.fromkeys(batch.stage for batch in batches))
    by_stage = {s: score_all(rows, [b for b in batches if b.stage == s]) for s in stages}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "credit.json", {
        **{name: value for name, value in facts.items() if name != "wanted"},
        "environments": _as_json(table),
        "stages": {stage: _as_json(own) for stage, own in by_stage.items()},
        "truth": [_truth_record(batch) for batch in batches],
        "trained": [
            {"environment": env, "estimator": name, "success": dict(seeds)}
            for (env, name), seeds in trained.items()
        ],
    })  # fmt: skip
    _plot(folder / "credit.png", rows, table)
    text = _markdown(rows, table, by_stage, batches, trained, facts)
    write_text(folder / "credit.md", text)
    return text


def _score(row: Row, batches: Sequence[CreditBatch]) -> Scores | None:
    estimates = [estimates_of(row, batch) for batch in batches]
    known = [(b, e) for b, e in zip(batches, estimates, strict=True) if e is not None]
    if not known:
        return None
    return score([b for b, _ in known], [e for _, e in known])


def _markdown(
    rows: Sequence[Row],
    table: Table,
    by_stage: Mapping[str, Table],
    batches: Sequence[CreditBatch],
    trained: Trained,
    facts: Mapping[str, Any],
) -> str:
    parts = [
        "# How right is credit?",
        f"`{facts['command']}`, {facts['date']}.",
        _METHOD,
    ]
    for environment, scores in table.items():
        own = [batch for batch in batches if batch.environment == environment]
        parts += [f"## {environment}", _environment_table(rows, scores, own, trained)]
    parts += ["## By stage", "Correlations, corrected.", _stage_table(rows, by_stage)]
    parts += ["## The truth", _truth_table(batches, facts["wanted"])]
    return "\n\n".join(parts) + "\n"


def _environment_table(
    rows: Sequence[Row],
    scores: Mapping[str, Scores | None],
    batches: Sequence[CreditBatch],
    trained: Trained,
) -> str:
    environment = batches[0].environment
    steps = sum(batch.costs["episode_steps"] for batch in batches)
    with_branches = steps + sum(batch.costs["branch_steps"] for batch in batches)
    lines = []
    for row in rows:
        found = scores[row.name]
        seen = with_branches / steps if uses_branches(row.estimator) else 1.0
        # an estimator is trained by its algorithm's settings, which is one of its rows
        is_trained = row.critic in ("", "critic") and not row.options
        success = trained.get((environment, row.estimator), {}) if is_trained else None
        lines.append([
            row.name,
            _shown(found.correlation) if found else NOT_RUN,
            _shown(found.sign) if found else NOT_RUN,
            f"{seen:.2f}",
            _success(success),
        ])  # fmt: skip
    header = ["estimator", "correlation", "right sign", "seen", "trained, mean (each seed)"]
    order = _rank_correlation(rows, scores, trained, environment)
    return markdown_table(header, lines) + (f"\n\n{order}" if order else "")


def _rank_correlation(
    rows: Sequence[Row], scores: Mapping[str, Scores | None], trained: Trained, environment: str
) -> str:
    """Say whether what is more right trains better, where enough was trained."""
    pairs = []
    for row in rows:
        found, success = scores[row.name], trained.get((environment, row.estimator))
        if found and success and row.critic in ("", "critic") and not row.options:
            pairs.append((found.correlation.value, statistics.fmean(success.values())))
    if len(pairs) < 4:
        return ""
    first, second = (np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True))
    rho = float(np.corrcoef(first, second)[0, 1])
    return (
        f"Rank correlation of correlation and success after training, {len(pairs)} rows: {rho:.2f}."
    )


def _stage_table(rows: Sequence[Row], by_stage: Mapping[str, Table]) -> str:
    columns = [(stage, env) for stage, table in by_stage.items() for env in table]
    lines = []
    for row in rows:
        cells = [by_stage[stage][env][row.name] for stage, env in columns]
        lines.append([row.name, *(_shown(c.correlation) if c else NOT_RUN for c in cells)])
    return markdown_table(["estimator", *(f"{env}, {stage}" for stage, env in columns)], lines)


def _truth_table(batches: Sequence[CreditBatch], wanted: Sequence[tuple[str, str, int]]) -> str:
    done = {(b.environment, b.stage, b.seed): b for b in batches}
    lines = []
    for key in dict.fromkeys([*wanted, *done]):
        environment, stage, seed = key
        if (batch := done.get(key)) is None:
            lines.append([environment, stage, str(seed), *[NOT_RUN] * 6])
            continue
        measured = [episode for episode in batch.episodes if episode.start == 0]
        lines.append([
            environment, stage, str(seed), f"{100 * batch.success:.0f} %",
            str(sum(len(e.rewards) for e in measured)),
            str(len({state for e in measured for state in e.states})),
            f"{batch.costs['truth_branches']:,.0f}",
            f"{batch.costs['truth_steps']:,.0f}",
            f"{batch.reliability:.2f} ({batch.reliability_by_variance:.2f})",
        ])  # fmt: skip
    header = ["environment", "stage", "seed", "success", "steps", "states", "branches",
              "their steps", "reliability by halves (by variance)"]  # fmt: skip
    return markdown_table(header, lines) + f"\n\nMean reliability: {reliability(batches):.2f}."


def _truth_record(batch: CreditBatch) -> dict[str, Any]:
    record = dataclasses.asdict(batch)
    del record["episodes"]
    return record


def _as_json(table: Table) -> dict[str, Any]:
    return {
        environment: {
            name: None if found is None else {
                "correlation": dataclasses.asdict(found.correlation),
                "sign": dataclasses.asdict(found.sign),
            }
            for name, found in scores.items()
        }
        for environment, scores in table.items()
    }  # fmt: skip


def _shown(value: Score) -> str:
    if math.isnan(value.value):
        return "undefined"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _success(seeds: Mapping[int, float] | None) -> str:
    if seeds is None:
        return ""
    if not seeds:
        return NOT_RUN
    each = " ".join(f"{100 * value:.1f}" for value in seeds.values())
    return f"{100 * statistics.fmean(seeds.values()):.1f} % ({each})"


def _plot(path: Path, rows: Sequence[Row], table: Table) -> None:
    """Draw the correlations with their intervals, an environment a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.8 + 0.36 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    names = [row.name for row in rows]
    for number, (environment, scores) in enumerate(table.items()):
        shift = 0.15 * (number - (len(table) - 1) / 2)
        points = [
            (found.correlation, i + shift)
            for i, name in enumerate(names)
            if (found := scores[name]) is not None and not math.isnan(found.correlation.value)
        ]
        if points:
            axes.errorbar(
                [p.value for p, _ in points],
                [y for _, y in points],
                xerr=[[max(0.0, p.value - p.low) for p, _ in points],
                      [max(0.0, p.high - p.value) for p, _ in points]],
                fmt="o", markersize=4, linewidth=1, label=environment,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="correlation with the true advantage, corrected for noise")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if table:
        axes.legend(frameon=False, loc="best")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
