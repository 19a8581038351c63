"""Numbers for text: menus and tokens, as policies without text write them."""

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from agent_envs.wrappers import ConversationObservation, MenuActions, TokenObservation

ID = "AgentR1/SyntheticMultiHop-v0"
CALL = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'


def tokens_env():
    env = ConversationObservation(gym.make(ID))
    return TokenObservation(env, lambda text: text.encode(), max_length=2048, num_tokens=256)


def test_a_menu_follows_the_state():
    def searches(info):
        return [CALL % word for word in info["messages"][-1]["content"].split()]

    env = MenuActions(gym.make(ID), searches, size=20)
    question, info = env.reset(seed=7)
    assert info["menu"] == [CALL % word for word in question.split()]
    _, _, _, _, after = env.step(0)
    assert after["menu"] != info["menu"]
    assert after["action"]["arguments"] == {"query": question.split()[0]}


def test_a_menu_follows_a_restored_state():
    def answer(info):
        return [f"<answer> {len(info['messages'])} messages </answer>"]

    env = MenuActions(gym.make(ID), answer, size=2)
    env.reset(seed=7)
    snapshot = env.unwrapped.snapshot()
    env.step(1)  # a mistake: one message, and the reply
    env.unwrapped.restore(snapshot)
    assert env.step(0)[4]["action"]["answer"] == "2 messages"


def test_an_index_beyond_the_menu_is_masked_and_a_mistake():
    env = MenuActions(gym.make(ID), ["hm"], size=3)
    _, info = env.reset(seed=7)
    assert info["action_mask"].tolist() == env.action_masks().tolist() == [1, 0, 0]
    *_, info = env.step(2)
    assert info["action"]["error"] == "no_action"


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.parametrize("seed", [0, 1])
def test_both_sides_are_arrays_that_gymnasium_accepts(seed):
    env = MenuActions(tokens_env(), ["hm", "<answer>x</answer>"], size=3)
    env.action_space.seed(seed)
    check_env(env, skip_render_check=True)
