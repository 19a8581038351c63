import itertools
import json
from dataclasses import asdict
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

from agent_trainers.cli.train import parse_arguments
from benchmarks import claims, papers_table
from benchmarks.claims import (
    ARMS,
    CLAIMS,
    ClaimsArguments,
    detectable_ratio,
    differences_by_seed,
    judge,
    learning_run,
)
from benchmarks.learning_run import EnvironmentStepBudget, LearningRun, Sampled, run

FACTORS = ("advantage_estimator", "importance_sampling_level", "loss_denominator")


def config_of(arm):
    """The trainer's settings of an arm's command line."""
    spec = learning_run(arm, 1, 2e-3, ClaimsArguments())
    arguments = ["--algorithm", spec.method, "--env", spec.env]
    return parse_arguments([*arguments, "--env_kwargs", json.dumps(spec.env_kwargs), *spec.options])


def test_each_cell_of_the_2x2x2_design_is_one_arm_with_the_same_discount():
    configs = {arm: config_of(arm)[1] for arm in ARMS if arm.startswith("ppo ")}
    levels = [tuple(getattr(config, factor) for factor in FACTORS) for config in configs.values()]
    assert sorted(levels) == sorted(
        itertools.product(("gae_token", "gae_step"), ("token", "step"), ("token", "step"))
    )
    assert {config.gamma for config in configs.values()} == {1.0}


@pytest.mark.parametrize(("name", "factor"), [*zip(list(CLAIMS)[:3], FACTORS, strict=True)])
def test_a_main_effect_compares_four_cells_that_differ_in_one_factor(name, factor):
    claim = CLAIMS[name]
    others = [other for other in FACTORS if other != factor]
    for arms, level in ((claim.better, "step"), (claim.other, "token")):
        configs = [config_of(arm)[1] for arm in arms]
        assert [getattr(config, factor).removeprefix("gae_") for config in configs] == [level] * 4
        assert len({tuple(getattr(config, o) for o in others) for config in configs}) == 4


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_takes_two_optimiser_steps_per_batch_and_differs_as_it_says(arm):
    _, config = config_of(arm)
    assert config.num_iterations == 2
    if not arm.startswith("ppo "):
        expected = "trajectory" if arm == "grpo, trajectory mean" else "token"
        assert config.loss_denominator == expected


def test_every_arm_serves_a_claim():
    used = {arm for claim in CLAIMS.values() for arm in (*claim.better, *claim.other)}
    assert used == set(ARMS)


def test_differences_are_those_of_the_means_of_both_sides_by_seed():
    scores = {"a": [0.4, 0.8], "b": [0.2, 0.4], "c": [0.1, 0.9]}
    claim = claims.Claim("", "", ["a", "b"], ["c"])
    assert differences_by_seed(claim, scores) == pytest.approx([0.2, -0.3])


def test_verdicts_follow_the_corrected_test_and_the_sign():
    rising = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1, 0.2]
    found = judge(
        {"up": rising, "down": [-x for x in rising], "flat": [0.1, -0.1] * 4},
        np.random.default_rng(0),
    )
    assert [finding.verdict for finding in found.values()] == [
        "confirmed", "contradicted", "no difference found",
    ]  # fmt: skip
    # eight signs agree: 2 / 2^8, times three claims; mean 1.5 / 8, deviation .083452
    assert found["up"].p_value == pytest.approx(3 * 2 / 2**8)
    # t(.975, 7) = 2.364624: .1875 +- 2.364624 * .083452 / sqrt(8)
    assert found["up"].difference.low == pytest.approx(0.117732, rel=1e-4)
    assert found["up"].difference.high == pytest.approx(0.257268, rel=1e-4)
    assert found["flat"].p_value == 1.0


@pytest.mark.parametrize(("num_seeds", "num_claims"), [(6, 1), (8, 5), (10, 14)])
def test_where_all_signs_must_agree_the_detectable_difference_has_a_closed_form(
    num_seeds, num_claims
):
    # cdf(d) ** n = .8: the next smallest p-value, 4 / 2^n, is above the level
    assert 4 / 2**num_seeds * num_claims > 0.05 > 2 / 2**num_seeds * num_claims
    expected = NormalDist().inv_cdf(0.8 ** (1 / num_seeds))
    # 1,000 draws: a standard error of .013 of the power is one of .03 of the difference
    found = detectable_ratio(num_seeds, num_claims, np.random.default_rng(1))
    assert found == pytest.approx(expected, rel=0.06)


