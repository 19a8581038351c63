"""TextWorldExpress, compared with its package's own server."""

import contextlib
import os
import random
import signal
import subprocess
import sys

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.envs.games.java_games import shared_engine
from agent_envs.envs.games.text_world_express import GAMES, SIMULATOR
from agent_envs.testing import find_detour, play_ways
from tests.agent_envs.envs.playing import answer, call, java_engine, make, solve

ID = "AgentR1/TextWorldExpress-v0"
_java = java_engine(SIMULATOR)


@pytest.fixture(scope="module")
def server():
    """The package's own environment, in a Java process of its own."""
    from textworld_express import TextWorldExpressEnv

    server = TextWorldExpressEnv(envStepLimit=1000)
    yield server
    process = server._gateway.java_process
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()


@pytest.fixture(params=GAMES)
def game(request):
    return request.param


def compare_episodes(server, game, episodes, num_steps=50, seed=0):
    """Compare episodes of random valid actions; return how many were over before the last step."""
    rng = random.Random(seed)
    env = gym.make(ID, game=game, split="test", max_episode_steps=-1)
    num_over = 0
    server.load(game, "")
    for task in episodes:
        question, _ = env.reset(options={"task": task})
        text, info = server.reset(seed=20_000 + task, gameFold="test")
        assert question == f"{server.getTaskDescription().strip()}\n\n{text.strip()}"
        is_over = False
        for _ in range(num_steps):
            command = rng.choice(sorted(info["validActions"]))
            text, reward, is_over, info = server.step(command)
            observation, _, terminated, _, shown = call(env, "act", command=command)
            assert observation == text.strip()
            assert shown["reward_terms"]["score_gain"] == 0.1 * reward
            assert terminated == is_over
            assert shown["metrics"]["score"] == info["score"]
            assert shown["metrics"]["success"] == info["tasksuccess"]
            if is_over:
                break
        num_over += is_over
    return num_over


def test_episodes_are_those_of_the_packages_server(server, game):
    num_over = compare_episodes(server, game, range(50))
    assert num_over < 50
    assert num_over > 0 or game == "twc"  # which random actions do not solve


def test_reference_actions_solve_unseen_tasks_within_the_turn_limit(game):
    env = gym.make(ID, game=game, split="test")
    for task in range(100):
        total, info = solve(env, task)
        assert total == pytest.approx(1.1)
        assert info["metrics"]["success"] == 1.0


@pytest.mark.parametrize(("game", "parameters"), [
    ("cookingworld", {"numLocations": 1, "numIngredients": 1, "numDistractorItems": 0}),
    ("cookingworld", {"numLocations": 11, "numIngredients": 5}),
    ("twc", {"numLocations": 1, "numItemsToPutAway": 1}),
    ("twc", {"includeDoors": 1, "limitInventorySize": 1}),
    ("coin", {"numLocations": 2, "includeDoors": 0, "numDistractorItems": 10}),
])  # fmt: skip
def test_reference_actions_solve_tasks_of_other_sizes(game, parameters):
    env = gym.make(ID, game=game, parameters=parameters, max_episode_steps=100)
    for task in range(5):
        solve(env, task)
    values = "-".join(map(str, {**GAMES[game], **parameters}.values()))
    assert env.reset(options={"task": 7})[1]["task_id"] == f"twx-{game}-{values}-train-7"


def test_reference_actions_can_keep_the_detours_of_the_packages_agent(game):
    direct = gym.make(ID, game=game)
    walking = gym.make(ID, game=game, detours=True, max_episode_steps=-1)
    lengths = [0, 0]
    for task in range(4):
        assert solve(walking, task)[1]["metrics"]["success"] == 1.0
        direct.reset(options={"task": task})
        paths = [env.unwrapped.reference_actions() for env in (direct, walking)]
        taken = [[action for action in path if "take" in action] for path in paths]
        assert taken[0] == taken[1]
        lengths = [total + len(path) for total, path in zip(lengths, paths, strict=True)]
    assert lengths[0] < lengths[1]


def test_reference_actions_are_the_same_in_every_process(game):
    script = (
        "import sys, gymnasium as gym, agent_envs; env = gym.make(*sys.argv[1:2], game=sys.argv[2])"
        "\nfor task in range(3):"
        "\n    env.reset(options={'task': task}); print(env.unwrapped.reference_actions())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, ID, game], capture_output=True, text=True, check=True
    ).stdout
    env = gym.make(ID, game=game)
    own = []
    for task in range(3):
        env.reset(options={"task": task})
        own.append(str(env.unwrapped.reference_actions()))
    assert shown.splitlines() == own


def test_no_probe_earns_more_than_the_reference_actions(game):
    plays = play_ways(gym.make(ID, game=game), 0)
    assert plays[0].solved
    assert find_detour(plays) is None


def test_a_spoilt_meal_loses_the_game():
    env = make(ID, game="cookingworld", parameters={"numLocations": 1})
    call(env, "act", command="take red apple")
    _, reward, terminated, _, info = call(env, "act", command="eat red apple")
    assert terminated
    assert (reward, info["metrics"]["success"]) == (0.0, 0.0)


def test_rewards_can_be_sparse(game):
    env = gym.make(ID, game=game, rewards={"solved": 1.0})
    env.reset(options={"task": 0})
    rewards = [env.step(action)[1] for action in env.unwrapped.reference_actions()]
    assert rewards == [*[0.0] * (len(rewards) - 1), 1.0]


def test_strange_commands_are_observations_and_an_answer_gives_up():
    env = make(ID, game="coin")
    for command in ("", "\x00", "\ud800", "é漢字🙂", "move up", "move east\nmove west", "help"):
        assert call(env, "act", command=command)[0]
    assert call(env, "act", command="x" * 501)[4]["action"]["error"] == "tool_error"
    _, _, terminated, _, info = answer(env, "done")
    assert terminated
    assert info["metrics"]["success"] == 0.0


def test_snapshots_and_a_new_java_process_resume_identically():
    env, twin = (make(ID, 1, game="cookingworld") for _ in range(2))
    actions = env.unwrapped.reference_actions()
    expected = [twin.unwrapped.step(action) for action in actions]
    for action in actions[:4]:
        env.unwrapped.step(action)
    other = make(ID, game="cookingworld")
    other.unwrapped.restore(env.unwrapped.snapshot())
    games = [env.unwrapped, other.unwrapped]
    for action, outcome in zip(actions[4:8], expected[4:8], strict=True):  # interleaved
        assert [game.step(action) for game in games] == [outcome, outcome]
    process = shared_engine(SIMULATOR)._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [other.unwrapped.step(action) for action in actions[8:]] == expected[8:]


def test_wrong_arguments_are_errors():
    with pytest.raises(UnknownNameError, match="cookingworld"):
        gym.make(ID, game="cooking")
    with pytest.raises(UnknownNameError, match="numLocations"):
        gym.make(ID, game="coin", parameters={"numLocation": 3})
    for value in (5.7, None, True, "2,includeDoors=0"):
        with pytest.raises(ConfigurationError, match="numLocations must be an integer"):
            gym.make(ID, game="coin", parameters={"numLocations": value})
    with pytest.raises(ConfigurationError, match="must be a mapping"):
        gym.make(ID, game="coin", parameters=[1])
    with pytest.raises(ConfigurationError, match="less than or equal to 11"):
        make(ID, game="coin", parameters={"numLocations": 50})
