from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.envs.synthetic.world import VARIANTS
from agent_trainers.make_tiny_policy import ROUNDS, demonstrations, encode, make_tokenizer
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trajectory import Transition

ID = "AgentR1/SyntheticMultiHop-v0"


def test_the_shipped_policy_is_under_two_megabytes(tiny_policy):
    assert sum(file.stat().st_size for file in Path(tiny_policy).iterdir()) < 2_000_000


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tokenizer):
    made = make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_every_word_of_every_variant_is_known_and_an_action_survives_its_tokens(
    tokenizer, variant, hops
):
    env = gym.make(ID, variant=variant, hops=hops, max_episode_steps=9)
    observation, _ = env.reset(seed=hops)
    for action in env.unwrapped.reference_actions():
        # planted text is of any words
        for text in (observation, action) if variant != "injected" else (action,):
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
        decoded = tokenizer.decode(
            tokenizer(action + "<|im_end|>")["input_ids"], skip_special_tokens=True
        )
        observation, *_, info = env.step(decoded)
    assert info["metrics"]["success"] == 1


def test_demonstrations_are_encoded_as_the_chat_template_renders_them(tokenizer):
    conversation = next(demonstrations(ROUNDS[0], np.random.default_rng(0)))
    tools = [{"type": "function", "function": {"name": "search"}}]
    rendered = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
    ids, written = encode(tokenizer, conversation)
    assert tokenizer(rendered)["input_ids"] == ids
    spoken = [m["content"] for m in conversation if m["role"] == "assistant"]
    sampled = [token for token, is_written in zip(ids, written, strict=True) if is_written]
    assert sampled == tokenizer("<|im_end|>".join([*spoken, ""]))["input_ids"]


def test_states_extend_each_other_token_by_token(tokenizer):
    renderer = ChatRenderer(tokenizer)
    env = gym.make(ID)
    _, info = env.reset(seed=0)
    previous = None
    for action in env.unwrapped.reference_actions()[:2]:
        prompt_ids = renderer.prompt_ids(info["messages"], info["tools"], previous)
        assert prompt_ids == renderer.prompt_ids(info["messages"], info["tools"], None)
        completion_ids = tokenizer(action + "<|im_end|>")["input_ids"]
        previous = Transition(
            messages=info["messages"], prompt_ids=prompt_ids, completion_ids=completion_ids,
            logprobs=np.zeros(len(completion_ids), np.float32), action=action, reward=0.0,
            reward_terms={}, terminated=False, truncated=False, info={},
        )  # fmt: skip
        info = env.step(action)[4]


def test_success_before_training_is_low_but_not_nothing(model, tokenizer):
    policy = transformers_policy(model, tokenizer, max_new_tokens=24)
    make_env = lambda: gym.make(ID, split="test")  # noqa: E731
    evaluation = evaluate_policy(make_env, policy, range(300))
    assert 0.02 <= evaluation.metrics["success"] <= 0.15
    greedy = transformers_policy(model, tokenizer, max_new_tokens=24, temperature=0.0)
    assert evaluate_policy(make_env, greedy, range(100)).metrics["success"] <= 0.15
