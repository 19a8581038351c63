"""The batch of vLLM's engine, with a stand-in; `tests/vllm` runs the real one."""

import sys

import numpy as np
import pytest

from agent_trainers.policies.engines import EnginePolicy
from agent_trainers.policies.guided import Guides
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from tests.agent_trainers.made import request
from tests.agent_trainers.vllm_stand_in import EngineStandIn, vllm_modules


@pytest.fixture
def policy(model, tokenizer, monkeypatch):
    for name, module in vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ends = (tokenizer.eos_token_id, *range(10, 241, 4))  # turns of different lengths
    settings = SamplingSettings(max_new_tokens=24, eos_token_ids=ends, temperature=0.7, top_k=9)
    return EnginePolicy(
        ChatRenderer(tokenizer), EngineStandIn(model, ends), settings, max_prompt_tokens=100,
        guides=Guides(tokenizer, 241, ends),
    )  # fmt: skip


def test_all_sampling_settings_are_sent(policy):
    policy.generate([request(0, guide={"type": "structural_tag"})])
    (sent,) = policy._engine.parameters
    expected = {
        "max_tokens": 24, "temperature": 0.7, "top_p": 1.0, "top_k": 9, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": [3, *range(10, 241, 4)], "logprobs": 0,
    }  # fmt: skip
    assert vars(sent).items() >= expected.items()
    assert sent.structured_outputs.structural_tag == '{"type": "structural_tag"}'


def test_turns_leave_the_batch_one_by_one_and_dropped_ones_are_aborted(policy):
    alone = {i: policy.generate([request(i)])[0].completion_ids for i in range(4)}
    stream, ended = policy.open_stream(), []
    for number in range(4):
        stream.add(number, request(number))
    ended += [(key, turn.completion_ids, 1) for key, turn in stream.advance()]
    stream.drop(3)
    assert "3" not in policy._engine.running
    steps = 1
    while stream.has_requests:
        steps += 1
        ended += [(key, turn.completion_ids, steps) for key, turn in stream.advance()]
    expected = [(i, alone[i], len(alone[i])) for i in range(3)]
    assert ended == sorted(expected, key=lambda turn: turn[2])
    assert len({steps for *_, steps in ended}) > 1


def test_what_cannot_start_ends_its_own_turn_only(policy):
    stream = policy.open_stream()
    stream.add(0, request(0, "where ? " * 200))
    stream.add(1, request(1, guide="wrong"))
    (_, long), (_, error) = stream.advance()
    assert long.finish_reason == "overflow"
    assert isinstance(error, ValueError)
    stream.add(2, request(2, "what is the capital of where ?"))
    stream.advance()
    stream.close()
    assert not policy._engine.running


def test_turns_under_a_guide_have_no_log_probabilities_that_a_trainer_computes_again(policy):
    guided, free = policy.generate([request(0, guide={"type": "structural_tag"}), request(1)])
    assert np.isnan(guided.logprobs).all()
    assert np.isfinite(free.logprobs).all()
