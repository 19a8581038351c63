import json
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

import pytest

from agent_envs.errors import ConfigurationError, UnknownNameError
from benchmarks import grid
from benchmarks.credit import regimes
from benchmarks.credit.regimes import (
    REGIMES,
    RegimesArguments,
    cell_name,
    choose_rates,
    run_cells,
    start_cells,
)
from benchmarks.credit.regimes_report import compare, predictions, regime_section
from benchmarks.learning_run import LearningRun


def rows(*steps):
    """Steps of two start policies for each seed."""
    return [[value, value] for value in steps]


BASELINE = rows(800, 820, 790, 810, 805, 815, 795, 800)


def test_the_plan_has_every_arm_start_and_seed_and_tunes_on_other_seeds():
    options = RegimesArguments(seeds=[1, 2], starts=[1, 3])
    rates = {name: dict.fromkeys(regime.arms, 1e-3) for name, regime in REGIMES.items()}
    cells = run_cells(options, options.starts, options.seeds, rates)
    assert set(cells) == {
        cell_name(name, arm, start, seed, 1e-3)
        for name, regime in REGIMES.items()
        for arm in regime.arms
        for start in (1, 3)
        for seed in (1, 2)
    }
    tuned = run_cells(options, [1], options.tuning_seeds)
    assert {cell["run"]["seed"] for cell in tuned.values()} == {101, 102}
    num_arms = sum(len(regime.arms) for regime in REGIMES.values())
    assert len(tuned) == 2 * len(options.learning_rates) * num_arms
    # step and branch credit share their start policies
    assert len(start_cells(options)) == 3 * len(options.starts)


def test_arms_differ_in_credit_alone():
    options = RegimesArguments(seeds=[1], starts=[1], learning_rates=[1e-3])
    runs = {name.split("-")[0]: cell["run"] for name, cell in run_cells(options, [1], [1]).items()}
    grpo, vine, oracle = (runs[f"branch/{arm}"] for arm in ("grpo", "vine", "oracle"))
    differing = {key for key in grpo if grpo[key] != vine[key]}
    assert differing == {"method", "num_episodes"}
    assert {key for key in grpo if grpo[key] != oracle[key]} == {
        "method", "options", "are_branches_free",
    }  # fmt: skip
    assert oracle["options"][: len(grpo["options"])] == grpo["options"]
    # smaller batches give no stricter rule: 1 of 24 and 5 of 24, not 2 and 6
    for name, count in (("branch/grpo", 1), ("branch/vine", 1), ("bifurcation/vine", 5)):
        assert LearningRun(**runs[name]).window_batches == count


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"regimes": ["stpe"]}, UnknownNameError),
        ({"seeds": [1, 101]}, ConfigurationError),
        ({"seeds": list(range(17))}, ConfigurationError),
        ({"tuning_seeds": []}, ConfigurationError),
        ({"starts": [1, 1]}, ConfigurationError),
        ({"learning_rates": []}, ConfigurationError),
    ],
)
def test_impossible_options_are_refused(options, error):
    with pytest.raises(error):
        RegimesArguments(**options)


def test_the_rate_with_the_divergence_nearest_to_the_target_is_chosen():
    options = RegimesArguments(regimes=["control"], learning_rates=[2e-3, 5e-4, 1e-3])
    divergence = {5e-4: [0.001], 1e-3: [0.002, 0.012], 2e-3: [0.05]}
    tuned = {
        cell_name("control", arm, 1, seed, rate): {"kl": values if arm == "grpo" else []}
        for arm in REGIMES["control"].arms
        for seed in options.tuning_seeds
        for rate, values in divergence.items()
    }
    rates = choose_rates(options, tuned)["control"]
    assert rates["grpo"] == 1e-3
    assert rates["vine"] == 5e-4  # no update had an advantage: the smallest


