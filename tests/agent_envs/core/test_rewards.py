"""Reward terms that several families share."""

from types import SimpleNamespace

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, format_term
from agent_envs.core.rewards import (
    COST,
    MAX_COUNTED_MISTAKES,
    NOTHING,
    OUTCOME,
    PROGRESS,
    SCORE,
    Progress,
    choose_terms,
    compute_terms,
    earnings_of,
)


@pytest.mark.parametrize(("num_mistakes", "expected"), [(1, -1.0), (10, -1.0), (11, 0.0)])
def test_the_first_ten_mistakes_cost_and_no_other(num_mistakes, expected):
    event = SimpleNamespace(action=SimpleNamespace(is_faultless=False))
    assert MAX_COUNTED_MISTAKES == 10
    assert format_term(SimpleNamespace(num_invalid_actions=num_mistakes), event) == expected


def test_progress_is_credited_once_and_not_what_is_done_at_the_start():
    progress = Progress(0.5)
    # 0.5 to 0.75 is half of what is left; falling back and returning earns nothing.
    assert [progress.advance(share) for share in (0.5, 0.75, 0.25, 0.75, 1.0)] == [
        0,
        0.5,
        0,
        0,
        0.5,
    ]
    assert Progress(1.0).advance(1.0) == 0.0


def test_the_range_of_a_return_is_the_sum_of_the_ranges_of_its_terms():
    terms = {"outcome": OUTCOME, "progress": PROGRESS, "format": COST, "none": NOTHING}
    weights = {"outcome": 1.0, "progress": 0.1, "format": 0.02, "none": 5.0}
    # ten mistakes cost 0.2; a failure may have made all progress
    assert earnings_of(weights, terms, solved=True) == pytest.approx((0.9, 1.1))
    assert earnings_of(weights, terms, solved=False) == pytest.approx((-0.2, 0.1))
    assert earnings_of({"progress": -1.0}, terms, solved=False) == (-1.0, 0.0)
    assert earnings_of({"score": 1.0}, {"score": SCORE}, solved=True) == (1.0, 1.0)
    low, high = earnings_of({"score": 1.0}, {"score": SCORE}, solved=False)
    assert low == 0.0
    assert 1 - 1e-15 < high < 1.0


def test_terms_are_chosen_by_name_or_function_and_weighted():
    functions = {"length": lambda env, event: 4.0, "unused": lambda env, event: 1.0}
    own = (lambda env, event: event, 0.5)
    chosen = choose_terms({"length": 0.25, "own": own, "unused": 0.0}, functions)
    assert compute_terms(None, 3.0, chosen) == {"length": 1.0, "own": 1.5}
    with pytest.raises(ValueError, match="'own' returned inf; it must be finite"):
        compute_terms(None, float("inf"), chosen)


def test_two_terms_of_one_name_are_refused():
    functions = {"minimum": lambda env, event: 1.0}
    with pytest.raises(ConfigurationError, match=r"rewards\['numpy:minimum'\]: there is another"):
        choose_terms({"minimum": 1.0, "numpy:minimum": 0.5}, functions)


def test_costs_of_calls_and_tokens_are_terms_of_any_environment():
    rewards = {
        "agent_envs.core.rewards:extra_call_term": 0.1,
        "agent_envs.core.rewards:token_cost_term": 1.0,
    }
    env = gym.make("AgentR1/SyntheticMultiHop-v0", rewards=rewards)
    env.reset(seed=0)
    call = env.unwrapped.write_call("search", query="Oslo")
    costs = [env.step(text)[4]["reward_terms"] for text in (call, f"{call}\n{call}", "x" * 400)]
    assert [cost["extra_call_term"] for cost in costs] == pytest.approx([-0.1, -0.2, 0.0])
    assert costs[2]["token_cost_term"] == -0.1  # 400 bytes are 100 tokens
