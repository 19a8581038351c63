"""Intervals and tests against hand-worked and published numbers, and their coverage."""

import math

import numpy as np
import pytest

from agent_envs import ConfigurationError
from agent_envs.scoring import pass_hat_k, wilson_interval
from agent_envs.scoring.statistics import (
    compare,
    holm,
    krippendorff_alpha,
    mean_interval,
    mean_of_shares,
    paired_test,
    share_interval,
    sign_test,
)


def scores(*values):
    return dict(enumerate(map(float, values)))


def solved(number, of=100):
    return share_interval([1.0] * number + [0.0] * (of - number))


def test_wilson_intervals_are_those_of_the_literature():
    assert wilson_interval(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson_interval(0.0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson_interval(1.0, 100)[1] == 1.0


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # table of Clopper and Pearson, 95 %
        (10, 10, 0.6915, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 100, 0.0003, 0.0545),
        (50, 100, 0.3983, 0.6017),
    ],
)
def test_a_share_has_clopper_and_pearsons_interval(right, of, low, high):
    interval = solved(right, of)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert (interval.mean, interval.count) == (right / of, of)


@pytest.mark.parametrize("mean", [0.03, 0.5])
def test_intervals_of_several_samples_per_task_cover_the_true_share(mean):
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        shares = rng.binomial(4, rng.beta(mean, 1 - mean, 100)) / 4  # very different tasks
        interval = share_interval(shares, 400)
        covered += interval.low <= mean <= interval.high
    assert covered >= 186


def test_environments_have_equal_weight_and_shares_of_0_and_1_stay_uncertain():
    interval = mean_of_shares([solved(100), solved(0, 2)])
    assert interval.mean == 0.5
    # below: 0.0362 of the first alone; above: 0.8419 of the second alone
    assert (interval.low, interval.high) == pytest.approx((0.5 - 0.0181, 0.5 + 0.4209), abs=5e-4)


def test_three_values_have_students_interval():
    # mean 0.6, deviation 0.1: 4.303 * 0.1 / sqrt(3) = 0.248
    interval = mean_interval([0.5, 0.6, 0.7])
    assert (interval.low, interval.high) == pytest.approx((0.352, 0.848), abs=5e-4)
    assert mean_interval([0.5]).high == math.inf


@pytest.mark.parametrize(
    ("better", "worse", "p_value"),
    [
        (1, 5, 14 / 64),  # 2 * (C(6,0) + C(6,1)) / 2**6
        (0, 0, 1.0),
        (121, 59, 4.434e-6),  # McNemar's exact test in the documentation of statsmodels
        (5000, 0, 0.0),
    ],
)
def test_the_sign_test_is_mcnemars_exact_test(better, worse, p_value):
    assert sign_test(better, worse) == pytest.approx(p_value, rel=1e-3)


def test_holm_adjusts_as_in_the_textbook():
    # 4 * 0.005, 3 * 0.01, 2 * 0.03; 0.04 is raised to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_comparison_uses_the_tasks_that_both_agents_ran():
    first = scores(1, 1, 1, 0, 1, 0) | {99: 1.0}
    second = scores(0, 0, 1, 0, 0, 1) | {77: 1.0}
    comparison = compare(first, second)
    assert (comparison.num_better, comparison.num_worse, comparison.num_equal) == (3, 1, 2)
    assert comparison.difference.mean == pytest.approx(2 / 6)
    assert comparison.difference.count == 6
    assert comparison.p_value == 2 * (1 + 4) / 16
    assert comparison.difference.low < 0 < comparison.difference.high
    assert compare(first, {77: 1.0}) is None


@pytest.mark.parametrize(("wins", "losses"), [(2, 0), (0, 0), (50, 2)])
def test_intervals_of_differences_cover_the_true_difference(wins, losses):
    rng = np.random.default_rng(3)
    chances = np.array([wins, losses, 100 - wins - losses]) / 100
    covered = 0
    for _ in range(500):
        drawn = rng.choice([1.0, -1.0, 0.0], p=chances, size=100)
        interval = compare(scores(*drawn), scores(*[0] * 100)).difference
        covered += interval.low <= (wins - losses) / 100 <= interval.high
    assert covered >= 465


def test_the_sign_flip_test_tests_the_mean():
    # A little worse on ten tasks, far better on one: no evidence about the mean.
    assert paired_test([-0.1] * 10 + [1.0]) > 0.5
    # 2 of the 2^6 sign patterns are as extreme; 38 of 2^18 where patterns are drawn
    assert paired_test([0.5] * 6) == 2 / 64
    assert paired_test([0.1] * 17 + [-0.1]) == pytest.approx(38 / 2**18, abs=0.001)
    assert paired_test([1.0, -1.0, 0.0]) == 1.0


def test_pass_hat_k_is_the_share_of_draws_that_all_succeed():
    assert pass_hat_k(8, 5, 2) == 10 / 28  # C(5,2) / C(8,2)
    assert [pass_hat_k(4, 3, k) for k in (1, 4)] == [0.75, 0.0]
    assert pass_hat_k(4, 4, 4) == 1.0
    with pytest.raises(ConfigurationError, match="k=5 of 4 samples"):
        pass_hat_k(4, 2, 5)


@pytest.mark.parametrize(
    ("raters", "alpha"),
    [
        # "Computing Krippendorff's Alpha-Reliability" (Krippendorff, 2011): four observers
        (("123321412...", "1233224125.3", ".3332342251.", "12332441251."), 0.849),
        # the example of Wikipedia, and of the package krippendorff: three coders
        ((".....34121133.3", "1.213343.......", "..21344.21133.4"), 0.811),
    ],
)
def test_krippendorffs_alpha_of_published_examples(raters, alpha):
    units = [[int(value) for value in unit if value != "."] for unit in zip(*raters, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(alpha, abs=5e-4)


def test_alpha_without_spread_or_pairs_is_unknown():
    assert math.isnan(krippendorff_alpha([[1, 1], [1, 1]]))
    assert math.isnan(krippendorff_alpha([[1], [2]]))
