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
    # the shortest earns the most that there is
    assert plays[0].earned == pytest.approx(
        earnings_of(kind.default_rewards, kind.earnings(**spec.kwargs), solved=True)[1]
    )


@pytest.mark.parametrize("env_id", SPECS)
def test_no_way_of_playing_earns_more_than_the_shortest(env_id, data_files, request):
    if env_id in ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0"):
        pytest.skip("needs games or a server; see test_text_world and test_web_shop")
    if env_id == "AgentR1/ScienceWorld-v0":
        pytest.skip("a reset takes a second; see test_science_world")
    kwargs = {"data": data_files[env_id]} if env_id in data_files else {}
    if env_id == "AgentR1/TextWorld-v0":
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    if env_id in TURNS_IN_A_SANDBOX:
        request.getfixturevalue("strong_sandbox")
        kwargs["max_episode_steps"] = TURNS_IN_A_SANDBOX[env_id]
    try:
        env = gym.make(env_id, **kwargs)
    except MissingExtraError as error:
        pytest.skip(str(error))
    with env:
        check_ways(env, SPECS[env_id])


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
