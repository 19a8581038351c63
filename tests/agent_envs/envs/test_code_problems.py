import gymnasium as gym
import pytest

from agent_envs.envs.code.problems import entry_points
from agent_envs.errors import SandboxError
from agent_envs.sandbox import Sandbox
from tests.agent_envs.envs import playing
from tests.agent_envs.envs.playing import call

HUMANEVAL = "AgentR1/HumanEval-v0"
MBPP = "AgentR1/MBPP-v0"
RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return x + 2\n"


@pytest.fixture
def make_env(data_files, strong_sandbox):
    def make(env_id=MBPP, task=0, **kwargs):
        return playing.make(env_id, task, data=data_files[env_id], max_episode_steps=20, **kwargs)

    return make


def success(env, program):
    return playing.answer(env, program)[4]["metrics"]["success"]


def test_a_program_is_run_tested_repaired_and_answered(make_env):
    env = make_env(rewards={"passed": 1.0, "public_tests": 0.1, "repair": 0.1})
    assert call(env, "run_code", code="print(6 * 7)")[0] == "42"
    observation, _, _, _, info = call(env, "run_tests", code="def double(x): return x**3")
    assert "FAILED" in observation
    assert observation.endswith("0 of 1 passed.")
    assert info["reward_terms"]["public_tests"] == 0.0
    _, _, _, _, info = call(env, "run_tests", code=RIGHT)
    assert info["reward_terms"]["public_tests"] == pytest.approx(0.1)
    assert info["reward_terms"]["repair"] == pytest.approx(0.1)
    # what has been earned is not earned again
    terms = call(env, "run_tests", code=RIGHT)[4]["reward_terms"]
    assert terms["public_tests"] == terms["repair"] == 0.0
    assert success(env, f"Here it is:\n```python\n{RIGHT}```\nDone.") == 1.0
    env.reset(options={"task": 0})
    assert "1 of 1 passed." in call(env, "run_tests", code=WRONG)[0]  # there are hidden tests too
    assert success(env, WRONG) == 0.0


CHEATS = [  # of all that the sandbox is tested with
    "pass",
    "import os; os._exit(0)",
    "print('1 of 1 passed.')\ndef double(x): print('passed')",
    "class Yes:\n    def __eq__(self, other): return True\ndef double(x): return Yes()",
]


def test_a_program_that_is_empty_wrong_or_cheats_scores_nothing(make_env):
    env = make_env()
    for program in CHEATS:
        env.reset(seed=0)
        _, reward, terminated, _, info = playing.answer(env, program)
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
        assert success(make_env(HUMANEVAL), body) == 1.0
    body = "def add_one(values):\n    return [helper(x) for x in values]\n"
    assert success(make_env(HUMANEVAL), body) == 1.0  # the helper stands in the given text
    assert task.data["public_tests"] == ("assert add_one([1, 2]) == [2, 3]",)


def test_a_result_says_why_a_program_was_stopped(make_env):
    env = make_env()
    observation, _, _, _, info = call(env, "run_code", code="print('x' * 10**7)")
    assert observation.endswith("[stopped: it wrote more than 6000 characters]")
    assert call(env, "run_code", code="raise SystemExit(3)")[0] == "[exit code 3]"
    assert call(env, "run_code", code="")[0] == "[no output]"
    assert info["metrics"]["num_failed_runs"] == 1.0


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
        assert success(env, program) == 0.0


@pytest.mark.parametrize(
    ("solution", "tests", "names"),
    [
        ("def encode(s): 0\ndef decode(s): 0", "assert decode(encode('a')) == 'a'", ["decode"]),
        ("def add(a): 0\ndef sub(a): 0", "assert add(1) == 2\nassert sub(1) == 0", ["add", "sub"]),
        ("def f(n): 0\nclass Node: 0", "root = Node(1)\nassert f(root)", ["f"]),
        ("PI = 3\narea = lambda r: 0", "for r in (1, 2): assert area(r) == PI * r", ["area"]),
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
        observation, *_ = call(env, "run_tests", code=RIGHT)
        assert observation.endswith("0 of 1 passed.")
        _, reward, terminated, _, info = playing.answer(env, RIGHT)
        assert terminated
        assert (reward, info["metrics"]["success"]) == (0.0, 0.0)
        patch.setattr(Sandbox, "run_python", break_down)
        env.reset(seed=0)
        assert call(env, "run_code", code="1")[4]["action"]["error"] == "tool_error"
        with pytest.raises(SandboxError):  # nothing runs here, so there is nothing to be scored
            playing.answer(env, RIGHT)
    assert success(make_env(), RIGHT) == 1.0
