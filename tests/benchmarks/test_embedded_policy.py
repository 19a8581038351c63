import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_envs.envs.synthetic.world import VARIANTS
from agent_trainers import TINY_POLICY
from agent_trainers.policies.local import transformers_policy
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.tiny_policy.make import make_model
from benchmarks.embedded_policy.make import (
    ROUNDS,
    demonstrations,
    encode,
    make_copying_model,
    make_tokenizer,
    mixture,
)
from benchmarks.performance.models import load_tokenizer

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_the_shipped_policy_is_small_and_has_the_tokenizer_of_the_script(tokenizer):
    assert sum(file.stat().st_size for file in TINY_POLICY.iterdir() if file.is_file()) < 2_000_000
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 4])
def test_every_word_of_every_variant_is_in_the_vocabulary(tokenizer, variant, hops):
    env = gym.make(ID, variant=variant, hops=hops, max_episode_steps=9)
    observation, _ = env.reset(seed=hops)
    for action in env.unwrapped.reference_actions():
        # injected text has arbitrary words
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
    ids, is_sampled = encode(tokenizer, conversation)
    assert tokenizer(rendered)["input_ids"] == ids
    turns = [m["content"] for m in conversation if m["role"] == "assistant"]
    sampled = [token for token, sampled in zip(ids, is_sampled, strict=True) if sampled]
    assert sampled == tokenizer("<|im_end|>".join([*turns, ""]))["input_ids"]


def test_success_before_training_is_low_but_not_zero(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    policy = transformers_policy(model, tokenizer, max_new_tokens=24)
    two_hops = functools.partial(gym.make, ID, split="test")
    for make_env in (two_hops, mixture()):
        assert 0 < evaluate_policy(make_env, policy, range(60)).metrics["success"] <= 0.2


def test_the_initial_weights_copy_what_followed_the_same_words(tokenizer):
    generator = torch.Generator().manual_seed(0)
    words = torch.stack([torch.randperm(100, generator=generator)[:8] + 60 for _ in range(32)])

    def copied(model):
        with torch.no_grad():
            predicted = model(input_ids=torch.cat([words, words], 1)).logits.argmax(-1)
        return (predicted[:, 8:-1] == words[:, 1:]).float().mean().item()

    torch.manual_seed(0)
    assert copied(make_model(tokenizer)) < 0.1
    assert copied(make_copying_model(tokenizer, seed=0)) > 0.25
