from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import UnknownNameError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.experimental.branching import (
    _Candidate,
    _spreads,
    allocate_branches,
    rtmc,
    tree,
    vine,
)
from tests.agent_trainers.made import Episode

BRANCHING = (vine, tree)
RAW = {"scale": "none"}


def episode(rewards, states, start=0, group_id="g", **changes):
    return Episode(group_id, rewards, states, start, **changes)


# Two episodes from "q", and a branch of the first one's second state.
SOLVED = episode([0.0, 1.0], ["q", "a"])
FAILED = episode([0.0, 0.0], ["q", "b"])
BRANCH = episode([0.0, 0.0], ["q", "a"], start=1)
FAMILY = [SOLVED, BRANCH, FAILED]


def test_a_step_is_worth_what_the_value_of_its_state_changes_by():
    # V(a) = (1 + 0) / 2. At "q": 0 + V(a) against the other's 0, and 0 against 0.5. At "a": 1
    # against the branch's 0. "b" was seen once: its step shares the advantage of the one before.
    solved, branch, failed = estimate(vine, FAMILY, **RAW)
    assert solved.tolist() == [0.5, 1.0]
    assert failed.tolist() == [-0.5, -0.5]
    assert branch.tolist() == [0.0, 0.0]  # it only measures


def test_in_a_tree_branches_learn_from_their_own_steps():
    solved, branch, failed = estimate(tree, FAMILY, **RAW)
    assert [solved.tolist(), failed.tolist()] == [[0.5, 1.0], [-0.5, -0.5]]
    assert branch.tolist() == [0.0, -1.0]  # the step it shares counts where it was played


def test_the_scale_is_that_of_the_steps_that_learn():
    # mean squares: 0.625 and 0.25 without the branch, and 1 with it
    of_vine, of_tree = (estimate(estimator, FAMILY)[0] for estimator in BRANCHING)
    assert of_vine == pytest.approx(np.array([0.5, 1.0]) / ((0.875 / 2) ** 0.5 + 1e-4))
    assert of_tree == pytest.approx(np.array([0.5, 1.0]) / ((1.875 / 3) ** 0.5 + 1e-4))
    other = episode([0.0], ["q"], group_id="other")
    batch = [*FAMILY, other, replace(other, rewards=[4.0])]  # advantages -4 and 4
    scaled = estimate(vine, batch, scale="batch")[0]
    assert scaled == pytest.approx(np.array([0.5, 1.0]) / ((32.875 / 4) ** 0.5 + 1e-4))


def test_rewards_on_the_way_and_the_discount_count():
    # V(a) = (2 + 4) / 2 = 3; at "q": 1 + 0.5 * 3 = 2.5 against 0
    first, _, branch = estimate(
        vine,
        [
            episode([1.0, 2.0], ["q", "a"]),
            episode([0.0], ["q"]),
            episode([1.0, 4.0], ["q", "a"], start=1),
        ],
        gamma=0.5,
        **RAW,
    )
    assert first.tolist() == [2.5, -2.0]
    assert branch.tolist() == [0.0, 0.0]


def test_equal_states_of_a_group_are_pooled_and_those_of_another_are_not():
    # "a" is met by both: V(a) = 0.5, so neither first step was better; the second ones were
    pooled = [SOLVED, replace(FAILED, states=["q", "a"])]
    assert [a.tolist() for a in estimate(vine, pooled, **RAW)] == [[0.0, 1.0], [0.0, -1.0]]
    apart = [replace(e, group_id=str(i)) for i, e in enumerate(pooled)]
    assert [a.tolist() for a in estimate(vine, apart, **RAW)] == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("name", BRANCHING)
def test_without_branches_and_equal_states_it_is_rloo(name):
    episodes = [
        episode([0.2, 1.0, 0.5], ["q", "a", "b"]),
        episode([0.0, 0.3], ["q", "c"]),
        episode([1.0], ["q"]),
    ]
    for one, other in zip(estimate(name, episodes, **RAW), estimate("rloo", episodes), strict=True):
        assert one == pytest.approx(other)


def test_states_are_equal_if_their_history_is():
    # FINDINGS C3: the second question looks the same after a right and after a wrong first answer
    episodes = [
        episode([0.0, reward], ["q", "right" if is_right else "wrong"], anchors=["q", "q2"])
        for is_right, reward in [(True, 1.0), (True, 0.0), (False, 0.0), (False, 0.0)]
    ]
    for estimator in (vine, tree, rtmc):
        # V(right) = 0.5, V(wrong) = 0; the first answer against the mean of the others' 0.5, 0, 0
        first = [a[0] for a in estimate(estimator, episodes, **RAW)]
        assert first == pytest.approx([1 / 3, 1 / 3, -1 / 3, -1 / 3])
        pooled = estimate(estimator, episodes, states="observation", **RAW)
        assert [a[0] for a in pooled] == [0.0] * 4
    with pytest.raises(UnknownNameError, match="history"):
        estimate(vine, episodes, states="histroy")


