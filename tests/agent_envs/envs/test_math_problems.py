import gymnasium as gym
import pytest

from agent_envs import UnknownNameError, tool
from tests.agent_envs.envs.playing import answer, call, make

GSM8K = "AgentR1/GSM8K-v0"
MATH = "AgentR1/MATH-v0"


@pytest.fixture
def env(data_files):
    rewards = {"correct": 1.0, "intermediate_value": 0.5, "used_result": 0.1}
    return make(GSM8K, data=data_files[GSM8K], rewards=rewards)


def test_found_values_and_used_results_are_rewarded(env):
    # Each of 3 children has 4 red and 5 blue balls: <<4+5=9>> <<9*3=27>>
    observation, _, _, _, info = call(env, "calculator", expression="4 + 5")
    assert observation == "9"
    assert info["reward_terms"] == {"correct": 0.0, "intermediate_value": 0.25, "used_result": 0.0}
    terms = call(env, "calculator", expression="9 * 3")[4]["reward_terms"]
    assert terms == {"correct": 0.0, "intermediate_value": 0.25, "used_result": 0.1}
    # the same again earns nothing
    assert sum(call(env, "calculator", expression="9 * 3")[4]["reward_terms"].values()) == 0.0
    _, _, terminated, _, info = answer(env, "27")
    assert terminated
    assert info["reward_terms"] == {"correct": 1.0, "intermediate_value": 0.0, "used_result": 0.1}
    assert info["metrics"]["official_match"] == info["metrics"]["success"] == 1.0
    assert info["metrics"]["intermediate_value_recall"] == 1.0


@tool
def count(last: int, first: int = 0) -> str:
    """Count up to a number."""
    return " ".join(map(str, range(first, last + 1)))


def test_a_flood_of_numbers_finds_no_values(data_files):
    def recall(*calls):
        env = make(GSM8K, data=data_files[GSM8K], tools=[count], max_episode_steps=40)
        for name, arguments in calls:
            info = call(env, name, **arguments)[4]
        return info["metrics"]["intermediate_value_recall"]

    # 4 red and 5 blue balls are 9, of 3 children 27
    assert recall(("calculator", {"expression": "9 + 18"})) == 0.5
    assert recall(("count", {"last": 1_600})) == 0.0
    assert recall(("calculator", {"expression": "27"})) == 0.0  # what a call says is not found
    steps = [("count", {"first": n, "last": n + 4}) for n in range(20, 1_000, 5)]
    assert recall(*steps[5:30], *steps[:3]) == 0.0


def test_a_wrong_answer_and_numbers_of_the_question_earn_nothing(env):
    call(env, "calculator", expression="3 + 0")
    assert call(env, "calculator", expression="3 * 1")[4]["reward_terms"]["used_result"] == 0.0
    _, reward, _, _, info = answer(env, "9 27")
    assert reward == info["metrics"]["success"] == 0.0


def test_variables_of_the_python_tool_are_kept_during_the_episode(data_files, strong_sandbox):
    env = gym.make(GSM8K, data=data_files[GSM8K], tools=["python"])
    env.reset(seed=0)

    def python(code):
        return call(env, "python", code=code)

    assert python("balls = 4 + 5")[0] == "[no output]"
    observation, _, _, _, info = python("balls")
    assert observation == "9"
    assert info["reward_terms"]["intermediate_value"] == pytest.approx(0.05)
    assert "NameError" in python("undefined")[0]
    assert python("print(balls * 3)")[0] == "27"
    assert "a new one begins" in python("import os; os._exit(0)")[0]
    assert "NameError" in python("balls")[0]
    env.reset(seed=0)
    assert "NameError" in python("balls")[0]
    env.close()


def test_both_forms_of_math_load_and_are_filtered(data_files):
    env = gym.make(MATH, data=data_files[MATH]).unwrapped
    assert [env.get_task(i).answers[0] for i in range(2)] == [r"\frac{1}{2}", "7"]
    assert [env.get_task(i).data["level"] for i in range(2)] == [2, 5]
    hard = gym.make(MATH, data=data_files[MATH], levels=[5], subjects=["Geometry"]).unwrapped
    assert [task.answers[0] for task in map(hard.get_task, range(hard.num_tasks))] == ["7"]
    with pytest.raises(UnknownNameError, match=r"Unknown level '3'\. Available: 2, 5"):
        gym.make(MATH, data=data_files[MATH], levels=[3])
