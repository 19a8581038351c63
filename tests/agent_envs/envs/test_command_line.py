import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.envs.shell.command_line import make_shell_task
from agent_envs.envs.shell.tasks import KINDS
from agent_envs.errors import SandboxError
from agent_envs.sandbox import Sandbox
from agent_envs.tools.code import BROKEN_TEXT

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


def test_folders_rights_links_and_odd_names_last_from_command_to_command():
    env = gym.make(ID, kinds="rename")
    env.reset(seed=0)
    shell = env.unwrapped.shell
    shell("mkdir -p out/empty; printf 'echo ran' > r.sh; chmod 750 r.sh; ln -s r.sh s; ln r.sh h")
    assert shell("ls -d out/empty; ./r.sh; readlink s; stat -c '%a %h' r.sh; ./s").split() == [
        "out/empty", "ran", "r.sh", "750", "2", "ran",
    ]  # fmt: skip
    shell("i=0; while [ $i -lt 300 ]; do mkdir d && cd d; i=$((i+1)); done; echo deep > f")
    assert shell("find d -name f -exec cat {} +") == "deep"
    shell("rm -r d; touch \"$(printf '\\377')\" \"$(printf '\\376 \\n*')\"")
    assert {"\\377", "\\376\\ \\n*"} <= set(shell("ls -b").splitlines())
    assert shell("truncate -s 15M sparse; ln -s nowhere broken; mkfifo p") == "[no output]"
    assert shell("stat -c %s sparse; readlink broken; [ -p p ] && echo pipe") == (
        "15728640\nnowhere\npipe"
    )


def test_a_file_that_must_be_gone_is_not_gone_as_a_folder_or_a_link():
    env = gym.make(ID, kinds="merge")
    *commands, done = env.unwrapped.reference_actions() if env.reset(seed=0) else ()
    for damage in ("mkdir ours.conf", "ln -s merged.conf ours.conf", "true"):
        env.reset(seed=0)
        for action in commands:
            env.step(action)
        env.unwrapped.shell(damage)
        assert env.step(done)[4]["metrics"]["success"] == float(damage == "true")


def test_a_command_that_breaks_its_sandbox_is_an_observation(monkeypatch):
    env = gym.make(ID, kinds="merge")
    env.reset(seed=0)
    env.unwrapped.shell("echo 1 > kept")

    def break_down(*_, **__):
        raise SandboxError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "run_shell", break_down)
        observation, *_, info = env.step(env.unwrapped.write_call("shell", command="rm kept"))
    assert BROKEN_TEXT in observation
    assert "error" not in info["action"]
    assert env.unwrapped.shell("cat kept") == "1"


def test_an_episode_goes_on_from_a_snapshot_and_in_a_copy():
    env = gym.make(ID, kinds="undo").unwrapped
    env.reset(seed=3)
    env.shell("mkdir empty; echo 1 > x; chmod 700 x; ln -s x l")
    saved, copied = env.snapshot(), pickle.loads(pickle.dumps(env))
    env.shell("rm -rf *")
    env.restore(saved)
    for one in (env, copied, copy.deepcopy(env)):
        assert one.shell("ls -d empty; stat -c %a x; cat l") == "empty\n700\n1"


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