def test_the_batch_has_one_scale():
    # FINDINGS C2: three identical groups got three scales
    batch = [replace(e, group_id=group) for group in "xyz" for e in FAMILY]
    scaled = np.split(np.concatenate(estimate(vine, batch, scale="batch")), 3)
    assert all(np.array_equal(each, scaled[0]) for each in scaled)


def test_it_finds_the_true_advantages():
    # the first action leads to a state from which 0.2 or 0.8 succeed; both actions are as likely
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(400):
        chance = (0.2, 0.8)[rng.integers(2)]
        outcome = float(rng.random() < chance)
        episodes.append(episode([0.0, outcome], ["q", chance]))
    truth = [[e.states[1] - 0.5, e.rewards[1] - e.states[1]] for e in episodes]
    for name in BRANCHING:
        error = np.concatenate(estimate(name, episodes, **RAW)) - np.concatenate(truth)
        assert np.abs(error).max() < 0.08  # three standard errors of a mean of 200
    whole = np.concatenate(estimate("rloo", episodes)) - np.concatenate(truth)
    assert np.abs(whole).max() > 0.25  # the noise of a single return


STEPS = st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abcd")), min_size=1, max_size=4)
BATCHES = st.lists(
    st.tuples(st.sampled_from("xy"), STEPS, st.integers(0, 3)), min_size=1, max_size=8
)


@given(BATCHES, st.sampled_from(BRANCHING), st.randoms(use_true_random=False))
def test_the_order_of_episodes_and_branches_does_not_matter(batch, name, random):
    episodes = [
        episode([float(r) for r, _ in steps], [a for _, a in steps], min(start, len(steps)), g)
        for g, steps, start in batch
    ]
    order = list(range(len(episodes)))
    random.shuffle(order)
    straight = estimate(name, episodes)
    shuffled = estimate(name, [episodes[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place].shape == (len(episodes[i].rewards),)
        assert shuffled[place] == pytest.approx(straight[i], abs=1e-4)
        assert not np.any(straight[i][: episodes[i].start])


def total(counts):
    return sum(map(sum, counts))


def test_branches_go_where_returns_vary():
    sure = [episode([0.0, 0.0, 1.0], [f"{i}", "s", "t"], group_id="sure") for i in range(4)]
    varied = [episode([0.0, 0.0, float(i % 2)], ["q", f"m{i}", "e"]) for i in range(4)]
    counts = allocate_branches([*sure, *varied], budget=6.0)
    assert total(counts[:4]) == 0
    assert total(counts[4:]) > 0
    assert all(each[0] == 0 for each in counts)  # the whole group has that state
    # "e" has four returns already, "m" one: more is learned about those, though they cost more
    assert [each[1] > 0 for each in counts[4:]].count(True) >= 2


def test_no_more_is_spent_than_foreseen_and_branches_branch_only_if_they_may():
    longer = episode([0.0, 0.0, 1.0], ["q", "a", "c"])
    branch = replace(longer, rewards=[0.0, 0.0, 0.0], states=["q", "a", "d"], start=1)
    batch = [longer, branch, FAILED]
    for budget in (0.0, 0.9, 3.0, 7.5):
        counts = allocate_branches(batch, budget, from_branches=True)
        spent = sum(
            n * (len(e.rewards) - t)
            for e, per_step in zip(batch, counts, strict=True)
            for t, n in enumerate(per_step)
        )
        assert spent <= budget
        assert (spent > 0) == (budget >= 1)
    assert allocate_branches(batch, 20.0, from_branches=True)[1][2] > 0
    assert total(allocate_branches(batch, 20.0)[1:2]) == 0
    assert allocate_branches([], 5.0) == []


def test_the_gain_of_a_branch_is_the_fall_of_the_variance_over_its_cost():
    # The mean of n values has the variance v / n; v / n - v / (n + 1) = v / (n (n + 1)).
    candidate = _Candidate(visits=[(0, 1)], num_returns=3, variance=6.0, cost=2.0)
    assert candidate.gain(0) / candidate.gain(1) == pytest.approx((4 * 5) / (3 * 4))


def test_the_spread_of_returns_is_their_unbiased_variance():
    # (1, 3): mean 2, (1 + 1) / (2 - 1) = 2; a step with one return takes that of the step before
    assert _spreads([np.array([1.0, 5.0]), np.array([3.0])]) == [2.0, 2.0]
