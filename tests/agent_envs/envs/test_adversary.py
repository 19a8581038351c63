"""The environment in which a model attacks an agent by editing what its tools say."""

import re

import gymnasium as gym
import pytest

from agent_envs.envs.synthetic.adversary import read_facts
from tests.agent_envs.envs.playing import call, solve


def start(task=0, **kwargs):
    env = gym.make("AgentR1/AdversarialEdits-v0", **kwargs)
    question, _ = env.reset(seed=0, options={"task": task})
    return env, question


def give_up(messages):
    return "<answer>nothing</answer>"


def test_the_reading_agent_solves_every_world_without_edits():
    env = gym.make("AgentR1/SyntheticMultiHop-v0", hops=[1, 2, 3], split="test")
    for task in range(3):
        _, info = env.reset(seed=0, options={"task": task})
        is_over = False
        while not is_over:
            *_, terminated, truncated, info = env.step(read_facts(info["messages"]))
            is_over = terminated or truncated
        assert info["metrics"]["success"] == 1.0


def test_one_edit_makes_it_fail_and_costs_a_tenth():
    for task in range(3):
        env, _ = start(task)
        total, info = solve(env, task)
        assert total == pytest.approx(0.9)
        assert info["metrics"]["success"] == 1.0


def test_edits_beyond_the_budget_or_of_missing_words_are_errors():
    env, question = start(budget=1)
    assert "edits left : 1" in question
    observation, reward, *_ = call(env, "replace", old="no such words", new="x")
    assert "do not stand in the result" in observation
    assert reward == 0.0
    observation, reward, *_ = call(env, "insert", sentence="it is not so .")
    assert "it is not so .\n" in observation
    assert reward == pytest.approx(-0.1)
    observation, reward, *_ = call(env, "misspell", word="island")
    assert "No edits are left" in observation
    assert reward == 0.0


def test_an_agent_that_fails_without_edits_earns_nothing():
    env, _ = start(victim=f"{__name__}:give_up")
    assert env.unwrapped.is_finished()
    *_, info = call(env, "release")
    assert info["metrics"]["success"] == 0.0


@pytest.mark.timeout(30)
def test_the_reading_agent_does_not_follow_a_fact_that_leads_back_to_itself():
    env, question = start()
    wanted = re.search(r"the (\w+ of \w+ \w+) \?", question)[1]
    call(env, "insert", sentence=f"the {wanted} is the {wanted} .")
    assert "the agent is done" in call(env, "release")[0]
