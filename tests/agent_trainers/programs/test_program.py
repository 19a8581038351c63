import math

import numpy as np
import pytest

from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_trainers.programs.program import (
    REWARDS,
    Outcome,
    ProgramSession,
    find_program,
    find_reward,
    read_outcome,
)

SESSION = ProgramSession(base_url="http://127.0.0.1:8000/v1", key="k1", seed=3)


@pytest.mark.parametrize(
    ("returned", "reward", "metrics"),
    [
        pytest.param(1, 1.0, {"success": 1.0}, id="number"),
        pytest.param(np.float32(0.5), 0.5, {"success": 1.0}, id="numpy"),
        pytest.param(False, 0.0, {"success": 0.0}, id="bool"),
        pytest.param(Outcome(reward=-1.0), -1.0, {"success": 0.0}, id="outcome"),
        pytest.param(
            {"reward": 0.3, "metrics": {"success": 0, "f1": 0.3}},
            0.3,
            {"success": 0.0, "f1": 0.3},
            id="json",
        ),
        pytest.param(
            Outcome(reward={"solver": 1.0, "critic": -0.5}),
            {"solver": 1.0, "critic": -0.5},
            {"success": 1.0},
            id="roles",
        ),
    ],
)
def test_what_a_program_returns_is_a_reward_with_metrics(returned, reward, metrics):
    outcome = read_outcome(returned)
    assert outcome.reward == reward
    assert outcome.metrics == metrics


@pytest.mark.parametrize(
    "returned",
    [
        *(None, "1.0", math.nan, math.inf, 1e300, 10**400, 1j, [1.0], {}, {"rewards": 1}),
        Outcome(reward=None),
        Outcome(reward={}),
        Outcome(reward={"solver": math.nan}),
        Outcome(reward={"solver": -1e300}),
        Outcome(reward=1.0, metrics={"f1": "high"}),
        Outcome(reward=1.0, metrics={1: 0.5}),
        {"reward": 1.0, "metrics": 3},
        {"reward": 1.0, "note": "more than an outcome"},
    ],
)
def test_what_is_no_outcome_is_an_error_that_says_what_it_must_be(returned):
    with pytest.raises(TypeError, match=r"must|returns a finite number"):
        read_outcome(returned)


def test_a_role_has_a_key_of_its_own_and_a_wrong_name_is_refused():
    planner = SESSION.role("planner")
    assert (planner.base_url, planner.key) == (SESSION.base_url, "k1.planner")
    assert planner.role("critic-2").key == "k1.critic-2"  # a role of the session, not of the role
    for name in ("", "a.b", "a b", "ä", "-", "a\n"):
        with pytest.raises(ConfigurationError, match="Invalid role name"):
            SESSION.role(name)


def test_rewards_of_answers_are_the_official_scores():
    task = {"answers": ["The Quill", "pen"]}
    assert find_reward("exact_match")(task, "quill") == 1.0
    assert find_reward("exact_match")({"answer": 4}, 4) == 1.0
    overlap = find_reward("f1")(task, "a quill , or so")
    # 1 of 3 words ("a" is no word of the score) and all of the gold's 1: 2 * (1/3) / (4/3)
    assert overlap.reward == pytest.approx(0.5)
    assert overlap.metrics["success"] == 0.0
    assert find_reward("math")({"answer": "1/2"}, "0.5") == 1.0
    for reward in REWARDS.values():
        assert read_outcome(reward(task, None)).reward == 0.0
        with pytest.raises(KeyError, match="'answer'"):
            reward({"question": "?"}, "x")


def test_programs_and_rewards_are_found_by_name_or_import_path():
    assert find_reward("math:isclose") is math.isclose
    with pytest.raises(UnknownNameError, match="exact_match"):
        find_reward("exactmatch")
    with pytest.raises(UnknownNameError, match="cannot be imported"):
        find_program("no_such_module:run")
