import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.envs.shell.tasks import KINDS, make_shell_task

ID = "AgentR1/CommandLine-v0"
pytestmark = pytest.mark.usefixtures("strong_sandbox")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_reference_commands_solve_every_kind_and_doing_nothing_does_not(kind, difficulty):
    env = gym.make(ID, kinds=kind, difficulty=difficulty)
    for task in range(4):
        env.reset(options={"task": task})
        *_, info = env.step(env.unwrapped.write_answer("done"))
        assert info["metrics"]["success"] == info["reward_terms"]["solved"] == 0.0
        env.reset(options={"task": task})
        total = 0.0
        for action in env.unwrapped.reference_actions():
            _, reward, terminated, _, info = env.step(action)
            total += reward
        assert terminated
        assert info["metrics"]["success"] == info["metrics"]["share_right"] == 1.0
        assert 1.0 < total <= 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_no_task_is_solved_from_the_beginning(kind):
    for seed in range(200):
        task = make_shell_task(np.random.default_rng(seed), kind, 1 + seed % 3)
        assert task.files != task.expected
        assert all(content.endswith("\n") for content in task.expected.values())


def test_every_command_begins_in_the_folder_and_the_state_lasts():
    env = gym.make(ID, kinds="rename")
    env.reset(seed=0)
    shell = env.unwrapped.shell
    assert shell("mkdir -p new && cd new && echo hello > a && pwd | grep -c new") == "1"
    assert shell("cat new/a; cat nothing").startswith("hello\n")
    assert "[exit code" in shell("exit 7")
    env.reset(seed=0)
    assert "No such file" in shell("cat new/a")


def test_damage_costs_the_success():
    env = gym.make(ID, kinds="extract")
    env.reset(options={"task": 0})
    *commands, done = env.unwrapped.reference_actions()
    for action in commands:
        env.step(action)
    env.step(env.unwrapped.write_call("shell", command="rm data/*.csv"))
    assert env.step(done)[4]["metrics"]["success"] == 0.0


def test_the_same_seed_gives_the_same_task_and_the_splits_differ():
    def question(split):
        return gym.make(ID, split=split).reset(seed=5)[0]

    assert question("train") == question("train") != question("test")


def test_what_is_unknown_or_out_of_range_is_refused():
    with pytest.raises(UnknownNameError, match="extract"):
        gym.make(ID, kinds=["extrakt"])
    with pytest.raises(ConfigurationError, match="difficulty is 1 to 3"):
        gym.make(ID, difficulty=4)
