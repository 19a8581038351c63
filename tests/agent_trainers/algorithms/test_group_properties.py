"""Properties of group-relative estimators on random groups."""

import numpy as np
import pytest

from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimate, estimator_options
from agent_trainers.experimental.branching import rtmc, tree, vine
from tests.agent_trainers.made import Episode

NUM_GROUPS = 100
SCALED = [ADVANTAGE_ESTIMATORS[name] for name in ("grpo", "grpo_step", "gigpo", "gagpo")]
SCALED += [rtmc, vine, tree]
UNSCALED = [ADVANTAGE_ESTIMATORS[name] for name in ("dr_grpo", "rloo", "gdpo")]
ALL = [*SCALED, *UNSCALED]
NAMES = [function.__name__ for function in ALL]


def random_groups(*, seed, equal_lengths, draw_returns):
    """Groups of 2 to 5 episodes of 1 to 5 steps, in a tree of two actions."""
    rng = np.random.default_rng(seed)
    episodes = []
    for number in range(NUM_GROUPS):
        longest = int(rng.integers(1, 6))
        shared = rng.normal(size=longest)
        for _ in range(rng.integers(2, 6)):
            length = longest if equal_lengths else int(rng.integers(1, longest + 1))
            returns = draw_returns(rng, shared[:length])
            actions = tuple(rng.integers(2, size=length).tolist())
            states = [actions[:t] for t in range(length)]
            rewards = returns - np.append(returns[1:], 0.0)
            episodes.append(Episode(str(number), rewards, states))
    return episodes


@pytest.fixture(scope="module")
def groups():
    return random_groups(
        seed=0, equal_lengths=True, draw_returns=lambda rng, shared: rng.normal(size=len(shared))
    )


@pytest.mark.parametrize("estimator", ALL, ids=NAMES)
def test_a_group_without_spread_at_any_step_gets_no_credit(estimator):
    same = random_groups(seed=1, equal_lengths=False, draw_returns=lambda _, shared: shared)
    assert all(not np.any(each) for each in estimate(estimator, same))


@pytest.mark.parametrize("estimator", ALL, ids=NAMES)
def test_a_constant_reward_of_a_step_changes_nothing(estimator, groups):
    rng = np.random.default_rng(2)
    constants = {number: rng.normal(size=5) for number in {e.group_id for e in groups}}
    moved = [
        Episode(e.group_id, e.rewards + constants[e.group_id][: len(e.rewards)], e.states)
        for e in groups
    ]
    before, after = (np.concatenate(estimate(estimator, each)) for each in (groups, moved))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", SCALED, ids=NAMES[: len(SCALED)])
def test_the_scale_of_the_batch_is_one_number(estimator, groups):
    raw, scaled = (
        np.concatenate(estimate(estimator, groups, scale=scale)) for scale in ("none", "batch")
    )
    number = np.linalg.norm(scaled) / np.linalg.norm(raw)
    np.testing.assert_allclose(scaled, raw * number, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ALL, ids=NAMES)
def test_advantages_of_the_first_step_sum_to_zero_in_a_group(estimator, groups):
    options = {"scale": "none"} if "scale" in estimator_options(estimator) else {}
    sums = np.zeros(NUM_GROUPS)
    for episode, advantages in zip(groups, estimate(estimator, groups, **options), strict=True):
        sums[int(episode.group_id)] += advantages[0]
    np.testing.assert_allclose(sums, 0.0, atol=1e-5)


@pytest.mark.parametrize("estimator", SCALED, ids=NAMES[: len(SCALED)])
def test_other_groups_do_not_matter(estimator, groups):
    some = [episode for episode in groups if int(episode.group_id) < 50]
    for scale in ("group", "none"):
        alone = np.concatenate(estimate(estimator, some, scale=scale))
        among = np.concatenate(estimate(estimator, groups, scale=scale))
        np.testing.assert_array_equal(alone, among[: len(alone)])
