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

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Results of each row, one per seed; see `benchmarks.learning_run`."""
Row = Mapping[str, Any]
NAIVE_RAG: Final = "naive RAG"
_UNTRAINED: Final = "base tool call"
_ONE_HOP: Final = "one hop"
"""The only column in which naive RAG, with its single search, is a fair competitor."""
_REFERENCE: Final = "grpo"
"""The best method of the first paper; the other trained rows are compared with it."""
_CREDIT: Final = (
    ("grpo_step", "grpo"), ("gigpo", "grpo"), ("vine", "grpo_step"), ("vine", "gigpo"),
    ("tree", "grpo_step"), ("tree", "gigpo"),
)  # fmt: skip
_COMPARED: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "masks": (
        ("ppo, both masks", "ppo, no advantage mask"),
        ("ppo, both masks", "ppo, no mask"),
        ("grpo, loss mask", "grpo, no loss mask"),
    ),
    "context": (
        ("grpo, window of 1 turn", "grpo, full"),
        ("grpo, budget of 90 tokens", "grpo, full"),
    ),
    "long_horizon": _CREDIT,
    "long_horizon_taught": _CREDIT,
}
"""Compared rows by table; the papers found the first of each pair better."""


def write_report(
    folder: Path,
    studies: Mapping[str, Results],
    *,
    titles: Mapping[str, str],
    facts: Mapping[str, Any],
) -> None:
    """Write ``papers_table.md`` and ``.json``; `facts` are settings, date, times."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: [_row(*item) for item in results.items()] for name, results in studies.items()}

    def labelled(*names: str) -> list[dict[str, Any]]:
        return [{"study": name} | row for name in names for row in tables.get(name, [])]

    write_json(folder / "papers_table.json", {
        "rows": tables.get("rows", []),
        "ablation": labelled("masks", "context"),
        "long_horizon": labelled("long_horizon", "long_horizon_taught"),
        **facts,
    })  # fmt: skip
    write_text(folder / "papers_table.md", _markdown(tables, titles, facts))


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Format the mean of shares with its 95 % interval by Student's t, in percent (points)."""
    interval = mean_interval(values)
    mean, half = 100 * interval.mean, 100 * (interval.high - interval.mean)
    return f"{mean:{sign}.1f} ± {half:.1f}" if math.isfinite(half) else f"{mean:{sign}.1f}"


