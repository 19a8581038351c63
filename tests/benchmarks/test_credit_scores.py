import math

import numpy as np
import pytest

from benchmarks.credit.measure import split_half_reliability
from benchmarks.credit.scores import score
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode

COSTS = {"episode_steps": 1.0, "branch_steps": 0.0, "truth_steps": 0.0, "truth_tokens": 0.0,
         "truth_branches": 0.0, "seconds": 0.0}  # fmt: skip


def batch(noise, seed=1, num_tasks=40, rng_seed=0):
    """Return a batch whose true advantages have noise, and the exact ones."""
    rng = np.random.default_rng(rng_seed)
    episodes, true = [], []
    for task in range(num_tasks):
        for _ in range(4):
            a = rng.normal(size=6)
            halves = a + noise * math.sqrt(2) * rng.normal(size=(2, 6))
            true.append(a)
            episodes.append(CreditEpisode(
                group_id=str(task), rewards=[0.0] * 6, lengths=[1] * 6, anchors=["x"] * 6,
                states=["x"] * 6, reward_terms=[{}] * 6,
                advantages=halves.mean(0).tolist(), standard_errors=[noise] * 6,
                halves=halves.tolist(),
            ))  # fmt: skip
    made = CreditBatch(environment="e", stage="s", seed=seed, success=0.5,
                       reliability=split_half_reliability(episodes), reliability_by_variance=0.0,
                       costs=COSTS, episodes=episodes)  # fmt: skip
    return made, true


def test_the_correlation_is_corrected_for_noise_in_the_truth():
    noisy, true = batch(noise=1.0)
    # half of the variance is noise: reliability 1 / (1 + 1), a raw correlation of 0.71
    assert noisy.reliability == pytest.approx(0.5, abs=0.05)
    found = score([noisy], [true]).correlation
    assert found.value == pytest.approx(1.0, abs=0.06)
    assert found.low < 1.0 < found.high
    assert found.high - found.low < 0.3


def test_a_noisy_estimate_has_a_lower_score():
    exact, true = batch(noise=1e-3)
    rng = np.random.default_rng(1)
    estimates = [a + rng.normal(size=6) for a in true]
    found = score([exact], [estimates])
    assert found.correlation.value == pytest.approx(math.sqrt(0.5), abs=0.05)
    # the sign of x + y is that of x with 3/4, for equal and independent normals
    assert found.sign.value == pytest.approx(0.75, abs=0.04)
    opposite = score([exact], [[-e for e in estimates]])
    assert opposite.correlation.value == pytest.approx(-found.correlation.value)
    assert opposite.sign.value == pytest.approx(1.0 - found.sign.value)
    constant = score([exact], [[np.zeros(6)] * len(true)])
    assert (constant.correlation.value, constant.sign.value) == (0.0, 0.5)
    scaled = score([exact], [[50.0 * e + 3.0 for e in estimates]])
    assert scaled.correlation.value == pytest.approx(found.correlation.value)


def test_the_interval_is_wider_when_seeds_differ():
    # one seed is right, the other is not
    first, true = batch(noise=0.1, seed=1)
    second, _ = batch(noise=0.1, seed=2)
    same = score([first, second], [true, true]).correlation
    different = score([first, second], [true, [-a for a in true]]).correlation
    assert same.high - same.low < 0.1
    assert different.value == pytest.approx(0.0, abs=0.02)
    assert different.low < -0.9
    assert different.high > 0.9
