import copy
import os
import pickle
import signal

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, MissingExtraError, UnknownNameError
from agent_envs.envs.games import science_engine

ID = "AgentR1/ScienceWorld-v0"
TASK = "find-non-living-thing"  # the shortest


@pytest.fixture(scope="module", autouse=True)
def _java():
    try:
        science_engine.require_java()
    except MissingExtraError as error:
        pytest.skip(str(error))
    yield
    for engine in science_engine._engines:
        engine.stop()


def make(task=TASK, index=0, **kwargs):
    env = gym.make(ID, task=task, **kwargs)
    env.reset(options={"task": index})
    return env


def act(env, command):
    return env.step(env.unwrapped.write_call("act", command=command))


@pytest.mark.parametrize("task", [TASK, "lifespan-longest-lived", "power-component"])
def test_the_packages_solution_reaches_100(task):
    env = make(task, split="test", variations=1)
    outcomes = [env.step(action) for action in env.unwrapped.reference_actions()]
    assert [outcome[2] for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]
    info = outcomes[-1][4]
    assert info["metrics"]["success"] == info["metrics"]["score"] == 1.0
    assert info["reward_terms"]["solved"] == 1.0
    gains = [outcome[4]["reward_terms"]["score_gain"] for outcome in outcomes]
    assert sum(gains) == pytest.approx(1.0)


def test_detours_earn_nothing():
    env = make()
    actions = env.unwrapped.reference_actions()
    detour = [env.unwrapped.write_call("act", command=command) for command in ("wait1", "task")]
    ways = {
        "shortest": actions,
        "detours": [*detour, actions[0], *detour, *actions],
        "starting over": [
            actions[0],
            env.unwrapped.write_call("act", command="reset task"),
            *actions,
        ],
        "given up": [*actions[:2], env.unwrapped.write_answer("enough")],
    }
    earned = {}
    for way, steps in ways.items():
        env.reset(options={"task": 0})
        outcomes = [env.step(action) for action in steps]
        assert outcomes[-1][2], way
        earned[way] = sum(outcome[1] for outcome in outcomes)
        score = outcomes[-1][4]["metrics"]["score"]
        assert earned[way] == pytest.approx(score + (score == 1.0))
    assert earned["detours"] == earned["starting over"] == pytest.approx(earned["shortest"])
    assert earned["given up"] < 1.0


def test_a_wrong_focus_loses_the_game():
    env = make("find-animal")
    act(env, "look around")
    text, _, terminated, _, info = act(env, "focus on air")
    assert terminated, text
    assert info["metrics"] | {"success": 0.0, "score": -1.0} == info["metrics"]
    assert info["reward_terms"]["score_gain"] == -1.0
    assert info["reward_terms"]["solved"] == 0.0


def test_optional_tools_and_giving_up():
    env = make(tools=["look", "inventory", "commands"])
    look = env.step(env.unwrapped.write_call("look"))[0]
    assert look in env.unwrapped.task.question
    assert "orange" in env.step(env.unwrapped.write_call("inventory"))[0]
    commands = env.step(env.unwrapped.write_call("commands"))[0]
    assert "focus on OBJ" in commands
    *_, terminated, _, info = env.step(env.unwrapped.write_answer("I give up."))
    assert terminated
    assert info["metrics"]["success"] == 0.0


def test_strange_commands_are_observations():
    env = make()
    for command in ("", "\x00", "\ud800", "é漢字🙂", "1", "open a\nopen b", "go to " * 50):
        text, *_, info = act(env, command)
        assert text
        assert "error" not in info["action"]
    assert act(env, "x" * 501)[4]["action"]["error"] == "tool_error"


def run(env, actions):
    return [env.unwrapped.step(action) for action in actions]


def test_copies_pickles_and_snapshots_resume_identically():
    env = make("chemistry-mix", index=1)
    actions = env.unwrapped.reference_actions()
    run(env, actions[:4])
    base = env.unwrapped
    copies = [copy.deepcopy(base), pickle.loads(pickle.dumps(base))]
    other = make("chemistry-mix", index=0)
    other.unwrapped.restore(base.snapshot())
    games = [base, *copies, other.unwrapped]
    shown = [[game.step(action) for game in games] for action in actions[4:9]]  # interleaved
    assert all(outcome == outcomes[0] for outcomes in shown for outcome in outcomes)


def test_a_dead_java_process_is_replaced(caplog):
    env, twin = make(), make()
    actions = env.unwrapped.reference_actions()
    expected = run(twin, actions)
    run(env, actions[:2])
    process = science_engine.shared_engine()._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert run(env, actions[2:]) == expected[2:]
    assert science_engine.shared_engine()._process.pid != process.pid
    assert "is replaced" in caplog.text


def test_wrong_arguments_are_errors(monkeypatch):
    with pytest.raises(UnknownNameError, match="boil"):
        gym.make(ID, task="boyl")
    with pytest.raises(UnknownNameError, match="openDoors"):
        gym.make(ID, simplifications="openDors")
    with pytest.raises(ConfigurationError, match="need electrical actions"):
        gym.make(ID, task="power-component", simplifications=["noElectricalAction"])
    with pytest.raises(ConfigurationError, match="variations=0"):
        gym.make(ID, variations=0)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(MissingExtraError, match="default-jre-headless"):
        gym.make(ID)
