"""The way to vLLM's offline engine, with a stand-in for the package."""

import numpy as np
import pytest

from agent_trainers import TINY_POLICY
from agent_trainers.policies import GenerationRequest
from agent_trainers.policies.local import vllm_policy
from tests.agent_trainers.vllm_engine import TOKENIZER, WORDS, install_vllm


@pytest.fixture
def engine(monkeypatch):
    return install_vllm(monkeypatch)


def request(text, seed=0):
    return GenerationRequest(
        episode_id=0, messages=[{"role": "user", "content": text}], tools=None, previous=None,
        rng=np.random.default_rng(seed),
    )  # fmt: skip


def test_turns_are_sampled_on_token_ids_with_a_seed_of_each_episode(engine):
    policy = vllm_policy(str(TINY_POLICY), max_new_tokens=8, temperature=0.5)
    whole, cut = policy.generate([request("where ?", seed=1), request("who ?", seed=2)])
    ((prompts, settings),) = engine.calls
    assert prompts[0] == {"prompt_token_ids": whole.prompt_ids}
    assert [s.seed for s in settings] == [
        int(np.random.default_rng(seed).integers(2**31)) for seed in (1, 2)
    ]
    assert (settings[0].max_tokens, settings[0].temperature) == (8, 0.5)
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert whole.completion_ids == [*WORDS, TOKENIZER.eos_token_id]
    assert whole.logprobs == pytest.approx([-0.5] * len(whole.completion_ids))
    assert whole.text == TOKENIZER.decode(WORDS)


def test_a_state_that_does_not_fit_is_not_sent(engine):
    policy = vllm_policy(str(TINY_POLICY), max_new_tokens=8, max_model_len=10)
    (generation,) = policy.generate([request("where ? " * 5)])
    assert generation.finish_reason == "overflow"
    assert engine.calls == []
