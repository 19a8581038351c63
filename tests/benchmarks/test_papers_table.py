"""The papers' tables, with runs of a few environment steps."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import papers_table
from benchmarks.learning_run import EnvironmentStepBudget
from benchmarks.papers_report import compare_rows, write_report

FACTS = {
    "command": "python -m benchmarks.papers_table", "date": "2026-01-01", "wall_seconds": 60,
    "run_seconds": 100, "num_runs": 4, "jobs": 2, "num_tasks": 10, "seeds": [1, 2],
    "budget": 100, "long_budget": 200, "versions": {"python": "3.11"}, "learning_rates": [0.001],
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


def test_the_tables_hold_every_seed_and_mean_and_interval(tmp_path):
    untrained = [run | {"curve": []} for run in results(0.1, 0.1)]
    text, data = report(tmp_path, rows={"base tool call": untrained, "grpo": results(0.8, 0.6)})
    # half of the interval: 12.706 * 0.1414 / sqrt(2) = 1.2706, of the mean over columns 3/4 of it;
    # half-way: the mean of both batches, (0.1 + 0.8) / 2 and (0.1 + 0.6) / 2
    assert "| grpo | 70.0 ± 127.1 | 35.0 ± 63.5 | 52.5 ± 95.3 | 40.0 ± 63.5 | 110 |" in text
    (_, row) = data["rows"]
    assert row["method"] == "grpo"
    assert row["scores"] == {"clean facts": [0.8, 0.6], "outdated facts": [0.4, 0.3]}
    assert row["mean"] == pytest.approx(0.525)
    assert row["half_width"] == pytest.approx(0.9530, abs=1e-4)
    assert data["versions"] == {"python": "3.11"}
    assert (tmp_path / "papers_table.png").stat().st_size > 10_000


def rows(**scores):
    """Rows of a table by method, whose only column is the score of each seed."""
    return [
        {"method": name.replace("_", " "), "scores": {"one hop": list(own)}}
        for name, own in scores.items()
    ]


FALLING = [0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.9]


def test_a_difference_in_every_one_of_ten_seeds_is_one():
    low = [value - 0.1 - 0.01 * i for i, value in enumerate(FALLING)]
    # all ten differences are of one sign: 2 of 1,024 flips are as far out; two comparisons
    (first, second) = compare_rows("rows", rows(grpo=FALLING, ppo=low, rloo=FALLING)).split("\n")
    assert "*grpo* beats *ppo*" in first
    assert "ahead with 10 of 10 seeds, p = 0.004" in first
    assert "*grpo* and *rloo* cannot be told apart: +0.0 ± 0.0 points" in second
    assert "p = 1.000" in second


def test_the_opposite_of_what_the_papers_found_is_said():
    low = [value - 0.1 for value in FALLING]
    masks = [
        {"method": "grpo, loss mask", "scores": {"one hop": low}},
        {"method": "grpo, no loss mask", "scores": {"one hop": FALLING}},
    ]
    text = compare_rows("masks", masks)
    assert "*grpo, no loss mask* beats *grpo, loss mask*, against what the papers found" in text


def test_too_few_seeds_for_any_difference_are_said():
    low = [value - 0.1 for value in FALLING[:5]]
    text = compare_rows("rows", rows(grpo=FALLING[:5], ppo=low))
    # 2 of 32 flips are as far out as five differences of one sign
    assert "*grpo* and *ppo* cannot be told apart" in text
    assert "p = 0.062" in text
    assert "5 seeds cannot tell any of these 1 pairs apart, however they end: that takes 6." in text


def test_naive_rag_is_compared_where_one_search_can_do():
    text = compare_rows("rows", [
        {"method": "naive RAG", "scores": {"one hop": [0.5] * 10, "clean facts": [0.0] * 10}},
        {"method": "grpo", "scores": {"one hop": [0.6] * 10, "clean facts": [0.9] * 10}},
    ])  # fmt: skip
    assert "*grpo* beats *naive RAG*: +10.0 ± 0.0 points in *one hop*" in text


METHODS = ("grpo", "grpo_step", "gigpo", "vine", "tree")


def test_each_rate_is_tried_by_the_same_budget_and_the_best_is_reported(tmp_path, monkeypatch):
    """The runs are made up: 2e-3 does best elsewhere, and would do worst on what is reported."""
    done = []

    def make_up(folder, spec):
        rate = float(spec.options[-1])
        is_tuning = spec.first_task == papers_table.FIRST_TUNING_TASK
        score = 0.8 if (rate == 2e-3) == is_tuning else 0.2
        scores = dict.fromkeys(spec.columns, score)
        folder.mkdir(parents=True)
        result = {
            "run": asdict(spec), "scores": scores, "curve": [[1, 0.1], [9, score]], "seconds": 1,
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
        done.append((spec.method, rate, spec.seed, spec.budget, is_tuning))
        return 0

    monkeypatch.setattr(papers_table, "_do", make_up)
    options = [
        "--studies", "long_horizon", "--seeds", "1", "2", "--learning_rates", "0.001", "0.002",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path), "--long_budget", "50",
    ]  # fmt: skip
    papers_table.main(options)
    for method in METHODS:
        own = [run[1:] for run in done if run[0] == method]
        assert sorted(run for run in own if run[-1]) == [
            (rate, seed, 50, True) for rate in (0.001, 0.002) for seed in papers_table.TUNING_SEEDS
        ]
        assert sorted(run for run in own if not run[-1]) == [
            (0.002, seed, 50, False) for seed in (1, 2)
        ]
    text = (tmp_path / "papers_table.md").read_text()
    assert "| long_horizon | grpo | 20.0 | 80.0 | 0.002 |" in text
    assert "python -m benchmarks.learning_run" in text
    assert len(json.loads((tmp_path / "papers_table.json").read_text())["tuning"]) == len(METHODS)

    name = "gigpo-per_device_train_batch_size-32-learning_rate-0.002-long-2"
    (tmp_path / "work" / name / "result.json").unlink()
    (tmp_path / "work" / name).rmdir()
    done.clear()
    papers_table.main(options)
    assert [run[:3] for run in done] == [("gigpo", 0.002, 2)]  # a stopped command goes on


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


def test_a_teacher_stops_at_the_batch_that_was_solved_enough():
    batches = iter([(10, 0.0), (10, 0.04), (10, 0.05), (10, 0.9)])
    budget = EnvironmentStepBudget(100, lambda: next(batches), until=0.05)
    control = SimpleNamespace(should_training_stop=False)
    while not control.should_training_stop:
        budget.on_step_end(None, None, control)
    assert [success for _, success in budget.curve] == [0.0, 0.04, 0.05]


def test_the_command_trains_measures_and_does_nothing_twice(tmp_path, monkeypatch):
    """Naive RAG, ours and TRL's own trainer, for one batch each."""
    methods = [
        m for m in papers_table.STUDIES[0].methods if m.is_naive_rag or m.method in ("base", "trl")
    ]
    study = papers_table.Study(name="rows", title="Methods", methods=tuple(methods))
    monkeypatch.setattr(papers_table, "STUDIES", (study,))
    arguments = [
        "--seeds", "1", "--budget", "128", "--num_tasks", "3", "--studies", "rows",
        "--learning_rates", "0.002",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path / "results"),
    ]  # fmt: skip
    papers_table.main(arguments)
    rows = json.loads((tmp_path / "results" / "papers_table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == [method.name for method in methods]
    assert all(len(scores) == 1 for row in rows for scores in row["scores"].values())
    assert [row["environment_steps"][0] > 0 for row in rows] == [False, True, True]
    assert [sum(row["completion_tokens"]) > 0 for row in rows] == [False, True, False]
    (command,) = rows[1]["commands"]
    _, _, _, folder, spec = shlex.split(command)
    assert json.loads(spec) == json.loads((Path(folder) / "run.json").read_text())

    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*/result.json")}
    assert len(done) == 3
    papers_table.main(arguments)
    assert done == {path: path.stat().st_mtime_ns for path in done}


def test_a_run_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    broken = papers_table.Method(name="grpo", method="grpo", options=("--learning_rat", "1"))
    study = papers_table.Study(name="rows", title="Methods", methods=(broken,))
    monkeypatch.setattr(papers_table, "STUDIES", (study,))
    with pytest.raises(SystemExit, match=r"failed: .*log\.txt"):
        papers_table.main([
            "--seeds", "1", "--studies", "rows", "--work", str(tmp_path), "--learning_rates", "1",
        ])  # fmt: skip


def test_an_unknown_table_gets_those_there_are():
    with pytest.raises(SystemExit, match=r"'masks2'.* Available: context, long_h"):
        papers_table.main(["--studies", "masks2"])
