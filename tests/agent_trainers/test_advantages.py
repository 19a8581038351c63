from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import UnknownNameError
from agent_trainers.advantages import ADVANTAGE_ESTIMATORS, estimate


@dataclass
class Episode:
    group_id: str
    rewards: list
    is_scorable: bool = True


def group(*rewards):
    return [Episode("g", list(r)) for r in rewards]


def test_grpo_gives_every_step_the_group_normalised_return():
    # returns 1, 0, 2: mean 1, unbiased std 1; A = (R - 1) / (1 + 1e-4)
    advantages = estimate("grpo", group([0, 1], [0], [1, 0, 1]))
    assert [a.tolist() for a in advantages] == [
        [0, 0],
        pytest.approx([-1 / 1.0001]),
        pytest.approx([1 / 1.0001] * 3),
    ]


def test_grpo_step_gives_each_step_its_return_to_go():
    # G = (1.1, 1.0) and (0, 0); episode means 1.05 and 0, so the mean is 0.525.
    # variance = [((0.575^2 + 0.475^2) / 2) + 0.525^2] / (2 - 1) = 0.278125 + 0.275625 = 0.55375
    advantages = estimate("grpo_step", group([0.1, 1.0], [0.0, 0.0]))
    divisor = 0.55375**0.5 + 1e-4
    assert advantages[0] == pytest.approx([0.575 / divisor, 0.475 / divisor])
    assert advantages[1] == pytest.approx([-0.525 / divisor] * 2)


def test_discounting_is_per_step():
    # gamma 0.5: G_0 = 0 + 0.5 * 1 = 0.5; without scaling A = G - mean, mean = ((0.5 + 1) / 2) / 2
    advantages = estimate("grpo_step", group([0, 1], [0, 0]), gamma=0.5, scale="none")
    assert advantages[0] == pytest.approx([0.5 - 0.375, 1 - 0.375])


def test_batch_scaling_divides_by_one_deviation_for_all_groups():
    episodes = [Episode("a", [0.0]), Episode("a", [1.0]), Episode("b", [0.0]), Episode("b", [3.0])]
    # values 0, 1, 0, 3: mean 1, unbiased variance (1 + 0 + 1 + 4) / 3 = 2
    advantages = estimate("grpo", episodes, scale="batch")
    divisor = 2**0.5 + 1e-4
    assert np.concatenate(advantages) == pytest.approx(np.array([-0.5, 0.5, -1.5, 1.5]) / divisor)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_an_episode_that_could_not_be_scored_is_left_out_of_its_group(name):
    failed = Episode("g", [5.0], is_scorable=False)
    with_failure = estimate(name, [*group([1.0], [0.0]), failed])
    assert with_failure[2].shape == (0,)
    assert np.concatenate(with_failure) == pytest.approx(
        np.concatenate(estimate(name, group([1.0], [0.0])))
    )


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_group_without_variance_teaches_nothing(name):
    for episodes in (group([1.0], [1.0]), group([1.0])):
        assert all(np.all(a == 0) for a in estimate(name, episodes))


REWARDS = st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=1, max_size=4)
BATCHES = st.lists(st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=8)


@given(BATCHES, st.sampled_from(list(ADVANTAGE_ESTIMATORS)), st.randoms(use_true_random=False))
def test_the_order_of_episodes_does_not_matter(batch, name, random):
    episodes = [Episode(group_id, rewards) for group_id, rewards in batch]
    order = list(range(len(episodes)))
    random.shuffle(order)
    straight = estimate(name, episodes)
    shuffled = estimate(name, [episodes[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == pytest.approx(straight[i], abs=1e-4)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), min_size=2, max_size=6))
def test_grpo_step_is_grpo_where_all_reward_comes_at_the_end(episodes):
    batch = group(*([0.0] * (steps - 1) + [reward] for steps, reward in episodes))
    for one, other in zip(estimate("grpo", batch), estimate("grpo_step", batch), strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_an_unknown_estimator_gets_the_nearest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'grpo_step'"):
        estimate("grpo_stp", [])
