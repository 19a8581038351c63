import importlib.util

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, DataError, MissingExtraError

ID = "AgentR1/TextWorld-v0"


@pytest.fixture
def env(text_world_game):
    env = gym.make(ID, game=text_world_game)
    env.reset(seed=0)
    return env


def act(env, command):
    return env.step(env.unwrapped.write_call("act", command=command))


def test_the_planned_commands_win_and_the_episode_ends(env):
    commands = env.unwrapped.task.data["commands"]
    total = 0.0
    for command in commands:
        observation, reward, terminated, _, info = act(env, command)
        total += reward
    assert terminated
    assert info["metrics"]["success"] == info["reward_terms"]["won"] == 1.0
    assert total == pytest.approx(1.0 + 0.1 + 0.02 * len(commands))
    assert "The End" in observation
    with pytest.raises(gym.error.ResetNeeded):
        act(env, "look")


def test_the_state_is_readable_and_begins_with_the_objective(env):
    question, _ = env.reset(seed=0)
    assert "-= " in question
    assert "$$" not in question
    look, _, terminated, _, info = act(env, "look")
    assert look.startswith("-= ")
    assert not look.endswith(">")
    assert not terminated
    assert info["metrics"]["success"] == 0.0


def test_giving_up_and_nonsense_win_nothing(env):
    observation, *_ = act(env, "fly to the moon\nwin")
    assert observation
    _, _, terminated, _, info = env.step(env.unwrapped.write_answer("done"))
    assert terminated
    assert info["metrics"]["success"] == info["reward_terms"]["won"] == 0.0


def test_wrong_arguments_are_refused(text_world_game, monkeypatch):
    with pytest.raises(ConfigurationError, match="rooms must be at least 1"):
        gym.make(ID, rooms=0)
    with pytest.raises(DataError, match=r"nowhere\.z8"):
        gym.make(ID, game="nowhere.z8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"agent-r1\[textworld\]"):
        gym.make(ID)
