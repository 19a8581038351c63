"""Write the papers' tables as Markdown, as a picture and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import atomic_path, write_json, write_text
from agent_leaderboard.report.visible_text import markdown_table

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""What the runs of each method found, one per seed; see `benchmarks.learning_run`."""
RATIO_TO_BEAT: Final = 2.9
"""GRPO over naive RAG in the first paper's table."""
_UNTRAINED: Final = ("base tool call", "naive RAG")
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
    "long_horizon": (
        ("grpo_step", "grpo"),
        ("gigpo", "grpo"),
        ("vine", "grpo_step"),
        ("vine", "gigpo"),
        ("tree", "grpo_step"),
        ("tree", "gigpo"),
    ),
}
"""Which methods of a table are set beside each other: the one meant to be better first."""


def write_report(
    folder: Path,
    studies: Mapping[str, Results],
    *,
    titles: Mapping[str, str],
    facts: Mapping[str, Any],
) -> None:
    """Write ``papers_table.md``, ``.png`` and ``.json``.

    The tables are ``rows`` of methods, the ablations ``masks`` and ``context``, ``long_horizon``;
    the facts are command, date, versions, budgets, times.
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
            "long_horizon": tables.get("long_horizon", []),
            **facts,
        },
    )
    _plot(folder / "papers_table.png", studies, titles)
    write_text(folder / "papers_table.md", _markdown(tables, titles, facts))


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = {column: [run["scores"][column] for run in runs] for column in runs[0]["scores"]}
    by_seed = _by_seed(scores)
    return {
        "method": name,
        "scores": scores,
        "mean": statistics.fmean(by_seed),
        "spread": _spread(by_seed),
        "half_way": [_half_way(run["curve"]) for run in runs if run["curve"]],
        "environment_steps": [run["curve"][-1][0] if run["curve"] else 0 for run in runs],
    }


def _by_seed(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean over columns of each seed's scores."""
    return [statistics.fmean(own) for own in zip(*scores.values(), strict=True)]


def _half_way(curve: Sequence[Sequence[float]]) -> float:
    """Return the success in training at half of the steps: the mean of the five batches nearest."""
    half = curve[-1][0] / 2
    nearest = sorted(curve, key=lambda point: abs(point[0] - half))[:5]
    return statistics.fmean(success for _, success in nearest)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


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
        f"1: mean and standard deviation over seeds {', '.join(map(str, facts['seeds']))}. Each "
        f"run trains for {facts['budget']:,} environment steps (over the long horizon "
        f"{facts['long_budget']:,}) in batches of 128 episodes, *vine* and *tree* of 64 and their "
        "branches; the learning rate falls to 0 over "
        "them. In-domain: *clean facts* and *outdated facts*, half of the training worlds each. "
        "Out of domain: *three questions* in a row, which only the runs of the last table train. "
        "Half-way: success in the training batches around half of the environment steps.",
        "![Learning curves](papers_table.png)",
    ]
    for name, rows in tables.items():
        lines = [f"- {line}" for pair in _COMPARED.get(name, ()) if (line := _compare(rows, *pair))]
        findings = _rows_findings(rows) if name == "rows" else "\n".join(lines)
        parts += [f"## {titles[name]}", _table(rows), findings]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0]["scores"])
    means = ["mean"] if len(columns) > 1 else []
    header = ["method", *columns, *means, "half-way, in training", "environment steps"]
    lines = []
    for row in rows:
        cells = [_percent(statistics.fmean(s), _spread(s)) for s in row["scores"].values()]
        if len(columns) > 1:
            cells.append(_percent(row["mean"], row["spread"]))
        half_way = row["half_way"]
        cells.append(_percent(statistics.fmean(half_way), _spread(half_way)) if half_way else "")
        cells.append(f"{statistics.fmean(row['environment_steps']):,.0f}")
        lines.append([row["method"], *cells])
    return markdown_table(header, lines)


def _percent(mean: float, spread: float) -> str:
    return f"{100 * mean:.1f} ± {100 * spread:.1f}"


def _rows_findings(rows: Sequence[Mapping[str, Any]]) -> str:
    naive = next((row["mean"] for row in rows if row["method"] == "naive RAG"), None)
    trained = [row for row in rows if row["method"] not in _UNTRAINED]
    if naive is None or not trained:
        return ""
    short = [row["method"] for row in trained if row["mean"] < RATIO_TO_BEAT * naive]
    worst = min(trained, key=lambda row: float(row["mean"]))
    verdict = (
        f"Below {RATIO_TO_BEAT} times naive RAG: {', '.join(short)}"
        if short
        else f"Every trained row is at least {RATIO_TO_BEAT} times naive RAG"
    )
    return (
        f"{verdict}; the lowest, {worst['method']}, reaches {100 * worst['mean']:.1f} %, naive RAG "
        f"{100 * naive:.1f} %."
    )


def _compare(rows: Sequence[Mapping[str, Any]], better: str, worse: str) -> str:
    by_name = {row["method"]: row for row in rows}
    if better not in by_name or worse not in by_name:
        return ""
    first, second = by_name[better], by_name[worse]
    pairs = list(zip(_by_seed(first["scores"]), _by_seed(second["scores"]), strict=True))
    wins = sum(a > b for a, b in pairs)
    verb = "beats" if first["mean"] > second["mean"] else "does not beat"
    return (
        f"*{better}* {verb} *{worse}*: {100 * first['mean']:.1f} % against "
        f"{100 * second['mean']:.1f} %, ahead with {wins} of {len(pairs)} seeds; half-way "
        f"{100 * statistics.fmean(first['half_way']):.1f} % against "
        f"{100 * statistics.fmean(second['half_way']):.1f} %."
    )


# Picture


def _plot(path: Path, studies: Mapping[str, Results], titles: Mapping[str, str]) -> None:
    """Draw success in training against environment steps: mean and range over seeds."""
    from matplotlib.figure import Figure

    curves = {
        name: {method: runs for method, runs in results.items() if runs[0]["curve"]}
        for name, results in studies.items()
    }
    shown = [name for name, results in curves.items() if results]
    num_rows = max(1, -(-len(shown) // 2))
    figure = Figure(figsize=(13, 4.6 * num_rows), dpi=130, layout="constrained")
    panels = figure.subplots(num_rows, 2, squeeze=False).flat
    for name, axes in zip(shown, panels, strict=False):
        for method, runs in curves[name].items():
            steps, values = _on_one_grid([run["curve"] for run in runs])
            (line,) = axes.plot(steps, values.mean(axis=0), linewidth=1.8, label=method)
            axes.fill_between(
                steps, values.min(axis=0), values.max(axis=0), alpha=0.12, color=line.get_color()
            )
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
