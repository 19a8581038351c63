import importlib.util
import random

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, MissingExtraError, UnknownNameError

pytest.importorskip("reasoning_gym")
ID = "AgentR1/ReasoningGym-v0"


@pytest.mark.parametrize("task", ["leg_counting", "basic_arithmetic", "word_sorting", "sokoban"])
def test_the_reference_answer_has_a_full_score_and_others_have_not(task):
    env = gym.make(ID, task=task)
    for seed in range(3):
        env.reset(seed=seed)
        (answer,) = env.unwrapped.reference_actions()
        _, reward, terminated, _, info = env.step(answer)
        assert terminated
        assert reward == pytest.approx(1.0)
        assert info["metrics"]["success"] == 1.0
        env.reset(seed=seed)
        info = env.step(env.unwrapped.write_answer("nothing of the kind"))[4]
        assert info["metrics"]["success"] == 0.0


def test_a_seed_gives_the_same_task_and_leaves_pythons_generator_alone():
    def question(split="train"):
        return gym.make(ID, task="word_sorting", split=split).reset(seed=5)[0]

    random.seed(1)
    expected = random.random()
    random.seed(1)
    assert question() == question() != question("test")
    assert random.random() == expected


def test_a_calculator_is_there_on_demand():
    env = gym.make(ID, tools=["calculator"])
    env.reset(seed=0)
    assert env.step(env.unwrapped.write_call("calculator", expression="6 * 7"))[0] == "42"
    assert gym.make(ID).unwrapped.tools == {}


def test_what_is_unknown_is_refused(monkeypatch):
    with pytest.raises(UnknownNameError, match="leg_counting"):
        gym.make(ID, task="leg_countin")
    for kwargs in ({"nothing": 1}, {"min_animals": -3}):
        with pytest.raises(ConfigurationError, match="task_kwargs of 'leg_counting'"):
            gym.make(ID, task_kwargs=kwargs)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"agent-r1\[reasoning\]"):
        gym.make(ID)
