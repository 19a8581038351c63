"""What every environment must satisfy. `check_conformance` runs over every registered id."""

import json
import warnings

import gymnasium as gym
from gymnasium.utils.env_checker import check_env, data_equivalence

HOSTILE_ACTIONS = [
    "",
    " ",
    "\x00\ud800é漢字🙂",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "search", "arguments": ' + "[" * 10_000,
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"unknown": 1}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": ""}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": 1e999999, "arguments": NaN}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": ' + "9" * 5000 + "}}</tool_call>",
    "<answer></answer>",
    "<answer>a</answer><answer>b</answer>",
    "<think><answer>a</answer>",
    "<tool_call>" * 5_000,
    "x" * 100_000,
]


def check_conformance(env_id, **kwargs):
    check_gymnasium(env_id, kwargs)
    check_replay(env_id, kwargs)
    if kwargs.get("tool_format") != "openai":  # where any text without a call is an answer
        check_rewards_and_hostile_actions(env_id, kwargs)
    check_reference_actions(env_id, kwargs)


def check_gymnasium(env_id, kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(env_id, **kwargs)
        check_env(env.unwrapped)
        assert json.loads(env.spec.to_json())["id"] == env_id


def check_replay(env_id, kwargs):
    def play():
        env = gym.make(env_id, **kwargs)
        results = [env.reset(seed=11)]
        for action in [*env.unwrapped.reference_actions()[:-1], "hm"]:
            results.append(env.step(action))
        return results

    assert data_equivalence(play(), play(), exact=True)


def check_rewards_and_hostile_actions(env_id, kwargs):
    env = gym.make(env_id, max_episode_steps=len(HOSTILE_ACTIONS) + 1, **kwargs)
    env.reset(seed=5)
    for action in HOSTILE_ACTIONS:
        observation, reward, terminated, truncated, info = env.step(action)
        assert isinstance(observation, str)
        assert not terminated
        assert not truncated
        assert sum(info["reward_terms"].values()) == reward
        assert info["metrics"]["success"] == 0
        assert info["messages"][-1]["content"] == observation


def check_reference_actions(env_id, kwargs):
    env = gym.make(env_id, **kwargs)
    env.reset(seed=3)
    for action in env.unwrapped.reference_actions():
        _, reward, terminated, truncated, info = env.step(action)
        assert sum(info["reward_terms"].values()) == reward
        assert not truncated
    assert terminated
    assert info["metrics"]["success"] == 1
