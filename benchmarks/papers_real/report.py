"""The table as Markdown, as a picture and as JSON, with what was not run named as such."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import atomic_path, write_json, write_text
from agent_envs.scoring import wilson_interval
from agent_envs.scoring.statistics import holm, sign_test
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.papers_real.cells import ROWS
from benchmarks.papers_real.questions import TEST_SETS

NOT_RUN: Final = "not run"
_WARM_START: Final = "warm start"
_METHOD: Final = (
    "Mean in %, and its 95 % interval: Wilson's score interval over the questions, for F1 too. A "
    "score between 0 and 1 with mean p varies at most as a share of p does, so for F1 the interval "
    "is rather too wide than too narrow, and it stays within 0 and 100 near the edges. Seeds of a "
    "row are averaged by question first: they answer the same questions. Greedy decoding."
)

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""What the cells of each row found, by seed; see `benchmarks.papers_real.work`."""


def write_report(folder: Path, results: Results, facts: Mapping[str, Any]) -> None:
    """Write ``papers_real.md``, ``.png`` and ``.json``; the facts are command, date, questions."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [summarise(row.name, results.get(row.name, {})) for row in ROWS]
    write_json(folder / "papers_real.json", {"rows": rows, **facts})
    _plot(folder / "papers_real.png", rows, results)
    write_text(folder / "papers_real.md", _markdown(rows, results, facts))


def summarise(name: str, seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is shown of a row."""
    runs = list(seeds.values())
    summary: dict[str, Any] = {"row": name, "seeds": sorted(seeds), "scores": {}}
    for test_set in TEST_SETS:
        scores = [run["scores"][test_set] for run in runs if test_set in run["scores"]]
        if not scores:
            continue
        summary["scores"][test_set] = {
            metric: _measured([each[metric] for each in scores]) for metric in ("exact_match", "f1")
        } | {
            metric: statistics.fmean(statistics.fmean(each[metric]) for each in scores)
            for metric in ("gold_passage_recall", "num_turns", "num_tokens")
        }
    summary["environment_steps"] = [run["environment_steps"] for run in runs]
    summary["seconds"] = [run["seconds"] for run in runs]
    summary["commands"] = [each for run in runs for each in run["commands"]]
    return summary


def _measured(by_seed: Sequence[Sequence[float]]) -> dict[str, float]:
    by_question = np.mean(np.asarray(by_seed, float), axis=0)
    mean = float(by_question.mean())
    low, high = wilson_interval(mean, len(by_question))
    means = [statistics.fmean(own) for own in by_seed]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    return {"mean": mean, "low": low, "high": high, "spread_of_seeds": spread}


# Markdown


