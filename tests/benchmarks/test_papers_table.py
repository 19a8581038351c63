"""The papers' tables, with runs of a few environment steps."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import papers_table
from benchmarks.learning_run import EnvironmentStepBudget
from benchmarks.papers_report import write_report

FACTS = {
    "command": "python -m benchmarks.papers_table", "date": "2026-01-01", "wall_seconds": 60,
    "run_seconds": 100, "num_runs": 4, "jobs": 2, "num_tasks": 10, "seeds": [1, 2],
    "budget": 100, "long_budget": 200, "versions": {"python": "3.11"},
}  # fmt: skip


def results(*scores):
    """Runs with these scores, one per seed."""
    return [
        {
            "scores": {"clean facts": score, "outdated facts": score / 2},
            "curve": [[50, 0.1], [110, score]],
        }
        for score in scores
    ]


def report(folder, **studies):
    write_report(folder, studies, titles={name: name for name in studies}, facts=FACTS)
    return (folder / "papers_table.md").read_text(), json.loads(
        (folder / "papers_table.json").read_text()
    )


def test_the_tables_hold_every_seed_and_mean_and_spread(tmp_path):
    untrained = [run | {"curve": []} for run in results(0.1, 0.1)]
    text, data = report(tmp_path, rows={"naive RAG": untrained, "grpo": results(0.8, 0.6)})
    # half-way: the mean of both batches, (0.1 + 0.8) / 2 and (0.1 + 0.6) / 2
    assert "| grpo | 70.0 ± 14.1 | 35.0 ± 7.1 | 52.5 ± 10.6 | 40.0 ± 7.1 | 110 |" in text
    assert "at least 2.9 times naive RAG; the lowest, grpo, reaches 52.5 %, naive RAG 7.5" in text
    (_, row) = data["rows"]
    assert row["method"] == "grpo"
    assert row["scores"] == {"clean facts": [0.8, 0.6], "outdated facts": [0.4, 0.3]}
    assert row["mean"] == pytest.approx(0.525)
    assert data["versions"] == {"python": "3.11"}
    assert (tmp_path / "papers_table.png").stat().st_size > 10_000


def test_what_falls_short_is_said(tmp_path):
    rows = {"naive RAG": results(0.4), "grpo": results(0.8), "ppo": results(1.0)}
    masks = {"grpo, loss mask": results(0.5), "grpo, no loss mask": results(0.6)}
    facts = FACTS | {"seeds": [1]}
    write_report(
        tmp_path, {"rows": rows, "masks": masks}, titles={"rows": "A", "masks": "B"}, facts=facts
    )
    text = (tmp_path / "papers_table.md").read_text()
    assert "Below 2.9 times naive RAG: grpo, ppo; the lowest, grpo, reaches 60.0 %" in text
    assert "*grpo, loss mask* does not beat *grpo, no loss mask*: 37.5 % against 45.0 %" in text
    assert "ahead with 0 of 1 seeds; half-way 30.0 % against 35.0 %." in text
    ablation = json.loads((tmp_path / "papers_table.json").read_text())["ablation"]
    assert [(row["study"], row["method"]) for row in ablation] == [
        ("masks", "grpo, loss mask"), ("masks", "grpo, no loss mask"),
    ]  # fmt: skip


def test_the_learning_rate_falls_to_zero_over_the_budget():
    batches = iter([(60, 0.1), (30, 0.2), (30, 0.3)])
    budget = EnvironmentStepBudget(100, lambda: next(batches))
    optimizer = SimpleNamespace(param_groups=[{"initial_lr": 2.0, "lr": 2.0}])
    rates, control = [], SimpleNamespace(should_training_stop=False)
    while not control.should_training_stop:
        budget.on_step_begin(None, None, control, optimizer=optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        budget.on_step_end(None, None, control)
    assert rates == pytest.approx([2.0, 0.8, 0.2])
    assert budget.curve == [(60, 0.1), (90, 0.2), (120, 0.3)]


def test_the_command_trains_measures_and_does_nothing_twice(tmp_path, monkeypatch):
    """Naive RAG, ours and TRL's own trainer, for one batch each."""
    methods = [
        m for m in papers_table.STUDIES[0].methods if m.method in ("naive_rag", "grpo", "trl")
    ]
    study = papers_table.Study(name="rows", title="Methods", methods=tuple(methods))
    monkeypatch.setattr(papers_table, "STUDIES", (study,))
    arguments = [
        "--seeds", "1", "--budget", "128", "--num_tasks", "3", "--studies", "rows",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"),
    ]  # fmt: skip
    papers_table.main(arguments)
    rows = json.loads((tmp_path / "results" / "papers_table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [method.name for method in methods]
    assert all(len(scores) == 1 for row in rows for scores in row["scores"].values())
    assert [row["environment_steps"][0] > 0 for row in rows] == [False, True, True]

    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*/result.json")}
    assert len(done) == 3
    papers_table.main(arguments)
    assert done == {path: path.stat().st_mtime_ns for path in done}


def test_a_run_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    broken = papers_table.Method(name="grpo", method="grpo", options=("--learning_rat", "1"))
    study = papers_table.Study(name="rows", title="Methods", methods=(broken,))
    monkeypatch.setattr(papers_table, "STUDIES", (study,))
    with pytest.raises(SystemExit, match=r"failed: .*log\.txt"):
        papers_table.main(["--seeds", "1", "--studies", "rows", "--work", str(tmp_path)])


def test_an_unknown_table_gets_those_there_are():
    with pytest.raises(SystemExit, match=r"'masks2'.* Available: context, long_h"):
        papers_table.main(["--studies", "masks2"])
