"""Write the comparison on real questions as Markdown and JSON."""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.data.files import write_json, write_text
from agent_envs.scoring import wilson_interval
from agent_envs.scoring.statistics import holm, p_value_text, paired_test
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.papers_real.cells import ROWS
from benchmarks.papers_real.questions import TEST_SETS
from benchmarks.papers_table import mean_text

_METHODS: Final = [row.name for row in ROWS if row.kind == "trained" and not row.options]
_ABLATIONS: Final = (
    ("GRPO", "GRPO, no loss mask"),
    ("PPO", "PPO, no advantage mask"),
    ("PPO", "PPO, no mask"),
)
CLAIMS: Final = (
    ("Training helps", [(name, "warm start") for name in _METHODS], tuple(TEST_SETS)),
    (
        "GRPO is best on average",
        [("GRPO", name) for name in _METHODS if name != "GRPO"],
        tuple(TEST_SETS),
    ),
    ("PPO is best out of domain", [("PPO", n) for n in _METHODS if n != "PPO"], ("musique",)),
    ("Masks matter", _ABLATIONS, tuple(TEST_SETS)),
    (
        "Training without a mask helps",
        [(name, "warm start") for _, name in _ABLATIONS],
        tuple(TEST_SETS),
    ),
)
"""Claims of the papers: title, compared rows and test sets."""
_METHOD: Final = (
    "Mean in % with its 95 % interval: Wilson's score interval over the questions, which is "
    "conservative for F1, because a score between 0 and 1 varies at most as a share with the same "
    "mean. Seeds of a row are averaged by question first. Greedy decoding."
)
_DIFFERENCES: Final = (
    "Differences of the mean of the test sets in points, paired by question, with their 95 % "
    "interval by Student's t, and the sign-flip test with Holm's correction within each column, "
    "over the seeds that both rows have. Both cover the choice of questions, not that of the seed."
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
    runs = [seeds[seed] for seed in sorted(seeds)]
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
    lines = [
        [
            row["row"],
            str(len(row["seeds"])),
            *(_percent(row["scores"][n][m]) for n in TEST_SETS for m in ("exact_match", "f1")),
        ]
        for row in rows
        if row["scores"]
    ]
    missing = "; ".join(row["row"] for row in rows if not row["scores"])
    return markdown_table(head, lines) + (f"\n\nNot run: {missing}." if missing else "")


def _percent(interval: Mapping[str, float]) -> str:
    mean, low, high = (100 * interval[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _comparisons(results: Results) -> str:
    """Test each claim on the rows that have run."""
    parts = []
    for claim, pairs, test_sets in CLAIMS:
        if pairs := [pair for pair in pairs if _common_seeds(results, pair)]:
            parts += [f"### {claim}", _compare(results, pairs, test_sets)]
    return "\n\n".join(["## Differences", _DIFFERENCES, *parts]) if parts else ""


def _compare(results: Results, pairs: Sequence[tuple[str, str]], test_sets: Collection[str]) -> str:
    columns = []
    for metric in ("exact_match", "f1"):
        differences = []
        for pair in pairs:
            seeds = _common_seeds(results, pair)
            first, second = (_by_question(results[r], seeds, metric, test_sets) for r in pair)
            differences.append(first - second)
        columns.append([mean_text(each.tolist(), "+") for each in differences])
        columns.append([p_value_text(p) for p in holm([paired_test(d) for d in differences])])
    names = [f"{first} against {second}" for first, second in pairs]
    rows = [list(cells) for cells in zip(names, *columns, strict=True)]
    return markdown_table(["", "EM", "p", "F1", "p"], rows)


def _common_seeds(results: Results, rows: Iterable[str]) -> list[int]:
    """Return the seeds of all the rows: a difference is one between runs from one warm start."""
    first, second = (results.get(row, {}).keys() for row in rows)
    return sorted(first & second)


def _by_question(
    runs: Mapping[int, Mapping[str, Any]],
    seeds: Iterable[int],
    metric: str,
    test_sets: Collection[str],
) -> Any:
    """Return the score of every question, weighted so that their mean is the mean of the sets."""
    by_set = [
        np.mean([runs[seed]["scores"][name][metric] for seed in seeds], axis=0)
        for name in test_sets
    ]
    total = sum(map(len, by_set))
    return np.concatenate([scores * total / (len(by_set) * len(scores)) for scores in by_set])


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
