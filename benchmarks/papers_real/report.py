"""Write the comparison on real questions as Markdown and JSON."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import write_json, write_text
from agent_envs.scoring import wilson_interval
from agent_envs.scoring.statistics import holm, sign_test
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.papers_real.cells import ROWS
from benchmarks.papers_real.questions import TEST_SETS

NOT_RUN: Final = "not run"
_WARM_START: Final = "warm start"
_METHOD: Final = (
    "Mean in % with its 95 % interval: Wilson's score interval over the questions, which is "
    "conservative for F1, because a score between 0 and 1 varies at most as a share with the same "
    "mean. Seeds of a row are averaged by question first. Greedy decoding."
)

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Results of the cells of each row, by seed; see `CellRunner.compute`."""


def write_report(folder: Path, results: Results, facts: Mapping[str, Any]) -> None:
    """Write ``papers_real.md`` and ``.json``; the facts are command, date, questions."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_summarise(row.name, results.get(row.name, {})) for row in ROWS]
    write_json(folder / "papers_real.json", {"rows": rows, **facts})
    write_text(folder / "papers_real.md", _markdown(rows, results, facts))


def _summarise(name: str, seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    runs = list(seeds.values())
    summary: dict[str, Any] = {"row": name, "seeds": sorted(seeds), "scores": {}}
    for test_set in TEST_SETS if runs else ():
        scores = [run["scores"][test_set] for run in runs]
        summary["scores"][test_set] = {
            metric: _interval([each[metric] for each in scores]) for metric in ("exact_match", "f1")
        } | {
            metric: statistics.fmean(statistics.fmean(each[metric]) for each in scores)
            for metric in ("gold_passage_recall", "num_turns", "num_tokens")
        }
    summary |= {each: [run[each] for run in runs] for each in ("environment_steps", "seconds")}
    summary["commands"] = [each for run in runs for each in run["commands"]]
    return summary


def _interval(by_seed: Sequence[Sequence[float]]) -> dict[str, float]:
    by_question = np.mean(np.asarray(by_seed, float), axis=0)
    mean = float(by_question.mean())
    low, high = wilson_interval(mean, len(by_question))
    means = [statistics.fmean(values) for values in by_seed]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    return {"mean": mean, "low": low, "high": high, "spread_of_seeds": spread}


def _markdown(rows: Sequence[Mapping[str, Any]], results: Results, facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    questions, words = facts["questions"], facts["passage_words"]
    tested, trained = (
        ", ".join(f"{count} {TEST_SETS[name].title}" for name, count in questions[part].items())
        for part in ("test", "train")
    )
    parts = [
        "# The papers' comparison on real questions",
        f"`{facts['command']}`, {facts['date']}: {facts['hours']:.1f} hours of runs so far. "
        f"{versions}.",
        f"Test questions: {tested} (MuSiQue is out of domain); training questions: {trained}, all "
        f"different from the test questions. One engine over {questions['passages']:,} passages"
        f"{f', each cut to its first {words} words' if words else ''}.",
        _METHOD,
        _table(rows),
        _comparisons(results),
        "## Costs",
        _costs(rows, facts["budget"]),
        "`papers_real.json` holds the commands of every row.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["", "seeds"]
    for test_set in TEST_SETS.values():
        head += [f"{test_set.title} EM", "F1"]
    lines = []
    for row in rows:
        cells = [
            _percent(row["scores"][name][metric]) if row["scores"] else NOT_RUN
            for name in TEST_SETS
            for metric in ("exact_match", "f1")
        ]
        lines.append([row["row"], str(len(row["seeds"])), *cells])
    return markdown_table(head, lines)


def _percent(interval: Mapping[str, float]) -> str:
    mean, low, high = (100 * interval[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _comparisons(results: Results) -> str:
    """Compare each other row with the warm start, question by question over all test sets."""
    others = [name for name in results if name != _WARM_START]
    if _WARM_START not in results or not others:
        return ""
    base = _by_question(results[_WARM_START])
    counts = {}
    for name in others:
        scores = _by_question(results[name])
        counts[name] = (int((scores > base).sum()), int((scores < base).sum()))
    adjusted = holm([sign_test(*pair) for pair in counts.values()])
    lines = [
        f"- {name}: better on {better} questions, worse on {worse} (p = {p_value:.2g})"
        for (name, (better, worse)), p_value in zip(counts.items(), adjusted, strict=True)
    ]
    intro = (
        "Compared with the warm start, by exact match on the questions of all sets (exact sign "
        f"test, Holm's correction over {len(others)}):"
    )
    return "\n".join([intro, "", *lines])


def _by_question(seeds: Mapping[int, Mapping[str, Any]]) -> Any:
    """Return the exact match of every question, averaged over seeds."""
    runs = [[run["scores"][n]["exact_match"] for n in TEST_SETS] for run in seeds.values()]
    return np.concatenate([np.mean(by_seed, axis=0) for by_seed in zip(*runs, strict=True)])


def _costs(rows: Sequence[Mapping[str, Any]], budget: int) -> str:
    lines = []
    for row in rows:
        if row["scores"]:
            tokens, turns, recall = (
                statistics.fmean(each[metric] for each in row["scores"].values())
                for metric in ("num_tokens", "num_turns", "gold_passage_recall")
            )
            steps, seconds = map(statistics.fmean, (row["environment_steps"], row["seconds"]))
            lines.append([row["row"], f"{steps:,.0f}", f"{tokens:.0f}", f"{turns:.1f}",
                          f"{recall:.0%}", f"{seconds / 60:.0f}"])  # fmt: skip
    head = ["", "environment steps trained", "tokens of an episode", "turns", "gold passages found",
            "minutes a seed"]  # fmt: skip
    note = (
        f"The training budget is {budget:,} environment steps, up to the end of a batch. Tokens, "
        "turns and gold passages are those of test episodes."
    )
    return f"{markdown_table(head, lines)}\n\n{note}"