def test_a_run_that_never_gets_there_counts_with_the_budget():
    fast = rows(*[600] * 7, None)
    (found,) = compare({"grpo": rows(*[800] * 8), "vine": fast}, budget=1000)
    assert found.difference.mean == pytest.approx((7 * -200 + 200) / 8)
    assert found.num_fewer == (7, 2)
    late = rows(*[1100] * 8)  # its batch went over the budget
    (found,) = compare({"grpo": late, "vine": rows(*[None] * 8)}, budget=1000)
    assert found.difference.mean == 0


def test_comparisons_are_exact_and_corrected():
    faster = rows(700, 725, 670, 715, 695, 700, 690, 701)
    outcomes = {"grpo": BASELINE, "vine": faster, "tree": BASELINE}
    vine, tree = compare(outcomes, budget=1000)
    # eight differences of one sign: 2 of 256 flips are as extreme; times two comparisons
    assert vine.p_value == pytest.approx(2 * 2 / 256)
    assert tree.p_value == 1.0
    # between a t-test (quantiles 2.841 at 1 - .05 / 4 and .896 at .8) and a test of all signs
    low, high = (2.841 + 0.896) / 8**0.5, NormalDist().inv_cdf(0.8 ** (1 / 8))
    assert low < vine.detectable / 9.342 < high  # standard deviation of the differences


def test_the_report_says_what_was_found_and_whether_it_was_predicted():
    faster = rows(700, 725, 670, 715, 695, 700, 690, 701)
    outcomes = {"grpo": BASELINE, "vine": faster, "tree": rows(*[None] * 8)}
    facts = {
        "description": "Branches.",
        "rates": dict.fromkeys(outcomes, 1e-3),
        "kl": dict.fromkeys(outcomes, 0.0123),
    }
    text = regime_section(
        "branch", outcomes, 1000, facts=facts, predicted=[("vine", "grpo"), ("tree", "grpo")]
    )
    assert "| tree | 1,000 ± 0 | 16 of 16 | 0.001 | 0.0123 |" in text
    assert "*vine* needs fewer steps than *grpo* (p = 0.016)" in text
    assert "fewer with 8 of 8 seeds and 2 of 2 start policies" in text
    assert "*tree* needs more steps than *grpo*" in text
    held, failed = predictions(outcomes, 1000, [("vine", "grpo"), ("tree", "grpo")])
    assert "held (700 and 804)" in held
    assert "**did not hold** (1,000 and 804)" in failed
    tie = regime_section("control", {"grpo": BASELINE, "vine": BASELINE}, 1000,
                         facts=facts, predicted=[])  # fmt: skip
    assert "no significant difference (p = 1.000)" in tie
    assert "all tie: held" in tie
    assert "too few" in regime_section("control", {"grpo": BASELINE[:2], "vine": faster[:2]}, 1000,
                                       facts=facts, predicted=[])  # fmt: skip


def fake_run_cell(done, steps_per_letter):
    """Fake runs: every method reaches 50 % after as many steps as its name is long."""

    def fake(spec, folder):
        done.append(folder)
        if "start" in spec:
            return {"success": 0.01, "seconds": 1.0}
        steps = steps_per_letter * len(spec["run"]["method"])
        return {"curve": [(steps, 0.9)], "kl": [0.01], "steps": steps, "seconds": 2.0}

    return fake


def test_a_stopped_call_resumes_and_the_report_is_complete(tmp_path, monkeypatch):
    done = []
    fake = fake_run_cell(done, steps_per_letter=1000)
    monkeypatch.setattr(grid, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(regimes, "run_cell", fake)
    options = ["--seeds", "1", "2", "--starts", "1", "--regimes", "step", "--jobs", "1",
               "--work", str(tmp_path / "work"), "--output", str(tmp_path)]  # fmt: skip
    regimes.main(options)
    arms = len(REGIMES["step"].arms)
    assert len(done) == 1 + 2 * 3 * arms + 2 * arms
    text = (tmp_path / "regimes.md").read_text()
    assert "| gagpo | 5,000 ± 0 | 0 of 2 |" in text
    assert json.loads((tmp_path / "regimes.json").read_text())["hours"] > 0
    assert (tmp_path / "regimes.png").stat().st_size > 0
    done.clear()
    regimes.main(options)
    assert done == []
