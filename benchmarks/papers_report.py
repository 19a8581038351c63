"""Write the papers' tables as Markdown and JSON."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json, write_text
from agent_envs.scoring.statistics import ALPHA, holm, mean_interval, paired_test
from agent_leaderboard.report.visible_text import markdown_table

Row = Mapping[str, Any]
NAIVE_RAG: Final = "naive RAG"
ONE_HOP: Final = "one hop"
"""The only column in which naive RAG, with its single search, is a fair competitor."""


def write_report(
    folder: Path,
    studies: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    *,
    titles: Mapping[str, str],
    pairs: Mapping[str, Sequence[tuple[str, str]]],
    facts: Mapping[str, Any],
) -> None:
    """Write ``papers_table.md`` and ``.json``.

    Args:
        folder: Where to write.
        studies: By study and row, one result of `benchmarks.learning_run` per seed.
        titles: Headings of the studies.
        pairs: Rows to compare by study; the papers found the first of each pair better.
        facts: Settings, date and times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: [_row(*item) for item in results.items()] for name, results in studies.items()}
    write_json(folder / "papers_table.json", {"tables": tables, **facts})
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [
        "# The papers' tables in miniature",
        f"The embedded policy in the synthetic environments. `{facts['command']}`, "
        f"{facts['date']}: {facts['num_runs']} runs of {facts['run_seconds'] / 60:.0f} minutes in "
        f"total, {facts['jobs']} at a time on one core each. {versions}.",
        f"Success in % of {facts['num_tasks']} held-out tasks per column, sampled at temperature "
        f"1: mean and 95 % interval by Student's t over {len(facts['seeds'])} seeds. Each run "
        f"trains for {facts['budget']:,} environment steps in batches of 128 episodes. The "
        "learning rate decays to 0. In-domain: *clean facts* and *outdated facts*, half of the "
        "training worlds each. Out of domain: *one hop* and *three questions*. Naive RAG searches "
        "once with the question and is trained, with the same budget, to answer from the results.",
        f"Learning rates: {_rates(facts)}.",
        "Comparisons are paired by seed: mean difference with its 95 % interval by Student's t, "
        "and the exact sign-flip test with Holm's correction over the comparisons of a table.",
    ]
    for name, rows in tables.items():
        parts += [f"## {titles[name]}", _table(rows), compare_rows(rows, pairs.get(name, ()))]
    parts.append("`papers_table.json` holds the command of every cell, and the curves.")
    write_text(folder / "papers_table.md", "\n\n".join(part for part in parts if part) + "\n")


def compare_rows(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> str:
    """Compare pairs of rows, paired by seed; return a list item per comparison."""
    by_name = {row["method"]: row for row in rows}
    pairs = [pair for pair in pairs if by_name.keys() >= set(pair)]
    if not pairs:
        return ""
    differences = [_differences(by_name[a], by_name[b]) for a, b in pairs]
    adjusted = holm([paired_test(values) for values in differences])
    lines = []
    for (first, second), values, p_value in zip(pairs, differences, adjusted, strict=True):
        where = f" in *{ONE_HOP}*" if NAIVE_RAG in (first, second) else ""
        verdict = f"*{first}* and *{second}*: no significant difference"
        if p_value < ALPHA:
            is_better = statistics.fmean(values) > 0
            winner, loser = (first, second) if is_better else (second, first)
            verdict = f"*{winner}* beats *{loser}*"
        lines.append(
            f"{verdict}: {mean_text(values, '+')} points{where}, better with "
            f"{sum(value > 0 for value in values)} of {len(values)} seeds, p = {p_value:.3f}."
        )
    # the smallest p-value of an exact paired test of n seeds is 2 ** (1 - n)
    needed = next(n for n in itertools.count(1) if 2.0 ** (1 - n) * len(pairs) < ALPHA)
    if (num_seeds := len(differences[0])) < needed:
        lines.append(
            f"{num_seeds} seeds are too few for a significant difference among {len(pairs)} "
            f"comparisons: that takes {needed}."
        )
    return "\n".join(f"- {line}" for line in lines)


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Format the mean of shares with its 95 % interval by Student's t, in percent (points)."""
    interval = mean_interval(values)
    mean, half = 100 * interval.mean, 100 * (interval.high - interval.mean)
    return f"{mean:{sign}.1f} ± {half:.1f}" if math.isfinite(half) else f"{mean:{sign}.1f}"


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "method": name,
        "scores": {column: [run["scores"][column] for run in runs] for column in runs[0]["scores"]},
        "curves": [run["curve"] for run in runs],
        "environment_steps": [run["curve"][-1][0] if run["curve"] else 0 for run in runs],
        "commands": [run["command"] for run in runs],
    }


def _by_seed(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean over columns for each seed."""
    return [statistics.fmean(values) for values in zip(*scores.values(), strict=True)]


def _differences(first: Row, second: Row) -> list[float]:
    is_one_hop = NAIVE_RAG in (first["method"], second["method"]) and ONE_HOP in first["scores"]
    a, b = (
        row["scores"][ONE_HOP] if is_one_hop else _by_seed(row["scores"]) for row in (first, second)
    )
    return [x - y for x, y in zip(a, b, strict=True)]


def _rates(facts: Mapping[str, Any]) -> str:
    if not facts["tuning"]:
        return ", ".join(f"{rate:g}" for rate in facts["learning_rates"]) + ", not tuned"
    chosen = (f"{row['study']}, {row['method']}: {row['chosen']:g}" for row in facts["tuning"])
    return "best by success on tuning seeds and tasks for each row: " + "; ".join(chosen)


def _table(rows: Sequence[Row]) -> str:
    columns = list(rows[0]["scores"])
    lines = []
    for row in rows:
        scores = [*row["scores"].values(), _by_seed(row["scores"])]
        steps = f"{statistics.fmean(row['environment_steps']):,.0f}"
        lines.append([row["method"], *map(mean_text, scores), steps])
    return markdown_table(["method", *columns, "mean", "environment steps"], lines)
