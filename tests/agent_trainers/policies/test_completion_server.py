"""Rollouts and training on a fake vLLM server over HTTP."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent_envs.errors import ServerError
from agent_trainers import StepGRPOTrainer
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.trainers.generation import TrainerGenerator
from tests.agent_trainers.made import request
from tests.agent_trainers.vllm_stand_in import VLLMStandIn, serving, vllm_at_hand

ID = "AgentR1/SyntheticMultiHop-v0"


class Process:
    """One of several processes, as a thread."""

    def __init__(self, index, parts):
        self.index, self.size, self._parts = index, len(parts), parts

    def all_gather_objects(self, items):
        self._parts[self.index] = items
        self.barrier.wait(60)
        gathered = [item for part in self._parts for item in part]
        self.barrier.wait(60)
        return gathered

    def num_before(self, count):
        numbers = self.all_gather_objects([count])
        return sum(numbers[: self.index])


@pytest.mark.parametrize("numbers", [(3, 1), (0, 2), (1, 1), (0, 0)])
def test_processes_of_one_engine_share_its_work_and_get_their_own_completions(numbers):
    asked, got = [None, None], [None, None]
    Process.barrier = threading.Barrier(len(numbers))

    def run(process):
        def generate(prompts, *_, **__):
            asked[process.index] = len(prompts)
            return [[*p, 0] for p in prompts], [[-1.0] * (len(p) + 1) for p in prompts]

        generator = TrainerGenerator.__new__(TrainerGenerator)
        generator._processes, generator._in_waves = process, True
        generator._trainer = SimpleNamespace(_generate_single_turn=generate)
        prompts = [[process.index, i] for i in range(numbers[process.index])]
        got[process.index] = [c.token_ids for c in generator._complete(prompts, [])]

    parts = [None] * len(numbers)
    with ThreadPoolExecutor() as pool:
        list(pool.map(run, [Process(i, parts) for i in range(len(numbers))]))
    assert got == [[[p, i, 0] for i in range(number)] for p, number in enumerate(numbers)]
    # TRL needs equal numbers, so a request is filled up by one prompt at most
    assert asked[0] == asked[1] == (-(-sum(numbers) // 2) or None)


def test_the_server_gets_the_weights_once_per_optimiser_step(tiny_policy, tokenizer, make_config):
    pytest.importorskip("requests", reason="TRL's client needs requests")
    stand_in = VLLMStandIn(tiny_policy, [tokenizer.eos_token_id])
    with serving(stand_in) as url, vllm_at_hand(stand_in):
        config = make_config(
            max_steps=2, learning_rate=0.3, optim="sgd", use_vllm=True, vllm_mode="server",
            vllm_server_base_url=url,
        )  # fmt: skip
        trainer = StepGRPOTrainer(tiny_policy, ID, config, processing_class=tokenizer)
        trainer.train()
    assert stand_in.calls.count("/update_weights") == 2
    assert stand_in.calls.count("/init_weight_transfer_engine") == 1
    updates = [call for call in stand_in.calls if call != "/v1/completions"][1:5]
    assert updates == [
        "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache",
    ]  # fmt: skip
    # the last update was before the last optimiser step
    served, trained = dict(stand_in.model.named_parameters()), trainer.model.named_parameters()
    assert 0 < max((served[name] - weight).abs().max() for name, weight in trained) < 0.5


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
        with contextlib.closing(policy):
            (generation,) = policy.generate([request(3)])
        return generation

    return generate


def test_tokens_and_log_probabilities_are_the_servers_by_all_sampling_settings(server, generate):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    generation = generate(replace(SETTINGS, **sampling))
    (body,) = server.bodies
    own = {"min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 8, "stop_token_ids": [2]}
    own |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
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


@pytest.mark.parametrize(
    "reply", ['"busy"', {}, {"choices": []}, {"choices": [{"token_ids": [1], "logprobs": None}]}]
)
def test_a_reply_without_tokens_and_log_probabilities_is_reported(
    server, generate, monkeypatch, reply
):
    monkeypatch.setattr(server, "post", lambda *_: reply)
    with pytest.raises(ServerError, match="the reply is not a completion"):
        generate()
