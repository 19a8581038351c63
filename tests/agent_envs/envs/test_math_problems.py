import json

import gymnasium as gym
import pytest

from agent_envs import DataError, UnknownNameError, tool
from tests.conftest import GSM8K_ROWS

GSM8K = "AgentR1/GSM8K-v0"
MATH = "AgentR1/MATH-v0"


@pytest.fixture
def env(data_files):
    env = gym.make(GSM8K, data=data_files[GSM8K], rewards={
        "correct": 1.0, "intermediate_value": 0.5, "used_result": 0.1,
    })  # fmt: skip
    env.reset(options={"task": 0})
    return env


def calculate(env, expression):
    return env.step(env.unwrapped.write_call("calculator", expression=expression))


def test_found_values_and_used_results_are_rewarded(env):
    # Each of 3 children has 4 red and 5 blue balls: <<4+5=9>> <<9*3=27>>
    observation, _, _, _, info = calculate(env, "4 + 5")
    assert observation == "9"
    assert info["reward_terms"] == {"correct": 0.0, "intermediate_value": 0.25, "used_result": 0.0}
    terms = calculate(env, "9 * 3")[4]["reward_terms"]
    assert terms == {"correct": 0.0, "intermediate_value": 0.25, "used_result": 0.1}
    # the same again earns nothing
    assert sum(calculate(env, "9 * 3")[4]["reward_terms"].values()) == 0.0
    _, _, terminated, _, info = env.step(env.unwrapped.write_answer("27"))
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
        env = gym.make(GSM8K, data=data_files[GSM8K], tools=[count], max_episode_steps=40)
        env.reset(options={"task": 0})
        for name, arguments in calls:
            info = env.step(env.unwrapped.write_call(name, **arguments))[4]
        return info["metrics"]["intermediate_value_recall"]

    # 4 red and 5 blue balls are 9, of 3 children 27
    assert recall(("calculator", {"expression": "9 + 18"})) == 0.5
    assert recall(("count", {"last": 1_600})) == 0.0
    assert recall(("calculator", {"expression": "27"})) == 0.0  # what a call says is not found
    steps = [("count", {"first": n, "last": n + 4}) for n in range(20, 1_000, 5)]
    assert recall(*steps[5:30], *steps[:3]) == 0.0


def test_a_wrong_answer_and_numbers_of_the_question_earn_nothing(env):
    calculate(env, "3 + 0")
    assert calculate(env, "3 * 1")[4]["reward_terms"]["used_result"] == 0.0
    _, reward, _, _, info = env.step(env.unwrapped.write_answer("9 27"))
    assert reward == info["metrics"]["success"] == 0.0


def test_variables_of_the_python_tool_are_kept_during_the_episode(data_files, strong_sandbox):
    env = gym.make(GSM8K, data=data_files[GSM8K], tools=["python"])
    env.reset(seed=0)

    def python(code):
        return env.step(env.unwrapped.write_call("python", code=code))

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
    hard = gym.make(MATH, data=data_files[MATH], levels=5, subjects=["Geometry"]).unwrapped
    assert [task.answers[0] for task in map(hard.get_task, range(hard.num_tasks))] == ["7"]
    with pytest.raises(UnknownNameError, match=r"Unknown level '3'\. Available: 2, 5"):
        gym.make(MATH, data=data_files[MATH], levels=[3])


@pytest.mark.parametrize(
    ("env_id", "row", "message"),
    [
        (GSM8K, GSM8K_ROWS[0] | {"answer": "It is 27."}, "row 1: field 'answer' must end with"),
        (MATH, {"problem": "?", "solution": "no box"}, "row 1: there is no answer"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, env_id, row, message):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        gym.make(env_id, data=str(path))


@pytest.mark.parametrize(
    ("env_id", "name"),
    [(GSM8K, "gsm8k_test.jsonl"), (MATH, "math500_test.jsonl")],
)
def test_reference_actions_solve_real_rows(shared_data, env_id, name):
    env = gym.make(env_id, data=str(shared_data / name))
    for task in range(0, env.unwrapped.num_tasks, 25):
        env.reset(options={"task": task})
        for action in env.unwrapped.reference_actions():
            _, _, terminated, _, info = env.step(action)
        assert terminated
        assert info["metrics"]["success"] == info["metrics"].get("official_match", 1.0) == 1.0