def compare_rows(study: str, rows: Sequence[Row]) -> str:
    """Compare rows of a table, paired by seed; return a list item per comparison."""
    by_name = {row["method"]: row for row in rows}
    pairs = list(_COMPARED.get(study, ()))
    if study == "rows":
        others = [n for n in by_name if n not in (_UNTRAINED, NAIVE_RAG, _REFERENCE)]
        pairs = [(_REFERENCE, other) for other in (NAIVE_RAG, *others)]
    pairs = [pair for pair in pairs if by_name.keys() >= set(pair)]
    if not pairs:
        return ""
    differences = [_differences(by_name[a], by_name[b]) for a, b in pairs]
    adjusted = holm([paired_test(values) for values in differences])
    lines = [
        _comparison(*pair, values, p_value, is_claim=study != "rows")
        for pair, values, p_value in zip(pairs, differences, adjusted, strict=True)
    ]
    # the smallest p-value of an exact paired test of n seeds is 2 ** (1 - n)
    needed = next(n for n in itertools.count(1) if 2.0 ** (1 - n) * len(pairs) < ALPHA)
    if (num_seeds := len(differences[0])) < needed:
        lines.append(
            f"{num_seeds} seeds are too few for a significant difference among {len(pairs)} "
            f"comparisons: that takes {needed}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = {column: [run["scores"][column] for run in runs] for column in runs[0]["scores"]}
    interval = mean_interval(_by_seed(scores))
    half = interval.high - interval.mean
    return {
        "method": name,
        "scores": scores,
        "mean": interval.mean,
        "half_width": half if math.isfinite(half) else None,
        "curves": [run["curve"] for run in runs],
        "environment_steps": [run["curve"][-1][0] if run["curve"] else 0 for run in runs],
        "completion_tokens": [n for run in runs if (n := run.get("completion_tokens"))],
        "options": list(runs[0].get("run", {}).get("options", ())),
        "commands": [run["command"] for run in runs if "command" in run],
    }


def _by_seed(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean over columns for each seed."""
    return [statistics.fmean(values) for values in zip(*scores.values(), strict=True)]


def _differences(first: Row, second: Row) -> list[float]:
    a, b = (
        row["scores"][_ONE_HOP] if _is_one_hop(first, second) else _by_seed(row["scores"])
        for row in (first, second)
    )
    return [x - y for x, y in zip(a, b, strict=True)]


def _is_one_hop(first: Row, second: Row) -> bool:
    return NAIVE_RAG in (first["method"], second["method"]) and _ONE_HOP in first["scores"]


def _comparison(
    first: str, second: str, differences: Sequence[float], p_value: float, *, is_claim: bool
) -> str:
    where = f" in *{_ONE_HOP}*" if NAIVE_RAG in (first, second) else ""
    wins = sum(value > 0 for value in differences)
    figures = (
        f"{mean_text(differences, '+')} points{where}, better with {wins} of {len(differences)} "
        f"seeds, p = {p_value:.3f}"
    )
    if p_value >= ALPHA:
        return f"*{first}* and *{second}*: no significant difference: {figures}."
    if statistics.fmean(differences) > 0:
        return f"*{first}* beats *{second}*: {figures}."
    contrary = ", contrary to the papers" if is_claim else ""
    return f"*{second}* beats *{first}*{contrary}: {figures}."


def _markdown(
    tables: Mapping[str, Sequence[Row]], titles: Mapping[str, str], facts: Mapping[str, Any]
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [
        "# The papers' tables in miniature",
        f"The embedded policy in the synthetic environments. `{facts['command']}`, "
        f"{facts['date']}: {facts['num_runs']} runs of {facts['run_seconds'] / 60:.0f} minutes in "
        f"total, {facts['jobs']} at a time on one core each: about "
        f"{facts['wall_seconds'] / 60:.0f} minutes. {versions}.",
        f"Success in % of {facts['num_tasks']} held-out tasks per column, sampled at temperature "
        f"1: mean and 95 % interval by Student's t over {len(facts['seeds'])} seeds. Each run "
        f"trains for {facts['budget']:,} environment steps in batches of 128 episodes; over the "
        f"long horizon for {facts['long_budget']:,} in batches of 32, or of 24 with branches, "
        "whose steps and tokens count. The learning rate decays to 0. In-domain: *clean facts* "
        "and *outdated facts*, half of the training worlds each. Out of domain: *one hop*, and "
        "*three questions*, which only the long-horizon tables train. Naive RAG searches once with "
        "the question and is trained, with the same budget, to answer from the results.",
        f"Learning rates: {_rates(facts)}.",
        "Comparisons are paired by seed: mean difference with its 95 % interval by Student's t, "
        "and the exact sign-flip test with Holm's correction over the comparisons of a table.",
    ]
    for name, rows in tables.items():
        parts += [f"## {titles[name]}", _table(rows), compare_rows(name, rows)]
    parts.append("`papers_table.json` holds the command of every cell, and the curves.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _rates(facts: Mapping[str, Any]) -> str:
    if not facts["tuning"]:
        return ", ".join(f"{rate:g}" for rate in facts["learning_rates"]) + ", not tuned"
    chosen = (f"{row['study']}, {row['method']}: {row['chosen']:g}" for row in facts["tuning"])
    return "best by success on tuning seeds and tasks for each row: " + "; ".join(chosen)


def _table(rows: Sequence[Row]) -> str:
    columns = list(rows[0]["scores"])
    means = ["mean"] if len(columns) > 1 else []
    lines = []
    for row in rows:
        cells = [mean_text(scores) for scores in row["scores"].values()]
        cells += [mean_text(_by_seed(row["scores"]))] * len(means)
        cells.append(f"{statistics.fmean(row['environment_steps']):,.0f}")
        tokens = row["completion_tokens"]
        cells.append(f"{statistics.fmean(tokens):,.0f}" if tokens else "")
        lines.append([row["method"], *cells])
    return markdown_table(["method", *columns, *means, "environment steps", "tokens"], lines)
