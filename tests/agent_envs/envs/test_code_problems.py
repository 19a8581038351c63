import json

import gymnasium as gym
import pytest

from agent_envs import DataError
from agent_envs.envs.code.problems import entry_points
from agent_envs.errors import SandboxError
from agent_envs.sandbox import Sandbox
from tests.conftest import HUMANEVAL_ROWS, MBPP_ROWS

HUMANEVAL = "AgentR1/HumanEval-v0"
MBPP = "AgentR1/MBPP-v0"
RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return x + 2\n"


@pytest.fixture
def make_env(data_files, strong_sandbox):
    def make(env_id=MBPP, task=0, **kwargs):
        env = gym.make(env_id, data=data_files[env_id], max_episode_steps=20, **kwargs)
        env.reset(options={"task": task})
        return env

    return make


def call(env, name, code):
    return env.step(env.unwrapped.write_call(name, code=code))


def answer(env, program):
    return env.step(env.unwrapped.write_answer(program))[4]["metrics"]["success"]


def test_a_program_is_run_tested_repaired_and_answered(make_env):
    env = make_env(rewards={"passed": 1.0, "public_tests": 0.1, "repair": 0.1})
    assert call(env, "run_code", "print(6 * 7)")[0] == "42"
    observation, _, _, _, info = call(env, "run_tests", "def double(x):\n    return x * x * x\n")
    assert "FAILED" in observation
    assert observation.endswith("0 of 1 passed.")
    assert info["reward_terms"]["public_tests"] == 0.0
    _, _, _, _, info = call(env, "run_tests", RIGHT)
    assert info["reward_terms"]["public_tests"] == pytest.approx(0.1)
    assert info["reward_terms"]["repair"] == pytest.approx(0.1)
    # what has been earned is not earned again
    terms = call(env, "run_tests", RIGHT)[4]["reward_terms"]
    assert terms["public_tests"] == terms["repair"] == 0.0
    assert answer(env, RIGHT) == 1.0


def test_the_public_tests_are_not_all_there_are(make_env):
    env = make_env()
    assert "1 of 1 passed." in call(env, "run_tests", WRONG)[0]
    assert answer(env, WRONG) == 0.0


def test_the_answer_may_be_fenced(make_env):
    assert answer(make_env(), f"Here it is:\n```python\n{RIGHT}```\nDone.") == 1.0


CHEATS = [
    "pass",
    "not python",
    "import os; os._exit(0)",
    "import sys\ndef double(x): sys.exit(0)",
    "print('1 of 1 passed.')\ndef double(x): print('passed')",
    "class Yes:\n    def __eq__(self, other): return True\ndef double(x): return Yes()",
    "class Int(int):\n    def __eq__(self, other): return True\ndef double(x): return Int(0)",
    "import builtins\nbuiltins.AssertionError = None\ndef double(x): return None",
    "def double(x):\n    while True: pass",
]


def test_a_program_that_is_empty_wrong_or_cheats_scores_nothing(make_env):
    env = make_env()
    for program in CHEATS:
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step(env.unwrapped.write_answer(program))
        assert terminated
        assert info["metrics"]["success"] == info["reward_terms"]["passed"] == 0.0
        assert reward <= 0.02


def test_a_function_or_its_body_alone_completes_humaneval(make_env):
    task = make_env(HUMANEVAL).unwrapped.task
    for body in (
        "    return [x + 1 for x in values]\n",
        "result = [x + 1 for x in values]\n    return result",
        "result = []\nfor x in values:\n    result.append(x + 1)\nreturn result",
    ):
        assert answer(make_env(HUMANEVAL), body) == 1.0
    body = "def add_one(values):\n    return [helper(x) for x in values]\n"
    assert answer(make_env(HUMANEVAL), body) == 1.0  # the helper stands in the given text
    assert task.data["public_tests"] == ("assert add_one([1, 2]) == [2, 3]",)


