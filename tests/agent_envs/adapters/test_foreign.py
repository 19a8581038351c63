"""Environments of other libraries as ours: observations and rewards are the same."""

import contextlib
import random
import re
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError
from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.core.messages import Message
from agent_envs.testing import check

pytestmark = pytest.mark.filterwarnings("default")  # of other libraries
GUESSES = [r"\boxed{1} [1]", "hm", r"\boxed{9} [9]", r"\boxed{4} [4]"]


class Dice(ForeignEnv):
    """Draws from the process's global generators, as GEM and TextArena do."""

    draws_globally = True

    def __init__(self):
        super().__init__("dice")

    def begin(self, task):
        return [Message(role="user", content=f"Guess {random.randrange(99)}.")]

    def act(self, action):
        drawn = f"{random.randrange(99)} {np.random.randint(99)}"  # noqa: NPY002
        return Reply(text=drawn, reward=0.5, terminated=action == "end", truncated=action == "cut")


gym.register("Test/Dice-v0", entry_point=f"{__name__}:Dice")


def run(env, seed, actions):
    """Return the outcomes of each turn, until the end."""
    observation, _ = env.reset(seed=seed)
    seen = [observation]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        assert sum(info["reward_terms"].values()) == pytest.approx(reward)
        seen.append((observation, reward, terminated, truncated))
        if terminated or truncated:
            break
    return seen


def test_the_wrapper_passes_the_conformance_kit():
    check("Test/Dice-v0")


def test_global_generators_are_isolated():
    alone = run(Dice(), 3, ["a", "b", "end"])
    one, other = Dice(), Dice()
    random.seed(11)
    expected = random.random()
    random.seed(11)
    seen = [one.reset(seed=3)[0]]
    other.reset(seed=4)
    for action in ("a", "b", "end"):
        seen.append(one.step(action)[:4])
        other.step(action)
    assert seen == alone
    assert random.random() == expected


def test_a_seed_is_a_task_and_a_task_is_a_seed():
    by_seed, by_task = Dice(), Dice()
    assert by_seed.reset(seed=5)[0] == by_task.reset(seed=1, options={"task": 5})[0]
    with pytest.raises(ConfigurationError, match="no task -1"):
        by_task.reset(options={"task": -1})
    with pytest.raises(ConfigurationError, match="tusk"):
        by_task.reset(options={"tusk": 1})


@contextlib.contextmanager
def seeded(seed):
    """Seed the global generators, and restore them."""
    state = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002


def gem_pair(seed):
    import gem
    import gem.envs

    name = "game:GuessTheNumber-v0-easy"
    ours = gym.make("agent_envs.adapters.gem:AgentR1/GEM-v0", env_id=name)
    with seeded(seed):
        theirs = gem.make(name)
        seen = [theirs.reset(seed=seed)[0]]
        for guess in GUESSES:
            observation, reward, terminated, truncated, _ = theirs.step(guess)
            seen.append((observation, float(reward), terminated, truncated))
            if terminated or truncated:
                break
    return ours, seen


def textarena_pair(seed):
    import textarena as ta

    name = "GuessTheNumber-v0-raw"
    ours = gym.make("agent_envs.adapters.textarena:AgentR1/TextArena-v0", env_id=name)
    with seeded(seed):
        theirs = ta.make(name)
        theirs.reset(num_players=1, seed=seed)
        seen, done = ["".join(text for _, text, _ in theirs.get_observation()[1])], False
        for guess in GUESSES:
            done, _ = theirs.step(guess)
            messages = [
                m for _, m, kind in theirs.get_observation()[1] if kind.name[:6] != "PLAYER"
            ]
            reward = float(theirs.close()[0][0]) if done else 0.0
            seen.append(("\n".join(messages), reward, done, False))
            if done:
                break
    return ours, seen


def skyrl_pair(seed):
    import skyrl_gym

    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 8 ?"}]
    extras = {"reward_spec": {"ground_truth": "9"}, "max_turns": 3}
    rows = [{"prompt": prompt, **extras}]
    name = "gsm8k_multi_turn"
    url = "agent_envs.adapters.skyrl_gym:AgentR1/SkyRLGym-v0"
    theirs = skyrl_gym.make(name, extras=extras)
    seen = [theirs.init(prompt)[0][-1]["content"]]
    for guess in GUESSES:
        step = theirs.step(guess)
        text = "".join(message["content"] for message in step["observations"])
        seen.append((text, step["reward"], step["done"], False))
        if step["done"]:
            break
    return gym.make(url, env_id=name, rows=rows), seen


if find_spec("openenv"):
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Text(Action):
        text: str

    class Said(Observation):
        said: str

    class Echo(Environment):
        state = State()

        def reset(self, seed=None, episode_id=None):
            return Said(said=f"echo {seed}")

        def step(self, action):
            return Said(said=action.text, reward=0.5, done=action.text == GUESSES[-1])


def openenv_pair(seed):
    from agent_envs.adapters.openenv import OpenEnvEnv

    seen = [f"echo {seed}", *((guess, 0.5, guess == GUESSES[-1], False) for guess in GUESSES)]
    return OpenEnvEnv(make=Echo, action_class=Text), seen


PAIRS = {
    "gem": gem_pair,
    "textarena": textarena_pair,
    "skyrl_gym": skyrl_pair,
    "openenv": openenv_pair,
}


@pytest.fixture(params=PAIRS)
def pair(request):
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed; make test-adapters installs it")
    return PAIRS[request.param]


def test_observations_and_rewards_are_the_same(pair):
    ours, seen = pair(3)
    assert run(ours, 3, GUESSES) == seen
    ours.reset(seed=3)
    saved = ours.unwrapped.snapshot()
    first = ours.unwrapped.step(GUESSES[0])
    ours.unwrapped.restore(saved)
    assert ours.unwrapped.step(GUESSES[0]) == first


def test_a_game_of_two_runs_against_an_opponent():
    pytest.importorskip("textarena", reason="make test-adapters installs it")
    messages = []

    def opponent(text):
        messages.append(text)
        free = re.findall(r"'\[(\d)\]'", text)
        return f"[{free[-1]}]"

    url = "agent_envs.adapters.textarena:AgentR1/TextArena-v0"
    env = gym.make(url, env_id="TicTacToe-v0-raw", opponents=[opponent])
    seen = run(env, 1, ["[0]", "[1]", "[2]"])
    assert seen[-1][1:] == (1.0, True, False)
    assert "[Player 1] [8]" in seen[1][0]
    assert "[Player 0] [0]" in messages[0]
