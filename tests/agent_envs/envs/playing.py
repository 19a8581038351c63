"""Steps of episodes, as the tests of the environments take them."""

import gymnasium as gym
import pytest

from agent_envs import MissingExtraError
from agent_envs.envs.games.java_games import require_java, stop_engine


def make(env_id, task=0, **kwargs):
    """Return an environment at the beginning of a task."""
    env = gym.make(env_id, **kwargs)
    env.reset(options={"task": task})
    return env


def call(env, name, /, **arguments):
    return env.step(env.unwrapped.write_call(name, **arguments))


def answer(env, text):
    return env.step(env.unwrapped.write_answer(text))


def solve(env, task=0):
    """Take the reference actions of a task; return the sum of the rewards and the last info."""
    env.reset(options={"task": task})
    total = 0.0
    for action in env.unwrapped.reference_actions():
        _, reward, terminated, _, info = env.step(action)
        assert sum(info["reward_terms"].values()) == reward
        total += reward
    assert terminated
    return total, info


def java_engine(simulator):
    """Return a fixture that skips a module without Java, and stops the engine after it."""

    @pytest.fixture(scope="module", autouse=True)
    def engine():
        try:
            require_java(simulator)
        except MissingExtraError as error:
            pytest.skip(str(error))
        yield
        stop_engine(simulator)

    return engine
