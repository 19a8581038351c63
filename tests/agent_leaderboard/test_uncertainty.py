"""Formulas against hand-worked and published numbers, and intervals against what they promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import ConfigurationError
from agent_envs.scoring import pass_hat_k
from agent_leaderboard.report.special import beta_cdf, t_quantile
from agent_leaderboard.report.uncertainty import (
    compare,
    fill_unscored,
    holm,
    mean_by_task,
    mean_elsewhere,
    mean_interval,
    mean_over_environments,
    paired_test,
    ranks_with_ties,
    share_interval,
    sign_test,
)

SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40)


def scores(*values):
    return dict(enumerate(map(float, values)))


def solved(number, of=100):
    return share_interval([1.0] * number + [0.0] * (of - number))


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # Clopper and Pearson's table, 95 %
        (10, 10, 0.6915, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 100, 0.0003, 0.0545),
        (50, 100, 0.3983, 0.6017),
    ],
)
def test_a_share_has_clopper_and_pearsons_interval(right, of, low, high):
    interval = solved(right, of)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert (interval.mean, interval.num_tasks) == (right / of, of)


def test_intervals_of_a_hundred_tasks_hold_the_true_share():
    """In at least 95 % of runs, whatever the share; exactly, not by simulation."""
    intervals = [solved(right) for right in range(101)]
    binomials = [math.comb(100, right) for right in range(101)]
    for p in np.linspace(0.03, 0.97, 189):
        chances = [c * p**k * (1 - p) ** (100 - k) for k, c in enumerate(binomials)]
        held = [i.low <= p <= i.high for i in intervals]
        assert sum(c for c, is_held in zip(chances, held, strict=True) if is_held) >= 0.95


@pytest.mark.parametrize("mean", [0.03, 0.1, 0.5, 0.9])
def test_intervals_of_several_trials_hold_the_true_share(mean):
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        shares = rng.binomial(4, rng.beta(mean, 1 - mean, 100)) / 4  # tasks that differ a lot
        interval = share_interval(shares, 400)
        held += interval.low <= mean <= interval.high
    assert held >= 186


def test_more_trials_tell_more_unless_they_always_agree():
    shares = [0.5] * 20
    few, many = share_interval([1.0, 0.0] * 10), share_interval(shares, 80)
    assert many.high - many.low < few.high - few.low
    agreeing = share_interval([1.0, 0.0] * 10, 80)
    assert agreeing.high - agreeing.low >= few.high - few.low


@pytest.mark.parametrize(
    "shares", [(0.999, 0.001, 0.001, 0.001), (0.5, 0.5), (0.03, 0.97), (0.05,) * 5]
)
def test_the_mean_of_environments_holds_the_true_mean(shares):
    rng = np.random.default_rng(2)
    intervals = [solved(right) for right in range(101)]
    held = 0
    for _ in range(1_000):
        mean = mean_over_environments([intervals[k] for k in rng.binomial(100, shares)])
        held += mean.low <= np.mean(shares) <= mean.high
    assert held >= 930


def test_environments_weigh_the_same_and_all_or_nothing_leaves_doubt():
    interval = mean_over_environments([solved(100), solved(0, 2)])
    assert interval.mean == 0.5
    # below: 0.0362 of the first alone; above: 0.8419 of the second alone
    assert (interval.low, interval.high) == pytest.approx((0.5 - 0.0181, 0.5 + 0.4209), abs=5e-4)
    some = mean_over_environments([solved(100)] * 4 + [solved(0)] * 10)
    assert some.low < 4 / 14 < some.high


def test_a_mean_of_other_environments_is_less_sure():
    these = [solved(90), solved(50), solved(10)]
    here, elsewhere = mean_over_environments(these), mean_elsewhere(these)
    # 0.5 +- 4.303 * 0.4 / sqrt(3), cut off at 0 and 1
    assert (elsewhere.low, elsewhere.high) == (0.0, 1.0)
    assert here.low > 0.4
    assert mean_elsewhere([solved(0)] * 3).high == mean_over_environments([solved(0)] * 3).high


def test_three_seeds_have_students_interval():
    # mean 0.6, deviation 0.1: 4.303 * 0.1 / sqrt(3) = 0.248
    interval = mean_interval([0.5, 0.6, 0.7])
    assert (interval.low, interval.high) == pytest.approx((0.352, 0.848), abs=5e-4)
    assert mean_interval([0.5]).high == math.inf


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.706), (2, 4.303), (9, 2.262), (99, 1.984)])
def test_students_t_is_that_of_the_tables(degrees, value):
    assert t_quantile(0.05, degrees) == pytest.approx(value, abs=5e-4)


@given(right=st.integers(0, 30), p=st.floats(0.01, 0.99))
def test_the_beta_distribution_is_the_tail_of_the_binomial(right, p):
    # P(X > k) of binomial(30, p) is beta_cdf(p, k + 1, 30 - k)
    tail = sum(math.comb(30, i) * p**i * (1 - p) ** (30 - i) for i in range(right + 1, 31))
    if right < 30:
        assert beta_cdf(p, right + 1, 30 - right) == pytest.approx(tail, abs=1e-9)


@given(values=SHARES)
def test_an_interval_holds_its_mean(values):
    interval = share_interval(values)
    assert 0 <= interval.low <= interval.mean + 1e-9
    assert interval.mean - 1e-9 <= interval.high <= 1


def test_an_interval_of_nothing_is_an_error():
    with pytest.raises(ConfigurationError, match="at least one task"):
        share_interval([])
    with pytest.raises(ConfigurationError, match="at least one environment"):
        mean_over_environments([])


def test_samples_of_one_task_do_not_count_as_more_tasks():
    once = [(task, float(task < 10)) for task in range(20)]
    assert mean_by_task(once * 8) == mean_by_task(once)
    assert mean_by_task([(4, 1.0), (2, 0.0), (4, 0.0)]) == {2: 0.0, 4: 0.5}


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
    comparison = compare(first, second)
    assert (comparison.num_better, comparison.num_worse, comparison.num_equal) == (3, 1, 2)
    assert comparison.difference.mean == pytest.approx(2 / 6)
    assert comparison.difference.num_tasks == 6
    assert comparison.p_value == 2 * (1 + 4) / 16
    assert comparison.difference.low < 0 < comparison.difference.high
    assert compare(first, {77: 1.0}) is None


def test_pairing_finds_what_unpaired_intervals_cannot():
    # The first is better by one point in ten on every task, whose difficulty varies far more.
    second = scores(*np.linspace(0, 0.8, 50))
    first = {task: score + 0.1 for task, score in second.items()}
    comparison = compare(first, second)
    assert comparison.difference.low > 0
    assert comparison.p_value == 1 / 10_001  # no draw of random signs reaches it
    one, other = (share_interval(list(s.values())) for s in (first, second))
    assert one.low < other.high


@pytest.mark.parametrize(("wins", "losses"), [(2, 0), (0, 0), (50, 2), (97, 0), (10, 10), (30, 10)])
def test_intervals_of_differences_hold_the_true_difference(wins, losses):
    rng = np.random.default_rng(3)
    chances = np.array([wins, losses, 100 - wins - losses]) / 100
    held = 0
    for _ in range(500):
        drawn = rng.choice([1.0, -1.0, 0.0], p=chances, size=100)
        interval = compare(scores(*drawn), scores(*[0] * 100)).difference
        held += interval.low <= (wins - losses) / 100 <= interval.high
    assert held >= 465


def test_random_signs_ask_for_the_mean_where_scores_are_no_whole_numbers():
    # A little worse on ten tasks, far better on one: the mean says nothing, the sign test would.
    differences = [-0.1] * 10 + [1.0]
    assert paired_test(differences) > 0.5
    # 2 of the 2^6 signs are as far from 0 as six equal differences; 34 of 2^17 are drawn for more
    assert paired_test([0.5] * 6) == 2 / 64
    assert paired_test([0.1] * 17 + [-0.1]) == pytest.approx(38 / 2**18, abs=0.001)
    assert paired_test([1.0, -1.0, 0.0]) == 1.0


def test_no_better_score_has_a_worse_rank():
    ranks = ranks_with_ties(
        {
            "L": {t: float(t < 60) for t in range(100)},
            "A": {t: float(t < 50) for t in range(100)},
            "B": {t: float(t < 30 or t >= 82) for t in range(100)},
        }
    )
    assert ranks == {"L": 1, "A": 2, "B": 2}


@given(
    solved=st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12), min_size=1, max_size=6)
)
def test_ranks_never_contradict_scores(solved):
    agents = {str(i): scores(*own) for i, own in enumerate(solved)}
    ranks = ranks_with_ties(agents)
    means = {agent: sum(own.values()) for agent, own in agents.items()}
    for one in agents:
        for other in agents:
            assert means[one] <= means[other] or ranks[one] <= ranks[other]
            assert means[one] != means[other] or ranks[one] == ranks[other]


def test_one_lucky_episode_leads_nobody():
    good = {t: float(t < 60) for t in range(100)}
    ranks = ranks_with_ties({"good": good, "bad": dict.fromkeys(range(100), 0.0), "one": {0: 1.0}})
    assert ranks == {"good": 1, "bad": 2, "one": 2}
    assert len(fill_unscored(dict.fromkeys(range(98), 1.0), range(100))) == 98
    assert fill_unscored(dict.fromkeys(range(97), 1.0), range(100))[99] == 0.0


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