def test_more_seeds_detect_smaller_differences_and_too_few_none():
    assert detectable_ratio(8, 14, np.random.default_rng(0)) is None
    many, few = (detectable_ratio(n, 1, np.random.default_rng(0)) for n in (10, 6))
    assert many < few
    assert judge({"a": [0.1, 0.2]}, np.random.default_rng(0))["a"].detectable is None


def test_the_page_holds_verdict_power_and_a_command_for_each_claim(tmp_path, monkeypatch):
    """In these fake runs 2e-3 is the better rate, and clipping higher is 20 points better."""
    done = []

    def fake(grid, name, spec):
        done.append(name)
        is_higher = "--epsilon_high" in spec["options"]
        score = 0.1 * (spec["learning_rate"] == 2e-3) + 0.2 * is_higher + 0.001 * spec["seed"]
        return {"run": spec, "scores": dict.fromkeys(spec["columns"], score), "clip_ratio": 0.02,
                "curve": [[9, score]], "seconds": 1, "command": f"run {name}"}  # fmt: skip

    monkeypatch.setattr(papers_table, "compute_run", fake)
    options = [
        "--claims", "clip_higher", "--seeds", "1", "2", "3", "4", "5", "6",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path), "--jobs", "1",
    ]  # fmt: skip
    claims.main(options)
    assert len(done) == 2 * 2 + 2 * 6  # one family: two rates, two tuning seeds; two arms
    page = (tmp_path / "claims.md").read_text()
    assert "| confirmed: +20.0 | +20.0 to +20.0 | 0.031 |" in page
    assert "`python -m benchmarks.claims --claims clip_higher`" in page
    assert "*grpo* 0.002" in page
    result = json.loads((tmp_path / "claims.json").read_text())
    assert result["claims"]["clip_higher"]["verdict"] == "confirmed"
    assert len(result["arms"]["grpo"]) == 6
    done.clear()
    claims.main(options)
    assert done == []


@pytest.mark.parametrize(("counter", "total"), [(Sampled(), 26), (Sampled(lambda _: 1), 4)])
def test_discarded_episodes_count_and_each_batch_counts_once(counter, total):
    def episodes(*counts, success):
        return [
            SimpleNamespace(usage={"completion_tokens": count}, success=success) for count in counts
        ]

    batches = iter([episodes(5, 6, success=False), episodes(7, 8, success=True)])
    collector = SimpleNamespace(collect=lambda specs: next(batches))
    trainer = SimpleNamespace(
        extensions=[], keeping_state={}, rollouts=SimpleNamespace(collectors={"train": collector})
    )
    counter.attach(trainer)
    for _ in range(2):  # a batch, and its replacement by dynamic sampling
        counter.collect([], (0, 0), {})
    budget = EnvironmentStepBudget(30, counter.last_batch)
    control = SimpleNamespace(should_training_stop=False)
    for _ in range(2):  # two optimiser steps on it
        budget.on_step_end(None, None, control)
    assert budget.curve == [(total, 0.5), (total, 0.5)]
    assert not control.should_training_stop


def test_a_run_of_a_token_budget_stops_at_it_and_reports_the_clipped_share(tmp_path):
    spec = LearningRun(
        method="grpo", seed=1, budget=100, counts_tokens=True, num_tasks=2, columns=("one hop",),
        learning_rate=2e-3, options=(
            "--per_device_train_batch_size", "8", "--num_iterations", "2",
            "--max_extra_groups", "1",
        ),
    )  # fmt: skip
    result = run(spec, tmp_path)
    assert result["run"] == asdict(spec)
    (*before, (last, _)) = result["curve"]
    assert last >= 100
    assert all(count < 100 for count, _ in before)
    assert 0.0 <= result["clip_ratio"] <= 1.0
