"""Write the papers' tables as Markdown, as a picture and as JSON."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import atomic_path, write_json, write_text
from agent_envs.scoring.statistics import ALPHA, holm, mean_interval, paired_test
from agent_leaderboard.report.visible_text import markdown_table

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""What the runs of each method found, one per seed; see `benchmarks.learning_run`."""
NAIVE_RAG: Final = "naive RAG"
_UNTRAINED: Final = ("base tool call",)
_ONE_HOP: Final = "one hop"
"""Where one search can do: the only column in which naive RAG is a fair rival."""
_REFERENCE: Final = "grpo"
"""What the other trained rows are compared with: the first paper's best."""
_OF_CREDIT: Final = (
    ("grpo_step", "grpo"),
    ("gigpo", "grpo"),
    ("vine", "grpo_step"),
    ("vine", "gigpo"),
    ("tree", "grpo_step"),
    ("tree", "gigpo"),
)
_COMPARED: Final = {
    "masks": (
        ("ppo, both masks", "ppo, no advantage mask"),
        ("ppo, both masks", "ppo, no mask"),
        ("grpo, loss mask", "grpo, no loss mask"),
    ),
    "context": (
        ("grpo, window of 1 turn", "grpo, full"),
        ("grpo, budget of 90 tokens", "grpo, full"),
    ),
    "long_horizon": _OF_CREDIT,
    "long_horizon_taught": _OF_CREDIT,
}
"""Which methods of a table are set beside each other: the one the papers found better first."""


def write_report(
    folder: Path,
    studies: Mapping[str, Results],
    *,
    titles: Mapping[str, str],
    facts: Mapping[str, Any],
) -> None:
    """Write ``papers_table.md``, ``.png`` and ``.json``.

    The tables are ``rows`` of methods, the ablations ``masks`` and ``context``, ``long_horizon``
    and ``long_horizon_taught``; the facts are command, date, versions, budgets, times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: [_row(*item) for item in results.items()] for name, results in studies.items()}
    write_json(
        folder / "papers_table.json",
        {
            "rows": tables.get("rows", []),
            "ablation": [
                {"study": name} | row
                for name in ("masks", "context")
                for row in tables.get(name, [])
            ],
            "long_horizon": [
                {"study": name} | row
                for name in ("long_horizon", "long_horizon_taught")
                for row in tables.get(name, [])
            ],
            **facts,
        },
    )
    _plot(folder / "papers_table.png", studies, titles)
    write_text(folder / "papers_table.md", _markdown(tables, titles, facts))


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = {column: [run["scores"][column] for run in runs] for column in runs[0]["scores"]}
    by_seed = _by_seed(scores)
    interval = mean_interval(by_seed)
    return {
        "method": name,
        "scores": scores,
        "mean": interval.mean,
        "half_width": half if math.isfinite(half := interval.high - interval.mean) else None,
        "half_way": [_half_way(run["curve"]) for run in runs if run["curve"]],
        "environment_steps": [run["curve"][-1][0] if run["curve"] else 0 for run in runs],
        "completion_tokens": [
            run["completion_tokens"] for run in runs if run.get("completion_tokens")
        ],
        "options": list(runs[0].get("run", {}).get("options", ())),
        "commands": [run["command"] for run in runs if "command" in run],
    }


def _by_seed(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean over columns of each seed's scores."""
    return [statistics.fmean(own) for own in zip(*scores.values(), strict=True)]


def _half_way(curve: Sequence[Sequence[float]]) -> float:
    """Return the success in training at half of the steps: the mean of the five batches nearest."""
    half = curve[-1][0] / 2
    nearest = sorted(curve, key=lambda point: abs(point[0] - half))[:5]
    return statistics.fmean(success for _, success in nearest)


# Markdown


