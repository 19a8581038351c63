import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchmarks import papers_table
from benchmarks.learning_run import EnvironmentStepBudget, LearningRun, run
from benchmarks.papers_table import compare_rows

FALLING = [0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.9, 0.8, 0.7, 0.9]
METHODS = ("rloo", "gigpo")  # each with one row


def rows(**scores):
    """Results by method, with the score of each seed in one column."""
    return {
        name: [{"scores": {"one hop": value}} for value in values]
        for name, values in scores.items()
    }


def test_comparisons_are_paired_and_corrected():
    low = [value - 0.1 - 0.01 * i for i, value in enumerate(FALLING)]
    # ten differences of one sign: 2 of 1,024 flips are as extreme; two comparisons
    pairs = [("grpo", "ppo"), ("grpo", "rloo")]
    (first, second) = compare_rows(rows(grpo=FALLING, ppo=low, rloo=FALLING), pairs).split("\n")
    assert "*grpo* beats *ppo*" in first
    assert "better with 10 of 10 seeds, p = 0.004" in first
    assert "no significant difference: +0.0 ± 0.0 points" in second
    assert "*grpo* beats *ppo*" in compare_rows(rows(grpo=FALLING, ppo=low), [("ppo", "grpo")])
    assert "5 seeds are too few" in compare_rows(rows(grpo=FALLING[:5], ppo=low[:5]), pairs[:1])


def test_each_rate_is_tuned_with_the_same_budget_and_the_best_is_reported(tmp_path, monkeypatch):
    """In these fake runs 2e-3 is best in tuning, and would be worst in the report."""
    done = []

    def fake(grid, name, spec):
        rate = spec["learning_rate"]
        is_tuning = spec["first_task"] == papers_table.FIRST_TUNING_TASK
        score = 0.8 if (rate == 2e-3) == is_tuning else 0.2
        done.append((spec["method"], rate, spec["seed"], spec["budget"], is_tuning))
        scores = dict.fromkeys(spec["columns"], score)
        return {"run": spec, "scores": scores, "curve": [[1, 0.1], [9, score]], "seconds": 1,
                "command": "run"}  # fmt: skip

    monkeypatch.setattr(papers_table, "ROWS", {name: {"method": name} for name in METHODS})
    monkeypatch.setattr(papers_table, "PAIRS", [METHODS])
    monkeypatch.setattr(papers_table, "compute_run", fake)
    options = [
        "--seeds", "1", "2", "--learning_rates", "0.001", "0.002",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path), "--budget", "50",
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
    assert "rloo: 0.002; gigpo: 0.002" in text
    assert "| rloo | 20.0 ± 0.0 |" in text
    done.clear()
    papers_table.main(options)
    assert done == []


def test_the_learning_rate_decays_to_zero_over_the_budget():
    batches = iter([(60, 0.1), (30, 0.2), (30, 0.3)])
    budget = EnvironmentStepBudget(100, lambda: next(batches))
    optimizer = SimpleNamespace(param_groups=[{"initial_lr": 2.0, "lr": 2.0}])
    rates, control = [], SimpleNamespace(should_training_stop=False)
    while not control.should_training_stop:
        budget.on_step_begin(None, None, None, optimizer=optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        budget.on_step_end(None, None, control)
    assert rates == pytest.approx([2.0, 0.8, 0.2])
    assert budget.curve == [(60, 0.1), (90, 0.2), (120, 0.3)]


@pytest.mark.parametrize(("num_batches", "num_steps"), [(1, 10), (2, 40), (3, 50)])
def test_training_ends_at_a_mean_success_of_the_last_batches(num_batches, num_steps):
    batches = iter([(10, 0.9), (10, 0.0), (10, 0.5), (10, 0.5), (10, 0.9)])
    budget = EnvironmentStepBudget(100, lambda: next(batches), 0.5, num_batches)
    control = SimpleNamespace(should_training_stop=False)
    while not control.should_training_stop:
        assert not budget.has_succeeded
        budget.on_step_end(None, None, control)
    assert budget.has_succeeded
    assert budget.num_steps == num_steps


def test_a_learning_run_trains_and_evaluates(tmp_path):
    spec = LearningRun(
        method="grpo_step", seed=1, budget=8, num_tasks=2, columns=("one hop",),
        learning_rate=2e-3, options=("--per_device_train_batch_size", "8"),
    )  # fmt: skip
    result = run(spec, tmp_path)
    assert result["run"] == asdict(spec)
    assert result["scores"].keys() == {"one hop"}
    assert result["curve"][-1][0] >= 8
    assert json.loads((tmp_path / "result.json").read_text())["scores"] == result["scores"]
