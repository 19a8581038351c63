"""Default rewards never pay for detours: each environment, played in many ways."""

import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.core.rewards import earnings_of
from agent_envs.errors import MissingExtraError
from agent_envs.testing import find_detour, play_ways

SPECS = {spec.id: spec for spec in ENVIRONMENTS}
TURNS_IN_A_SANDBOX = {
    "AgentR1/HumanEval-v0": 3, "AgentR1/MBPP-v0": 3, "AgentR1/CommandLine-v0": 4
}  # fmt: skip
"""Its steps are slow."""
TOLERANCE = 1e-9


def check_ways(env, spec, actions=()):
    """Check the ways of one task against each other, and against what the class declares."""
    plays = play_ways(env, 0, actions)
    assert plays[0].solved
    assert find_detour(plays) is None
    kind = type(env.unwrapped)
    for solved in (True, False):
        earned = [play.earned for play in plays if play.solved == solved]
        least, most = earnings_of(kind.default_rewards, kind.earnings(**spec.kwargs), solved=solved)
        assert least - TOLERANCE <= min(earned)
        assert max(earned) <= most + TOLERANCE
    # every way without a mistake earns the same: the shortest is the best, and so is a right guess
    assert plays[0].earned == pytest.approx(
        earnings_of(kind.default_rewards, kind.earnings(**spec.kwargs), solved=True)[1]
    )


def test_no_way_of_playing_earns_more_than_the_shortest(example):
    env_id, kwargs = example
    if env_id == "AgentR1/ScienceWorld-v0":
        pytest.skip("its games are slow; see test_science_world")
    with gym.make(env_id, **kwargs, max_episode_steps=TURNS_IN_A_SANDBOX.get(env_id)) as env:
        check_ways(env, SPECS[env_id])


@pytest.mark.parametrize("category", ["multi_turn_miss_func", "parallel", "irrelevance"])
def test_no_way_of_calling_functions_earns_more_than_the_shortest(category):
    try:
        env = gym.make("AgentR1/BFCL-v0", category=category, max_episode_steps=25)
    except MissingExtraError as error:
        pytest.skip(str(error))
    check_ways(env, SPECS["AgentR1/BFCL-v0"])


def test_a_long_episode_cannot_bring_a_solution_below_a_failure(hotpot_file):
    env = gym.make("AgentR1/HotpotQA-v0", data=hotpot_file, max_episode_steps=120)
    check_ways(env, SPECS["AgentR1/HotpotQA-v0"])


@pytest.mark.parametrize(
    ("term", "detour"),
    [
        (lambda env, event: 0.02, "solves the task and earns 1.1, more"),
        (lambda env, event: -0.4 * (event.action.kind == "invalid"), "fails and earns 0, more"),
        (
            lambda env, event: 2.0 * (event.is_last and env.answer is None),
            "fails and earns 2, more",
        ),
    ],
    ids=["turns", "mistakes that cost too much", "silence"],
)
def test_a_detour_that_pays_is_found(hotpot_file, term, detour):
    rewards = {"exact_match": 1.0, "own": (term, 1.0)}
    env = gym.make("AgentR1/HotpotQA-v0", data=hotpot_file, rewards=rewards)
    assert detour in find_detour(play_ways(env, 0))