def _markdown(
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    titles: Mapping[str, str],
    facts: Mapping[str, Any],
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [
        "# The papers' tables in miniature",
        f"The embedded policy on the synthetic family. `{facts['command']}`, {facts['date']}: "
        f"{facts['num_runs']} runs of together {facts['run_seconds'] / 60:.0f} minutes, "
        f"{facts['jobs']} at a time on one core each, so about {facts['wall_seconds'] / 60:.0f} "
        f"minutes in all. {versions}.",
        f"Success in % of {facts['num_tasks']} held-out tasks per column, sampled at temperature "
        f"1: mean and 95 % interval by Student's t over {len(facts['seeds'])} seeds. Each run "
        f"trains for {facts['budget']:,} environment steps in batches of 128 episodes; over the "
        f"long horizon for {facts['long_budget']:,} in batches of 32, *vine* and *tree* of 24 and "
        "their branches, whose steps and tokens count. The learning rate falls to 0. In-domain: "
        "*clean facts* and *outdated facts*, half of the training worlds each. Out of domain: *one "
        "hop*, and *three questions* in a row, which only the long-horizon tables train. "
        "Half-way: success in the training batches around half of the environment steps. Naive RAG "
        "searches once with the question and is trained, by the same budget, to read what that "
        "finds where one search can do.",
        _tuning(facts),
        "Comparisons are paired by seed: mean difference with its 95 % interval by Student's t, "
        "and the exact test that flips signs, with Holm's correction over the comparisons of a "
        "table. *Cannot be told apart*: p of 5 % or more.",
        "![Learning curves](papers_table.png)",
    ]
    for name, rows in tables.items():
        parts += [f"## {titles[name]}", _table(rows), compare_rows(name, rows)]
    parts.append(_commands(tables))
    return "\n\n".join(part for part in parts if part) + "\n"


def _tuning(facts: Mapping[str, Any]) -> str:
    """Say how learning rates were chosen."""
    if not facts.get("tuning"):
        return "Learning rates were not tuned: all rows have the same."
    rates = ", ".join(f"{rate:g}" for rate in facts["learning_rates"])
    head = ["table", "method", *(f"{rate:g}" for rate in facts["learning_rates"]), "chosen"]
    lines = [
        [
            row["study"],
            row["method"],
            *(f"{100 * value:.1f}" for value in row["success"].values()),
            f"{row['chosen']:g}",
        ]
        for row in facts["tuning"]
    ]
    return (
        f"The learning rate of each row is the best of {rates} for it, by success on seeds and "
        f"tasks of their own, with the same budget for all:\n\n{markdown_table(head, lines, 2)}"
    )


def _commands(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the command of the first seed of each row; JSON holds those of all cells."""
    lines = [
        f"- {name}, *{row['method']}*: `{row['commands'][0]}`"
        for name, rows in tables.items()
        for row in rows
        if row["commands"]
    ]
    if not lines:
        return ""
    intro = "Of the first seed; `papers_table.json` holds those of all cells."
    return "\n\n".join(["## Commands", intro, "\n".join(lines)])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0]["scores"])
    means = ["mean"] if len(columns) > 1 else []
    header = ["method", *columns, *means, "half-way, in training", "environment steps", "tokens"]
    lines = []
    for row in rows:
        cells = [mean_text(s) for s in row["scores"].values()]
        if len(columns) > 1:
            cells.append(mean_text(_by_seed(row["scores"])))
        cells.append(mean_text(row["half_way"]) if row["half_way"] else "")
        cells.append(f"{statistics.fmean(row['environment_steps']):,.0f}")
        tokens = row["completion_tokens"]
        cells.append(f"{statistics.fmean(tokens):,.0f}" if tokens else "")
        lines.append([row["method"], *cells])
    return markdown_table(header, lines)


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Write the mean of shares with its 95 % interval by Student's t, in percent (points)."""
    interval = mean_interval(values)
    mean, half = 100 * interval.mean, 100 * (interval.high - interval.mean)
    return f"{mean:{sign}.1f} ± {half:.1f}" if math.isfinite(half) else f"{mean:{sign}.1f}"


def compare_rows(study: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the seeds allow to say of the rows of a table, a line per comparison."""
    by_name = {row["method"]: row for row in rows}
    if study == "rows":
        others = [n for n in by_name if n not in (*_UNTRAINED, NAIVE_RAG, _REFERENCE)]
        pairs = [(_REFERENCE, NAIVE_RAG), *((_REFERENCE, other) for other in others)]
    else:
        pairs = list(_COMPARED.get(study, ()))
    pairs = [pair for pair in pairs if by_name.keys() >= set(pair)]
    differences = [_differences(by_name[a], by_name[b]) for a, b in pairs]
    adjusted = holm([paired_test(own) for own in differences])
    lines = [
        _say(pair, own, p, by_name, is_claim=study != "rows")
        for pair, own, p in zip(pairs, differences, adjusted, strict=True)
    ]
    if not lines:
        return ""
    num_seeds, needed = len(differences[0]), _seeds_needed(len(pairs))
    if num_seeds < needed:
        lines.append(
            f"{num_seeds} seeds cannot tell any of these {len(pairs)} pairs apart, however they "
            f"end: that takes {needed}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _seeds_needed(num_comparisons: int) -> int:
    """Return from how many seeds on one of so many comparisons can be significant after Holm.

    The smallest p-value of an exact paired test of n seeds is that of all differences on one side.
    """
    return next(n for n in itertools.count(1) if 2.0 ** (1 - n) * num_comparisons < ALPHA)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[float]:
    """Return first less second by seed: where one search can do, if one of both is naive RAG."""
    a, b = (
        row["scores"][_ONE_HOP]
        if NAIVE_RAG in (first["method"], second["method"]) and _ONE_HOP in row["scores"]
        else _by_seed(row["scores"])
        for row in (first, second)
    )
    return [x - y for x, y in zip(a, b, strict=True)]


def _say(
    pair: tuple[str, str],
    differences: Sequence[float],
    p_value: float,
    by_name: Mapping[str, Mapping[str, Any]],
    *,
    is_claim: bool,
) -> str:
    first, second = pair
    where = (
        f" in *{_ONE_HOP}*" if NAIVE_RAG in pair and _ONE_HOP in by_name[first]["scores"] else ""
    )
    wins = sum(value > 0 for value in differences)
    figures = (
        f"{mean_text(differences, '+')} points{where}, ahead with {wins} of {len(differences)} "
        f"seeds, p = {p_value:.3f}"
    )
    if p_value >= ALPHA:
        return f"*{first}* and *{second}* cannot be told apart: {figures}."
    if statistics.fmean(differences) > 0:
        return f"*{first}* beats *{second}*: {figures}."
    against = ", against what the papers found" if is_claim else ""
    return f"*{second}* beats *{first}*{against}: {figures}."


# Picture


def _plot(path: Path, studies: Mapping[str, Results], titles: Mapping[str, str]) -> None:
    """Draw success in training against environment steps: mean and middle half of the seeds."""
    from matplotlib.figure import Figure

    curves = {
        name: {method: runs for method, runs in results.items() if runs[0]["curve"]}
        for name, results in studies.items()
    }
    shown = [name for name, results in curves.items() if results]
    num_columns = 1 if len(shown) < 2 else 2
    num_rows = max(1, -(-len(shown) // 2))
    size = (6.5 * num_columns, 4.6 * num_rows)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for name, axes in zip(shown, panels, strict=False):
        for method, runs in curves[name].items():
            steps, values = _on_one_grid([run["curve"] for run in runs])
            (line,) = axes.plot(steps, values.mean(axis=0), linewidth=1.8, label=method)
            low, high = np.quantile(values, (0.25, 0.75), axis=0)
            axes.fill_between(steps, low, high, alpha=0.12, color=line.get_color())
        axes.set(title=titles[name], xlabel="environment steps", ylabel="success in training")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    for axes in list(panels):  # the last panel, where there is an odd number
        axes.set_axis_off()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _on_one_grid(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[Any, Any]:
    """Return environment steps, and success there for each seed, smoothed; (K,) and (seeds, K)."""
    grid = np.linspace(
        max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), 60
    )
    values = []
    for curve in curves:
        steps, success = np.array(curve).T
        window = np.ones(min(5, len(success)))
        weights = np.convolve(np.ones_like(success), window, "same")
        values.append(np.interp(grid, steps, np.convolve(success, window, "same") / weights))
    return grid, np.stack(values)
