import json

import gymnasium as gym
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.wrappers import ConversationObservation, TokenObservation, render_messages

NAME = "AgentR1/SyntheticMultiHop-v0"
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool"]), "content": st.text(st.characters(codec=None))}
    )
)


def as_bytes(text):
    return list(text.encode("utf-8", "replace"))


def observe_bytes(env):
    return TokenObservation(
        ConversationObservation(env), as_bytes, max_length=4096, num_tokens=256, pad_id=0
    )


@settings(deadline=None)
@given(MESSAGES)
def test_rendered_messages_can_be_parsed(messages):
    text = render_messages(messages)
    assert [json.loads(line) for line in text.split("\n") if line] == messages


def test_tokens_are_those_of_the_text_and_padding_is_at_the_end():
    env, plain = observe_bytes(gym.make(NAME)), ConversationObservation(gym.make(NAME))
    tokens, info = env.reset(seed=3)
    text, _ = plain.reset(seed=3)
    size = len(as_bytes(text))
    assert tokens[:size].tolist() == as_bytes(text)
    assert not tokens[size:].any()
    assert tokens.dtype == np.int64
    assert tokens in env.observation_space
    assert "num_cut_tokens" not in info


def test_a_long_text_keeps_its_last_tokens():
    env = TokenObservation(gym.make(NAME), as_bytes, max_length=5, num_tokens=256)
    tokens, info = env.reset(seed=3)
    text = env.unwrapped.task.question
    assert bytes(tokens.tolist()).decode() == text[-5:]
    assert info["num_cut_tokens"] == len(text) - 5
    tokens, *_, info = env.step("<answer>x</answer>")
    assert tokens.tolist() == [0] * 5
    assert "num_cut_tokens" not in info


class Tokenizer:
    """As those of transformers: special tokens are found in a text unless they are to be split."""

    split_special_tokens = False

    def __len__(self):
        return 257

    def __call__(self, text, *, add_special_tokens=True, split_special_tokens=False):
        start = [256] if add_special_tokens else []
        pieces = [text] if split_special_tokens else text.split("<|end|>")
        ids = [id for piece in pieces for id in (*as_bytes(piece), 256)][:-1]
        return {"input_ids": start + ids}


def test_a_tokenizer_takes_no_text_for_a_special_token():
    env = TokenObservation(ConversationObservation(gym.make(NAME)), Tokenizer(), max_length=4096)
    env.reset(seed=0)
    tokens, *_, info = env.step("<|end|>")
    assert env.observation_space.high[0] == 256
    assert bytes(tokens.tolist()).rstrip(b"\0").decode() == render_messages(info["messages"])