def _markdown(rows: Sequence[Mapping[str, Any]], results: Results, facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    questions = facts["questions"]
    tested, trained, kept = (
        ", ".join(f"{write(value)} {TEST_SETS[name].title}" for name, value in named.items())
        for named, write in (
            (questions["test"], str),
            (questions["train"], str),
            (questions["answer_is_kept"], "{:.0%} of".format),
        )
    )
    words = facts["passage_words"]
    cut = f", each cut to its first {words} words" if words else ""
    parts = [
        "# The papers' comparison on real questions",
        f"`{facts['command']}`, {facts['date']}: {facts['hours']:.1f} hours of runs so far. "
        f"{versions}.",
        f"Questions tested: {tested} (out of domain); trained on: {trained}, none of them the "
        f"same. One engine over {questions['passages']:,} passages{cut}. The answers to {kept} "
        "questions stand in the passages that lead to them, or are yes or no; the others nobody "
        "can read.",
        _METHOD,
        "![Exact match](papers_real.png)",
        _table(rows),
        _compared(results),
        _forms(results),
        "## What it cost",
        _costs(rows, facts["budget"]),
        "## Commands",
        _commands(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["", "seeds"]
    for test_set in TEST_SETS.values():
        head += [f"{test_set.title} EM", "F1"]
    lines = []
    for row in rows:
        cells = [
            _percent(row["scores"][name][metric]) if name in row["scores"] else NOT_RUN
            for name in TEST_SETS
            for metric in ("exact_match", "f1")
        ]
        lines.append([row["row"], str(len(row["seeds"])), *cells])
    return markdown_table(head, lines)


def _percent(measured: Mapping[str, float]) -> str:
    mean, low, high = (100 * measured[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _compared(results: Results) -> str:
    """Set each other row beside the warm start, question by question over all test sets."""
    others = [row.name for row in ROWS if row.name in results and row.name != _WARM_START]
    if _WARM_START not in results or not others:
        return ""
    base = _by_question(results[_WARM_START], "exact_match")
    counts = {}
    for name in others:
        own = _by_question(results[name], "exact_match")
        both = [(own[test_set], base[test_set]) for test_set in own.keys() & base.keys()]
        counts[name] = (
            sum(int((first > second).sum()) for first, second in both),
            sum(int((first < second).sum()) for first, second in both),
        )
    adjusted = holm([sign_test(*pair) for pair in counts.values()])
    lines = [
        f"- {name}: better on {better} questions, worse on {worse} (p = {p_value:.2g})"
        for (name, (better, worse)), p_value in zip(counts.items(), adjusted, strict=True)
    ]
    intro = (
        "Beside the warm start, by exact match of the same questions of all sets that both were "
        f"tested on (exact sign test, Holm's correction over {len(others)}):"
    )
    return "\n".join([intro, "", *lines])


def _by_question(seeds: Mapping[int, Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return a metric of every question by test set, averaged over seeds."""
    scores = {
        name: [run["scores"][name][metric] for run in seeds.values() if name in run["scores"]]
        for name in TEST_SETS
    }
    return {name: np.mean(by_seed, axis=0) for name, by_seed in scores.items() if by_seed}


def _forms(results: Results) -> str:
    for run in results.get("naive RAG", {}).values():
        tried = "; ".join(
            f"{name}: F1 {100 * each['f1']:.1f}, EM {100 * each['exact_match']:.1f}"
            for name, each in run["form"]["tried"].items()
        )
        return (
            f"Naive RAG reads and answers by the form that did best on training questions: "
            f"{run['form']['chosen']}. Tried: {tried}."
        )
    return ""


def _costs(rows: Sequence[Mapping[str, Any]], budget: int) -> str:
    lines = []
    for row in rows:
        if row["scores"]:
            tokens = statistics.fmean(each["num_tokens"] for each in row["scores"].values())
            turns = statistics.fmean(each["num_turns"] for each in row["scores"].values())
            recall = statistics.fmean(
                each["gold_passage_recall"] for each in row["scores"].values()
            )
            steps = statistics.fmean(row["environment_steps"])
            minutes = statistics.fmean(row["seconds"]) / 60
            lines.append(
                [row["row"], f"{steps:,.0f}", f"{tokens:.0f}", f"{turns:.1f}", f"{recall:.0%}",
                 f"{minutes:.0f}"]
            )  # fmt: skip
    head = ["", "environment steps trained", "tokens of an episode", "turns", "gold passages found",
            "minutes a seed"]  # fmt: skip
    note = (
        f"Trained rows play {budget:,} environment steps each, up to the end of a batch. Tokens, "
        "turns and gold passages are those of tested episodes; minutes are those of the runs as "
        "they were, beside whatever else the machine did."
    )
    return f"{markdown_table(head, lines)}\n\n{note}"


def _commands(results: Results) -> str:
    lines = [
        "The last of each kind; `commands.json` in a cell's folder has all of them.",
        "",
    ]
    for row in ROWS:
        for seed, run in sorted(results.get(row.name, {}).items())[:1]:
            by_program = {each["command"].split()[0]: each["command"] for each in run["commands"]}
            lines += [f"{row.name}, seed {seed}:", "", "```sh", *by_program.values(), "```", ""]
    return "\n".join(lines).strip()


# Picture


def _plot(path: Path, rows: Sequence[Mapping[str, Any]], results: Results) -> None:
    """Draw exact match of each row with its interval, and how trained rows came there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), dpi=130, layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    for offset, (name, test_set) in zip((-0.25, 0.0, 0.25), TEST_SETS.items(), strict=True):
        measured = {
            place: row["scores"][name]["exact_match"]
            for place, row in enumerate(rows)
            if name in row["scores"]
        }
        means = np.array([each["mean"] for each in measured.values()])
        lows, highs = ([each[end] for each in measured.values()] for end in ("low", "high"))
        bars.errorbar(
            100 * means,
            [place + offset for place in measured],
            xerr=100 * np.array([means - lows, highs - means]),
            fmt="o",
            capsize=3,
            label=test_set.title,
        )
    labels = [row["row"] + ("" if row["scores"] else f" ({NOT_RUN})") for row in rows]
    bars.set_yticks(range(len(rows)), labels)
    bars.set(xlabel="exact match in %, 95 % interval", xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))
    bars.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    for name, seeds in results.items():
        for seed, run in seeds.items():
            if curve := run["curve"]:
                steps = [point["environment_steps"] for point in curve]
                f1 = [100 * point["f1"] for point in curve]
                curves.plot(steps, f1, label=f"{name}, seed {seed}", linewidth=1.6)
    curves.set(xlabel="environment steps", ylabel="F1 of training batches in %", ylim=(0, None))
    if curves.lines:
        curves.legend(frameon=False, fontsize=8)
    for axes in (bars, curves):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