def test_a_result_says_why_a_program_was_stopped(make_env):
    env = make_env()
    observation, _, _, _, info = call(env, "run_code", "print('x' * 10**7)")
    assert observation.endswith("[stopped: it wrote more than 6000 characters]")
    assert call(env, "run_code", "raise SystemExit(3)")[0] == "[exit code 3]"
    assert call(env, "run_code", "")[0] == "[no output]"
    assert info["metrics"]["num_failed_runs"] == 1.0


@pytest.mark.parametrize(
    ("env_id", "row", "message"),
    [
        (MBPP, MBPP_ROWS[0] | {"test_list": []}, "row 1: field 'test_list'"),
        (HUMANEVAL, HUMANEVAL_ROWS[0] | {"test": ""}, "row 1: field 'test'"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, env_id, row, message):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        gym.make(env_id, data=str(path))


@pytest.mark.parametrize(
    ("env_id", "name"), [(HUMANEVAL, "humaneval_test.jsonl"), (MBPP, "mbpp.jsonl")]
)
def test_reference_solutions_pass_on_real_rows(shared_data, strong_sandbox, env_id, name):
    env = gym.make(env_id, data=str(shared_data / name))
    for task in range(0, env.unwrapped.num_tasks, 60):  # every row takes a minute
        env.reset(options={"task": task})
        *_, info = env.step(env.unwrapped.reference_actions()[-1])
        assert info["metrics"]["success"] == 1.0, info["task_id"]


def test_helpers_of_the_tests_are_the_references(shared_data, strong_sandbox):
    env = gym.make(HUMANEVAL, data=str(shared_data / "humaneval_test.jsonl"))
    tasks = [env.unwrapped.get_task(i).id for i in range(env.unwrapped.num_tasks)]
    for name, program in (
        ("HumanEval/32", "def poly(xs, x): return 0\ndef find_zero(xs): return 0.0"),
        ("HumanEval/32", "def find_zero(xs): return float('nan')"),
        ("HumanEval/38", "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s"),
        ("HumanEval/50", "def encode_shift(s): return s\ndef decode_shift(s): return s"),
    ):
        env.reset(options={"task": tasks.index(name)})
        assert answer(env, program) == 0.0


@pytest.mark.parametrize(
    ("solution", "tests", "names"),
    [
        ("def encode(s): 0\ndef decode(s): 0", "assert decode(encode('a')) == 'a'", ["decode"]),
        ("def is_close(a, b): 0\ndef f(x): 0", "assert is_close(f(2), 4)", ["f"]),
        ("def add(a): 0\ndef sub(a): 0", "assert add(1) == 2\nassert sub(1) == 0", ["add", "sub"]),
        ("def f(n): 0\nclass Node: 0", "root = Node(1)\nassert f(root)", ["f"]),
        ("class Stack: 0", "s = Stack()\nassert s.pop() is None", ["Stack"]),
        ("PI = 3\narea = lambda r: 0", "for r in (1, 2): assert area(r) == PI * r", ["area"]),
        ("def f(x): 0", "assert other(2)", []),
        ("def f(x): 0", "assert (", []),
    ],
)
def test_only_the_entry_point_is_taken_from_the_program(solution, tests, names):
    assert entry_points(solution, tests) == names


def test_a_program_that_breaks_the_sandbox_has_failed(make_env, monkeypatch):
    def break_down(*_, **__):
        raise SandboxError("broken")

    env = make_env()
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "check_python", break_down)
        observation, *_ = call(env, "run_tests", RIGHT)
        assert observation.endswith("0 of 1 passed.")
        _, reward, terminated, _, info = env.step(env.unwrapped.write_answer(RIGHT))
        assert terminated
        assert (reward, info["metrics"]["success"]) == (0.0, 0.0)
        patch.setattr(Sandbox, "run_python", break_down)
        env.reset(seed=0)
        assert call(env, "run_code", "1")[4]["action"]["error"] == "tool_error"
        with pytest.raises(SandboxError):  # nothing runs here, so there is nothing to be scored
            env.step(env.unwrapped.write_answer(RIGHT))
    assert answer(make_env(), RIGHT) == 1.0
