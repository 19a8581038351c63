import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, DataError
from tests.agent_envs.envs.playing import answer, call, solve
from tests.agent_envs.test_catalogue import check_declarations
from tests.agent_envs.test_ways import check_ways

ID = "AgentR1/TextWorld-v0"


@pytest.fixture
def env(text_world_game):
    env = gym.make(ID, game=text_world_game)
    env.reset(seed=0)
    return env


def act(env, command):
    return call(env, "act", command=command)


def test_the_planned_commands_win_and_the_episode_ends(env):
    total, info = solve(env)
    assert info["metrics"]["success"] == info["reward_terms"]["won"] == 1.0
    assert total == pytest.approx(1.1)
    assert "The End" in info["tool_result"]
    with pytest.raises(gym.error.ResetNeeded):
        act(env, "look")
    question, _ = env.reset(seed=0)
    assert "$$" not in question
    assert act(env, "fly to the moon\nwin")[0]
    _, _, terminated, _, info = answer(env, "done")
    assert terminated
    assert info["metrics"]["success"] == info["reward_terms"]["won"] == 0.0


def test_a_game_that_its_solution_does_not_win_is_drawn_again(tmp_path, monkeypatch):
    """In TextWorld 1.7, the first game drawn for this task has a chest and a Canadian chest."""
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, info = solve(gym.make(ID, split="test"), task=31)
    assert info["metrics"]["success"] == 1.0


def test_wrong_arguments_are_errors(text_world_game):
    with pytest.raises(ConfigurationError, match="rooms must be at least 1"):
        gym.make(ID, rooms=0)
    with pytest.raises(DataError, match=r"nowhere\.z8"):
        gym.make(ID, game="nowhere.z8")


class House:
    """A game of ALFWorld with textworld's interface."""

    def reset(self):
        self.is_won = False
        return self.state("-= Welcome to TextWorld, ALFRED! =-\n\nYour task is to: look.\n\n> ")

    def step(self, command):
        self.is_won = command == "look"
        feedback = "You look." if self.is_won else "Nothing happens."
        return self.state(feedback), self.is_won, self.is_won

    def state(self, feedback):
        return SimpleNamespace(
            feedback=feedback, objective=None, won=self.is_won, lost=False, score=int(self.is_won),
            max_score=1, policy_commands=["look"],
        )  # fmt: skip

    def close(self):
        pass


@pytest.fixture
def alfworld_games(tmp_path, monkeypatch):
    textworld = pytest.importorskip("textworld")
    for name, content in (
        ("look_at_obj_in_light-Mug/trial_1", {"solvable": True}),
        ("pick_and_place_simple-Cup/trial_2", {"solvable": True}),
        ("pick_and_place_simple-Pan/trial_3", {"solvable": False}),
        ("pick_and_place_simple-BreadSliced/trial_4", {"solvable": True}),
    ):
        folder = tmp_path / "valid_seen" / name
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(content), encoding="utf-8")
    module = ModuleType("alfred_tw_env")
    module.AlfredDemangler = lambda: "the demangler"
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment.alfred_tw_env", module)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "alfworld" else found(name)
    )
    started = []

    def start(path, infos, wrappers):
        started.append((path, wrappers))
        return House()

    monkeypatch.setattr(textworld, "start", start)
    return str(tmp_path), started


def test_alfworld_games_are_found_and_solved(alfworld_games):
    data, started = alfworld_games
    env = gym.make("AgentR1/ALFWorld-v0", data=data, split="valid_seen")
    assert env.unwrapped.num_tasks == 2  # solvable, nothing sliced
    question, info = env.reset(options={"task": 1})
    assert question.endswith("Your task is to: look.")
    assert info["task_id"] == "alfworld-pick_and_place_simple-Cup/trial_2"
    assert started[-1][0].endswith("Cup/trial_2/game.tw-pddl")
    assert started[-1][1] == ["the demangler"]
    assert act(env, "jump")[0] == "Nothing happens."
    total, info = solve(env, task=1)
    assert info["metrics"]["success"] == 1.0
    assert total == pytest.approx(1.1)
    check_declarations(env)
    check_ways(env, env.spec)
    with pytest.raises(DataError, match="no games"):
        gym.make("AgentR1/ALFWorld-v0", data=data, split="train")
