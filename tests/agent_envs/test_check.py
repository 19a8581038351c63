import os
import subprocess
import sys

import pytest

from agent_envs.check import main

ID = "AgentR1/SyntheticTable-v0"
OWN = """
import gymnasium as gym
from agent_envs import Task, ToolEnv

class Own(ToolEnv):
    num_tasks = 2
    def get_task(self, index):
        return Task(id=str(index), question=f"Say {index}.", answers=(str(index),))
    def reference_actions(self):
        return [self.write_answer(self.task.answers[0])]
    def metrics(self):
        return {"success": float(self.answer in self.task.answers), **super().metrics()}

class Slip(Own):
    def reference_actions(self):
        return [self.write_answer("-1")]

gym.register("Mine/Own-v0", "own_env:Own", max_episode_steps=3)
gym.register("Mine/Slip-v0", "own_env:Slip", max_episode_steps=3)
"""


def run(folder, *arguments):
    (folder / "own_env.py").write_text(OWN)
    command = [sys.executable, "-m", "agent_envs.check", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)


def test_an_environment_outside_the_repository_is_checked_a_line_per_check(tmp_path):
    result = run(tmp_path, "own_env:Mine/Own-v0")
    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert lines[0] == "ok   gymnasium: check_env has no complaint"
    assert lines[-1] == "ok   processes: byte for byte, with another PYTHONHASHSEED"
    assert len(lines) == 12


def test_a_failure_is_a_line_and_the_exit_code(tmp_path):
    result = run(tmp_path, "own_env:Mine/Slip-v0", "--episodes", "1", "--seed", "5")
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if line.startswith("FAIL")] == [
        "FAIL reference actions: seed 5: after the reference actions success=0.0"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["AgentR1/Nothing-v0"], "Environment `Nothing` doesn.t exist"),
        (["no_such_module:Own-v0"], "No module named 'no_such_module'"),
        ([ID, "--kwargs", '{"steps": 9}'], "steps must be 1 to 3, not 9"),
        ([ID, "--kwargs", '{"dat": 1}'], "unexpected keyword argument 'dat'"),
        ([ID, "--kwargs", "[]"], "must be a JSON object"),
        ([ID, "--kwargs", "{"], "--kwargs is not valid JSON"),
    ],
)
def test_what_cannot_be_made_is_one_line(arguments, message):
    with pytest.raises(SystemExit, match=f"^check: .*{message}"):
        main(arguments)
