import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.wrappers.potential_shaping import PotentialShaping, found_gold

ID = "AgentR1/SyntheticMultiHop-v0"


def run(env, actions, task=3):
    env.reset(options={"task": task})
    steps = []
    for action in actions:
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


def reference(task=3):
    env = gym.make(ID)
    env.reset(options={"task": task})
    return env.unwrapped.reference_actions()


def test_progress_is_rewarded_and_subtracted_at_the_end():
    env = PotentialShaping(gym.make(ID, rewards={"exact_match": 1.0}), found_gold)
    steps = run(env, reference())
    assert [info["reward_terms"]["shaping"] for *_, info in steps] == [0.5, 0.5, -1.0]
    assert [reward for _, reward, *_ in steps] == [0.5, 0.5, 0.0]
    for _, reward, _, _, info in steps:
        assert reward == pytest.approx(sum(info["reward_terms"].values()))


def test_two_shapings_add_to_one_term():
    env = PotentialShaping(PotentialShaping(gym.make(ID), found_gold), lambda env: env.num_turns)
    for _, reward, _, _, info in run(env, reference()):
        assert reward == pytest.approx(sum(info["reward_terms"].values()))


WORDS = st.sampled_from(["director of amber anchor", "x", "award of ada dorn"])
SEARCH = WORDS.map(
    lambda w: f'<tool_call>{{"name": "search", "arguments": {{"query": "{w}"}}}}</tool_call>'
)
ACTIONS = st.one_of(SEARCH, st.sampled_from(["nonsense", "<answer>acme</answer>", *reference()]))


@given(st.lists(ACTIONS, min_size=1, max_size=4), st.floats(0, 1), st.floats(-3, 3))
def test_the_additions_sum_to_the_first_potential_for_any_actions(actions, gamma, offset):
    """The discounted sum over a finished episode does not depend on what was done."""

    def potential(env):
        return offset + found_gold(env) + 0.3 * env.num_turns

    env = PotentialShaping(gym.make(ID), potential, gamma)
    steps = run(env, actions)
    total = sum(gamma**t * info["reward_terms"]["shaping"] for t, (*_, info) in enumerate(steps))
    expected = -offset
    if not steps[-1][2]:  # not over: the last state keeps its potential, as it keeps its value
        expected += gamma ** len(steps) * potential(env.unwrapped)
    assert total == pytest.approx(expected, abs=1e-9)


def test_a_restored_episode_is_shaped_alike():
    env = PotentialShaping(gym.make(ID), found_gold)
    run(env, reference()[:1])
    snapshot = env.unwrapped.snapshot()
    expected = env.step(reference()[1])
    env.reset(seed=5)
    env.unwrapped.restore(snapshot)
    assert env.step(reference()[1]) == expected
