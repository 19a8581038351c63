"""Generation in slots: the same tokens as batch by batch, with less work and no waiting."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import GenerationRequest, WaveStream
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.policies.slots import SlotCache, can_serve
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec

ID = "AgentR1/SyntheticMultiHop-v0"


def specs(count, group_size=4):
    return [
        EpisodeSpec(task=i // group_size, seed=0, group_id=str(i // group_size),
                    rng=np.random.default_rng([7, i]))
        for i in range(count)
    ]  # fmt: skip


def roll_out(policy, count, **env_kwargs):
    return Rollout(lambda: gym.make(ID, **env_kwargs), policy).collect(specs(count))


def tokens(trajectories):
    return [[t.completion_ids for t in episode.transitions] for episode in trajectories]


@pytest.fixture
def make_policy(model, tokenizer, monkeypatch):
    def make(*, in_batches=False, **settings):
        policy = transformers_policy(model.eval(), tokenizer, max_new_tokens=24, **settings)
        if in_batches:
            monkeypatch.setattr(policy, "open_stream", lambda: WaveStream(policy.generate))
        return policy

    return make


@pytest.mark.parametrize(
    ("attention", "context", "sampling"),
    [
        ("sdpa", "full", {}),
        ("eager", {"name": "window", "turns": 1}, {"temperature": 0.0}),
        ("sdpa", {"name": "window", "turns": 1}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
    ],
)
def test_an_episode_is_the_same_in_slots_and_batch_by_batch(
    make_policy, model, attention, context, sampling
):
    model.set_attn_implementation(attention)
    in_slots = roll_out(make_policy(**sampling), 16, context=context)
    in_batches = roll_out(make_policy(in_batches=True, **sampling), 16, context=context)
    assert max(len(t.transitions) for t in in_slots) > 1
    assert tokens(in_slots) == tokens(in_batches)
    for one, other in zip(in_slots, in_batches, strict=True):
        for a, b in zip(one.transitions, other.transitions, strict=True):
            assert a.prompt_ids == b.prompt_ids
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


def test_fewer_slots_than_episodes_change_nothing(make_policy):
    many = roll_out(make_policy(), 12)
    assert tokens(roll_out(make_policy(max_batch_size=3), 12)) == tokens(many)


def test_only_the_new_tokens_of_an_extended_state_are_prefilled(make_policy, model, monkeypatch):
    forwarded = []
    forward = type(model).forward

    def counting(self, input_ids, position_ids, **rest):
        # padding stands at the last place of the slots
        forwarded.append(int((position_ids < position_ids.new_tensor(255)).sum()))
        return forward(self, input_ids=input_ids, position_ids=position_ids, **rest)

    monkeypatch.setattr(model, "forward", counting.__get__(model))
    (episode,) = roll_out(make_policy(), 1)
    last = episode.transitions[-1]
    assert len(episode.transitions) > 1
    # every token once, but the last one sampled: nothing comes after it
    assert sum(forwarded) == len(last.prompt_ids) + len(last.completion_ids) - 1


def test_equal_first_states_of_a_group_are_prefilled_once(make_policy, model, monkeypatch):
    rows = []
    forward = type(model).forward

    def counting(self, input_ids, **rest):
        rows.append(input_ids.shape)
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(model, "forward", counting.__get__(model))
    roll_out(make_policy(), 8)
    assert rows[0][0] == 2  # two groups of four
    assert rows[0][1] > 1
    assert rows[1] == (8, 1)


def test_slots_support_full_attention_only():
    def config(**changes):
        return Qwen2Config(
            vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, **changes,
        )  # fmt: skip

    settings = SamplingSettings(max_new_tokens=1, eos_token_ids=(0,), pad_token_id=0)
    assert can_serve(Qwen2ForCausalLM(config()), settings)
    sliding = config(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not can_serve(Qwen2ForCausalLM(sliding), settings)
    penalty = SamplingSettings(
        max_new_tokens=1, eos_token_ids=(0,), pad_token_id=0, repetition_penalty=1.1
    )
    assert not can_serve(Qwen2ForCausalLM(config()), penalty)


def test_a_growing_cache_keeps_its_content():
    cache = SlotCache()
    cache.reserve(1, 4)
    states = torch.arange(6.0).reshape(1, 1, 3, 2)  # one slot, one head, three tokens
    cache.set_write_positions([0], torch.tensor([[0, 1, 2]]), 3)
    cache.update(states, states, 0)
    cache.reserve(3, 1000)
    assert cache.capacity >= 1000
    cache.copy(0, [2], 3)
    cache.set_write_positions([2], torch.tensor([[3]]), 4)
    keys, _ = cache.update(torch.full((1, 1, 1, 2), 9.0), torch.zeros(1, 1, 1, 2), 0)
    assert keys.tolist() == [[[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [9.0, 9.0]]]]


def test_the_slot_of_an_idle_episode_is_reclaimed_without_loss(make_policy):
    env = gym.make(ID)
    _, info = env.reset(options={"task": 0})

    def request():
        return GenerationRequest(
            episode_id=0, messages=info["messages"], tools=info["tools"], previous=None,
            rng=np.random.default_rng(3),
        )  # fmt: skip

    def finish(stream):
        ready = []
        while stream.has_requests and not ready:
            ready = stream.advance()
        return [(key, generation.completion_ids) for key, generation in ready]

    stream = make_policy(max_batch_size=1).open_stream()
    stream.add(0, request())
    ((_, expected),) = finish(stream)
    stream.add(1, request())
    for _ in range(3):
        assert stream.advance() == []  # 0 may still come back
    stream.mark_idle(0)
    assert finish(stream) == [(1, expected)]
    stream.mark_idle(1)
    stream.add(0, request())
    assert finish(stream) == [(0, expected)]
    stream.mark_idle(0)
    stream.add(1, request())
    stream.add(0, request())  # back before its slot is reclaimed
    assert finish(stream) == [(0, expected)]
    stream.mark_idle(0)
    assert finish(stream) == [(1, expected)]
