"""Formulas against hand-worked and published numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import ConfigurationError
from agent_envs.scoring import pass_hat_k
from agent_leaderboard.report.uncertainty import (
    bootstrap_interval,
    compare,
    holm,
    mean_by_task,
    mean_over_environments,
    ranks_with_ties,
    sign_test,
)

SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40)


def rng():
    return np.random.default_rng(3)


def scores(*values):
    return dict(enumerate(map(float, values)))


def test_the_bootstrap_of_a_share_finds_the_quantiles_of_the_binomial():
    # The mean of a resample of 10 ones and 10 zeros is binomial(20, 1/2) / 20. P(X <= 5) = 0.021
    # and P(X <= 6) = 0.058, so the 2.5 % quantile is 6 / 20; the other one lies opposite.
    interval = bootstrap_interval([1.0] * 10 + [0.0] * 10, rng())
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.3, 0.7)
    assert interval.num_tasks == 20


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.3085), (1.0, 0.6915, 1.0)])
def test_ten_equal_results_leave_doubt(share, low, high):
    # Clopper and Pearson's table for n = 10, 95 %: 0 of 10 is (0, 0.3085); 1 - 0.025 ** 0.1
    interval = bootstrap_interval([share] * 10, rng(), is_share=True)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert interval.mean == share


def test_equal_values_that_are_no_shares_have_no_width():
    interval = bootstrap_interval([7.0] * 3, rng())
    assert (interval.low, interval.mean, interval.high) == (7.0, 7.0, 7.0)


@given(values=SHARES)
def test_an_interval_holds_its_mean_and_stays_among_the_values(values):
    interval = bootstrap_interval(values, rng())
    assert min(values) <= interval.low <= interval.mean + 1e-9
    assert interval.mean - 1e-9 <= interval.high <= max(values)


def test_samples_of_one_task_do_not_count_as_more_tasks():
    once = [(task, float(task < 10)) for task in range(20)]
    assert mean_by_task(once * 8) == mean_by_task(once)
    assert mean_by_task([(4, 1.0), (2, 0.0), (4, 0.0)]) == {2: 0.0, 4: 0.5}


def test_more_tasks_are_drawn_in_parts_and_narrow_the_interval():
    narrow = bootstrap_interval([0.0, 1.0] * 2_000, rng())
    # standard error sqrt(0.25 / 4000) = 0.0079, so about 0.5 +- 1.96 * 0.0079
    assert (narrow.low, narrow.high) == pytest.approx((0.4845, 0.5155), abs=0.002)


def test_an_interval_of_nothing_is_an_error():
    with pytest.raises(ConfigurationError, match="at least one task"):
        bootstrap_interval([], rng())
    with pytest.raises(ConfigurationError, match="in each of them"):
        mean_over_environments([[1.0], []], rng())


def test_environments_weigh_the_same_however_many_tasks_they_have():
    interval = mean_over_environments([[1.0] * 100, [0.0, 0.0]], rng())
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.5, 0.5)
    solved = mean_over_environments([[1.0] * 4, [1.0] * 6], rng())
    assert solved.low == pytest.approx(0.025**0.1)
    spread = mean_over_environments([[0.0, 1.0] * 50, [0.0, 1.0] * 50], rng())
    # standard error sqrt(0.25 / 200) = 0.0354
    assert spread.high - spread.low == pytest.approx(2 * 1.96 * 0.0354, abs=0.015)


@pytest.mark.parametrize(
    ("better", "worse", "p_value"),
    [
        (1, 5, 14 / 64),  # 2 * (C(6,0) + C(6,1)) / 2**6
        (5, 1, 14 / 64),
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 10, 2 / 1024),
        (121, 59, 4.434e-6),  # McNemar's exact test in statsmodels' documentation
        (5000, 0, 0.0),
    ],
)
def test_the_sign_test_is_mcnemars_exact_test(better, worse, p_value):
    assert sign_test(better, worse) == pytest.approx(p_value, rel=1e-3)


def test_holm_adjusts_as_in_the_textbook():
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, then 0.04 is lifted to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_comparison_uses_the_tasks_that_both_played():
    first = scores(1, 1, 1, 0, 1, 0) | {99: 1.0}
    second = scores(0, 0, 1, 0, 0, 1) | {77: 1.0}
    comparison = compare(first, second, rng())
    assert (comparison.num_better, comparison.num_worse, comparison.num_equal) == (3, 1, 2)
    assert comparison.difference.mean == pytest.approx(2 / 6)
    assert comparison.difference.num_tasks == 6
    assert comparison.p_sign == 2 * (1 + 4) / 16
    assert comparison.difference.low < 0 < comparison.difference.high
    assert compare(first, {77: 1.0}, rng()) is None


def test_pairing_finds_what_unpaired_intervals_cannot():
    # The first is better by one point in ten on every task, whose difficulty varies far more.
    second = scores(*np.linspace(0, 0.8, 50))
    first = {task: score + 0.1 for task, score in second.items()}
    comparison = compare(first, second, rng())
    assert comparison.difference.low == pytest.approx(0.1)
    assert comparison.p_sign == 2 / 2**50
    one, other = (bootstrap_interval(list(s.values()), rng()) for s in (first, second))
    assert one.low < other.high


@pytest.mark.parametrize(
    ("first", "second", "low", "high", "p_value"),
    [
        (1, 1, -0.8419, 0.8419, 1.0),  # of two tasks that are equal, at least 0.025 ** 0.5 = 0.1581
        (1, 0, -0.6838, 1.0, 0.5),  # 0.1581 - (1 - 0.1581)
        (0, 1, -1.0, 0.6838, 0.5),
    ],
)
def test_two_tasks_that_agree_leave_doubt_about_a_difference(first, second, low, high, p_value):
    comparison = compare(scores(first, first), scores(second, second), rng())
    interval = comparison.difference
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert comparison.p_bootstrap == comparison.p_sign == p_value


def test_the_paired_bootstrap_has_the_normal_p_value_where_there_are_many_tasks():
    # 60 wins, 40 losses: mean 0.2, standard error sqrt((1 - 0.04) / 100) = 0.098, z = 2.04: 0.041
    first, second = scores(*[1] * 60 + [0] * 40), scores(*[0] * 60 + [1] * 40)
    assert compare(first, second, rng()).p_bootstrap == pytest.approx(0.041, abs=0.02)


def test_no_p_value_of_the_bootstrap_claims_more_than_resamples_can_show():
    # 40 wins, 2 losses: no resample of 5,000 has a mean of 0 or less (z = 10), so the p-value is
    # 2 * (0 + 1) / (5,000 + 1), and not 0 (Davison and Hinkley, 1997, section 4.2)
    first, second = scores(*[1] * 40 + [0] * 2), scores(*[0] * 40 + [1] * 2)
    assert compare(first, second, rng()).p_bootstrap == 2 / 5_001
    assert compare(second, first, rng()).p_bootstrap == 2 / 5_001


def test_a_p_value_counts_one_resample_more_than_were_drawn():
    # Differences 1 and -1: resampled means are 1, 0 and -1 with chances 1/4, 1/2 and 1/4. By hand:
    # the smaller tail holds the draws at 0 or beyond, about 3/4 of 5,000; twice that is cut to 1.
    assert compare(scores(1, 0), scores(0, 1), rng()).p_bootstrap == 1.0
    # 7 wins, 1 loss. The mean of a resample is <= 0 where at least 4 of its 8 draws are the loss:
    # the same draws, counted here, give the p-value to the last digit.
    drawn = rng().integers(8, size=(5_000, 8))
    tail = int(((drawn == 7).sum(axis=1) >= 4).sum())
    comparison = compare(scores(*[1] * 7, 0), scores(*[0] * 7, 1), rng())
    assert comparison.p_bootstrap == 2 * (tail + 1) / 5_001


def test_agents_that_cannot_be_told_apart_share_a_rank():
    ranks = ranks_with_ties(
        {
            "good": scores(*[1] * 38 + [0] * 2),
            "as good": scores(*[1] * 36 + [0] * 4),
            "bad": scores(*[1] * 10 + [0] * 30),
            "none": scores(*[0] * 40),
        }
    )
    # good against as good: 2 to 0, p = 0.5; against bad: 28 to 0; bad against none: 10 to 0
    assert ranks == {"good": 1, "as good": 1, "bad": 3, "none": 4}


def test_many_pairs_take_more_evidence():
    # 6 to 0 has p = 0.031: enough for one comparison with the leader, not for one of two
    pair = {"a": scores(*[1] * 6), "b": scores(*[0] * 6)}
    assert ranks_with_ties(pair) == {"a": 1, "b": 2}
    assert set(ranks_with_ties(pair | {"c": scores(*[1] * 3 + [0] * 3)}).values()) == {1}


def test_a_group_begins_with_the_best_of_those_that_are_left():
    # b loses to a by 12 to 0, c to b by 2 to 0: b leads the second group, and c shares its rank.
    ranks = ranks_with_ties(
        {
            "c": scores(*[1] * 26 + [0] * 14),
            "a": scores(*[1] * 40),
            "b": scores(*[1] * 28 + [0] * 12),
        }
    )
    assert ranks == {"c": 2, "a": 1, "b": 2}


def test_one_task_ranks_nobody():
    assert ranks_with_ties({"a": scores(1), "b": scores(0)}) == {"a": 1, "b": 1}
    assert ranks_with_ties({"alone": scores(1)}) == {"alone": 1}


def test_pass_hat_k_is_the_share_of_draws_that_are_all_right():
    assert pass_hat_k(8, 5, 2) == 10 / 28  # C(5,2) / C(8,2)
    assert pass_hat_k(4, 3, 1) == 0.75
    assert pass_hat_k(4, 3, 4) == 0.0
    assert pass_hat_k(4, 4, 4) == 1.0
    with pytest.raises(ConfigurationError, match=r"pass\^5 of 2 right in 4"):
        pass_hat_k(4, 2, 5)


@given(n=st.integers(1, 12), data=st.data())
def test_pass_hat_k_never_rises_with_k(n, data):
    correct = data.draw(st.integers(0, n))
    values = [pass_hat_k(n, correct, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(correct / n)
    assert values == sorted(values, reverse=True)
    assert all(math.isfinite(value) for value in values)
