import os
import signal

import gymnasium as gym
import pytest

from agent_envs import MissingExtraError, UnknownNameError
from agent_envs.envs.games.java_games import shared_engine
from agent_envs.envs.games.science_world import SIMULATOR
from tests.agent_envs.envs.playing import call, java_engine

ID = "AgentR1/ScienceWorld-v0"
TASK = "find-non-living-thing"  # the shortest
_java = java_engine(SIMULATOR)


def make(task=TASK, index=0, **kwargs):
    env = gym.make(ID, task=task, **kwargs)
    env.reset(options={"task": index})
    return env


def act(env, command):
    return call(env, "act", command=command)


def test_the_packages_solution_reaches_100():
    env = make(split="test", variations=1)
    outcomes = [env.step(action) for action in env.unwrapped.reference_actions()]
    assert [outcome[2] for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]
    info = outcomes[-1][4]
    assert info["metrics"]["success"] == info["metrics"]["score"] == 1.0
    assert info["reward_terms"]["solved"] == 1.0
    gains = [outcome[4]["reward_terms"]["score_gain"] for outcome in outcomes]
    assert sum(gains) == pytest.approx(1.0)


def test_detours_and_starting_over_earn_nothing():
    env = make()
    actions = env.unwrapped.reference_actions()
    extra = [env.unwrapped.write_call("act", command=text) for text in ("wait1", "reset task")]
    earned = []
    for steps in (actions, [*extra, actions[0], *extra, *actions]):
        env.reset(options={"task": 0})
        outcomes = [env.step(action) for action in steps]
        assert outcomes[-1][2]
        earned.append(sum(outcome[1] for outcome in outcomes))
    assert earned == pytest.approx([2.0, 2.0])


def test_a_wrong_focus_loses_the_game():
    env = make("find-animal")
    act(env, "look around")
    text, _, terminated, _, info = act(env, "focus on air")
    assert terminated, text
    assert info["metrics"] | {"success": 0.0, "score": -1.0} == info["metrics"]
    assert info["reward_terms"]["score_gain"] == -1.0
    assert info["reward_terms"]["solved"] == 0.0


def test_strange_commands_are_observations():
    env = make()
    for command in ("", "\x00", "\ud800", "é漢字🙂", "1", "open a\nopen b", "go to " * 50):
        text, *_, info = act(env, command)
        assert text
        assert "error" not in info["action"]
    assert act(env, "x" * 501)[4]["action"]["error"] == "tool_error"


def run(env, actions):
    return [env.unwrapped.step(action) for action in actions]


def test_snapshots_resume_identically():
    env = make("chemistry-mix", index=1)
    actions = env.unwrapped.reference_actions()
    run(env, actions[:4])
    base = env.unwrapped
    other = make("chemistry-mix", index=0)
    other.unwrapped.restore(base.snapshot())
    games = [base, other.unwrapped]
    shown = [[game.step(action) for game in games] for action in actions[4:9]]  # interleaved
    assert all(outcome == outcomes[0] for outcomes in shown for outcome in outcomes)


def test_a_dead_java_process_is_replaced():
    env, twin = make(), make()
    actions = env.unwrapped.reference_actions()
    expected = run(twin, actions)
    run(env, actions[:2])
    process = shared_engine(SIMULATOR)._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert run(env, actions[2:]) == expected[2:]
    assert shared_engine(SIMULATOR)._process.pid != process.pid


def test_wrong_arguments_are_errors(monkeypatch):
    with pytest.raises(UnknownNameError, match="boil"):
        gym.make(ID, task="boyl")
    with pytest.raises(UnknownNameError, match="openDoors"):
        gym.make(ID, simplifications="openDors")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(MissingExtraError, match="default-jre-headless"):
        gym.make(ID)
