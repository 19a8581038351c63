"""Generation in slots: the same tokens as batch by batch, with less work and no waiting."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

import agent_trainers.policies.slots
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import VersionedPolicy, WaveStream
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.policies.slots import can_serve, num_common
from tests.agent_trainers.made import request, roll_out

ID = "AgentR1/SyntheticMultiHop-v0"
TASKS = [0] * 4 + [1] * 4


@pytest.fixture
def make_policy(model, tokenizer, monkeypatch):
    def make(*, in_batches=False, **settings):
        policy = transformers_policy(model.eval(), tokenizer, max_new_tokens=24, **settings)
        if in_batches:
            monkeypatch.setattr(policy, "open_stream", lambda: WaveStream(policy.generate))
        return policy

    return make


@pytest.mark.parametrize(
    ("attention", "context", "sampling", "slots"),
    [
        ("eager", "full", {"temperature": 0.0}, {}),
        ("sdpa", "full", {}, {"max_batch_size": 3}),
        ("sdpa", {"name": "window", "turns": 1}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
         {}),
    ],
)  # fmt: skip
def test_an_episode_is_the_same_in_slots_and_batch_by_batch(
    make_policy, model, attention, context, sampling, slots, monkeypatch
):
    monkeypatch.setattr(agent_trainers.policies.slots, "_LEAST_SHARED", 4)
    model.set_attn_implementation(attention)
    in_slots = roll_out(make_policy(**sampling, **slots), TASKS, context=context)
    in_batches = roll_out(make_policy(in_batches=True, **sampling), TASKS, context=context)
    assert max(len(t.transitions) for t in in_slots) > 1
    for one, other in zip(in_slots, in_batches, strict=True):
        for a, b in zip(one.transitions, other.transitions, strict=True):
            assert (a.prompt_ids, a.completion_ids) == (b.prompt_ids, b.completion_ids)
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


@pytest.fixture
def record_passes(model, monkeypatch):
    """Return a list that receives the input's shape and number of real tokens of each pass."""
    passes, forward = [], type(model).forward

    def counting(self, input_ids, position_ids, **rest):
        # padding stands at the last place of the slots
        real = int((position_ids < position_ids.new_tensor(255)).sum())
        passes.append((input_ids.shape, real))
        return forward(self, input_ids=input_ids, position_ids=position_ids, **rest)

    def start():
        monkeypatch.setattr(model, "forward", counting.__get__(model))
        return passes

    return start


def test_new_tokens_of_a_state_and_equal_states_of_a_group_are_prefilled_once(
    make_policy, record_passes
):
    policy = make_policy()
    passes = record_passes()
    (episode,) = roll_out(policy, [0])
    last = episode.transitions[-1]
    assert len(episode.transitions) > 1
    # every token once, but the last one sampled: nothing comes after it
    expected = len(last.prompt_ids) + len(last.completion_ids) - 1
    assert sum(real for _, real in passes) == expected
    passes.clear()
    roll_out(policy, TASKS)
    (prefilled, _), (decoded, _) = passes[:2]
    assert prefilled[0] == 2  # two groups of four
    assert prefilled[1] > 1
    assert decoded == (8, 1)


def test_the_beginning_that_first_states_share_is_prefilled_once(
    make_policy, record_passes, monkeypatch
):
    monkeypatch.setattr(agent_trainers.policies.slots, "_LEAST_SHARED", 4)
    policy = make_policy(max_batch_size=2)  # the third episode comes when another has ended
    passes = record_passes()
    episodes = roll_out(policy, [0, 1, 2])
    first, second, third = (episode.transitions[0].prompt_ids for episode in episodes)
    shared = num_common(first, second)
    assert passes[0] == ((1, shared), shared)
    ends = [episode.transitions[-1] for episode in episodes]
    num_tokens = sum(len(end.prompt_ids) + len(end.completion_ids) - 1 for end in ends)
    saved = shared + min(num_common(first, third), shared)
    assert sum(real for _, real in passes) == num_tokens - saved


def test_a_prefill_batch_is_limited_by_its_tokens(make_policy, record_passes, monkeypatch):
    monkeypatch.setattr(agent_trainers.policies.slots, "_CPU_PREFILL_TOKENS", 1)
    policy = make_policy()
    passes = record_passes()
    roll_out(policy, TASKS)
    assert [rows for (rows, _), _ in passes[:3]] == [1, 1, 8]  # two states, then decoding


def test_slots_do_not_penalise_repetition(model):
    settings = SamplingSettings(max_new_tokens=1, eos_token_ids=(0,), pad_token_id=0)
    assert can_serve(model, settings)
    assert not can_serve(model, replace(settings, repetition_penalty=1.1))


def test_a_model_that_is_certain_of_its_tokens_can_be_sampled_in_batches(model, tokenizer):
    """Its log-probabilities are almost 0, and differ between a batch and rows alone by rounding."""
    model.lm_head.weight.data *= 10
    transformers_policy(model, tokenizer, repetition_penalty=1.1)


def test_the_slot_of_an_idle_episode_is_reclaimed_without_loss(make_policy):
    env = gym.make(ID)
    _, info = env.reset(options={"task": 0})

    def add(key):
        stream.add(key, request(3, messages=info["messages"], tools=info["tools"]))

    def finish():
        ready = []
        while stream.has_requests and not ready:
            ready = stream.advance()
        return [(key, generation.completion_ids) for key, generation in ready]

    stream = make_policy(max_batch_size=1).open_stream()
    add(0)
    ((_, expected),) = finish()
    add(1)
    for _ in range(3):
        assert stream.advance() == []  # 0 may still come back
    stream.mark_idle(0)
    assert finish() == [(1, expected)]
    stream.mark_idle(1)
    add(0)
    assert finish() == [(0, expected)]


def test_an_unfinished_turn_continues_with_new_weights_alone(make_policy, model):
    policy = VersionedPolicy(make_policy())
    _, info = gym.make(ID).reset(options={"task": 0})
    stream = policy.open_stream()
    for key in range(2):
        stream.add(key, request(key, messages=info["messages"], tools=info["tools"]))
    for _ in range(5):
        assert stream.advance() == []
    with policy.update(version=1), torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    ready = []
    while stream.has_requests:
        ready += stream.advance()
    for _, turn in ready:
        assert turn.policy_version == 0
        ids = torch.tensor([turn.prompt_ids + turn.completion_ids])
        scores = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0]
        differences = scores[-len(turn.logprobs) :] - torch.tensor(turn.logprobs)
        assert differences[:5].abs().max() > 1e-3  # sampled before
        assert differences[5:].abs().max() < 1e-4
