"""Rollouts and training on a fake vLLM server over HTTP."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_envs.errors import ServerError
from agent_trainers.policies import GenerationRequest
from agent_trainers.policies.local import VLLMServerPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from tests.agent_trainers.policies import vllm_server_run
from tests.agent_trainers.two_processes import run_in_two_processes
from tests.agent_trainers.vllm_stand_in import VLLMStandIn, serving


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of one and two processes on the same batches, sampled by one server."""
    pytest.importorskip("requests", reason="TRL's client needs requests")
    one, two = (tmp_path_factory.mktemp("server") / name for name in ("one.pt", "two.pt"))
    vllm_server_run.main(str(one))
    run_in_two_processes(vllm_server_run, two)
    return torch.load(one, weights_only=False), torch.load(two, weights_only=False)


def test_two_processes_with_one_server_train_the_weights_of_one_process(trained):
    one, two = trained
    assert two["reward"] == pytest.approx(one["reward"])
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=1e-6), name


def test_processes_may_have_unequal_numbers_of_prompts_or_none(trained):
    first, second = trained[1]["brought"]
    assert len(first) == len(second)  # every call is made by both
    assert any(a != b for a, b in zip(first, second, strict=True))
    assert 0 in first + second
    # one completion per prompt, and a request is filled up by one prompt at most
    needed = [a + b for a, b in zip(first, second, strict=True)]
    assert trained[1]["asked"] == [count + count % 2 for count in needed]
    assert trained[0]["asked"] == trained[0]["brought"][0] == needed


def test_the_server_gets_the_weights_once_per_optimiser_step(trained):
    for result in trained:
        assert result["calls"].count("/update_weights") == 2
        assert result["calls"].count("/init_weight_transfer_engine") == 1
        updates = [call for call in result["calls"] if call != "/v1/completions"][1:5]
        assert updates == [
            "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/reset_prefix_cache",
        ]  # fmt: skip
        # the last update was before the last optimiser step
        moved = [
            (result["server_weights"][n] - w).abs().max() for n, w in result["weights"].items()
        ]
        assert 0 < max(moved) < 0.5


SETTINGS = SamplingSettings(max_new_tokens=8, eos_token_ids=(2,))


@pytest.fixture
def server(tiny_policy, tokenizer):
    pytest.importorskip("openai", reason="the extra openai is not installed")
    stand_in = VLLMStandIn(tiny_policy, [tokenizer.eos_token_id])
    with serving(stand_in) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
def generate(server, tokenizer):
    """Generate one turn with these settings."""

    def generate(settings=SETTINGS, **options):
        policy = VLLMServerPolicy(server.url, ChatRenderer(tokenizer), settings, **options)
        request = GenerationRequest(
            episode_id=0, messages=[{"role": "user", "content": "where ?"}], tools=None,
            previous=None, rng=np.random.default_rng(3),
        )  # fmt: skip
        with contextlib.closing(policy):
            (generation,) = policy.generate([request])
        return generation

    return generate


def test_tokens_and_log_probabilities_are_the_servers_by_all_sampling_settings(server, generate):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    generation = generate(replace(SETTINGS, **sampling))
    (body,) = server.bodies
    own = {"min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 8}
    assert {name: body[name] for name in sampling | own} == own | sampling
    answer = server._complete(body)["choices"][0]  # once more, with the same seed
    assert body["prompt"] == generation.prompt_ids
    assert answer["token_ids"] == generation.completion_ids
    assert answer["logprobs"]["token_logprobs"] == generation.logprobs.tolist()


def test_server_errors_and_timeouts_are_retried(server, generate):
    untroubled = generate()
    server.faults = [429, 500, 1.0]
    assert generate(timeout_seconds=0.5).completion_ids == untroubled.completion_ids
    assert not server.faults
    server.faults = [503] * 3
    with pytest.raises(ServerError, match=rf"{server.url}/v1: status 503: not now"):
        generate(max_retries=2)


def test_another_server_than_vllm_is_reported(server, generate, monkeypatch):
    monkeypatch.setattr(server, "get", lambda path: {"data": [{"id": "m"}]})
    with pytest.raises(ServerError, match="does not report max_model_len"):
        generate()
