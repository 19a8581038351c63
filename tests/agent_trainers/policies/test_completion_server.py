"""Rollouts and training on a fake vLLM server over HTTP."""

import contextlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from agent_envs.errors import ServerError
from agent_trainers.cli import train
from agent_trainers.policies import GenerationRequest
from agent_trainers.policies.completion_server import VLLMServerPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.recipes import FOLDER
from agent_trainers.trainers.generation import equal_shares
from tests.agent_trainers.vllm_stand_in import VLLMStandIn, serving

REPOSITORY = Path(__file__).parents[3]

needs_requests = pytest.mark.skipif(
    importlib.util.find_spec("requests") is None, reason="TRL's client needs requests"
)


def run(output, num_processes):
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(num_processes)]
    result = subprocess.run(
        [*launcher, "-m", "tests.agent_trainers.policies.vllm_server_run", str(output)],
        capture_output=True, text=True, timeout=200, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results of one and two processes on the same batches, sampled by one server."""
    folder = tmp_path_factory.mktemp("server")
    return run(folder / "one.pt", 1), run(folder / "two.pt", 2)


@needs_requests
def test_two_processes_with_one_server_train_the_weights_of_one_process(trained):
    one, two = trained
    assert two["reward"] == pytest.approx(one["reward"])
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=1e-6), name


@needs_requests
def test_processes_may_have_unequal_numbers_of_prompts_or_none(trained):
    first, second = trained[1]["brought"]
    assert len(first) == len(second)  # every call is made by both
    assert any(a != b for a, b in zip(first, second, strict=True))
    assert 0 in first + second
    # one completion per prompt, and a request is filled up by one prompt at most
    needed = [a + b for a, b in zip(first, second, strict=True)]
    assert trained[1]["asked"] == [count + count % 2 for count in needed]
    assert trained[0]["asked"] == trained[0]["brought"][0] == needed


@needs_requests
def test_the_server_gets_the_weights_once_per_optimiser_step(trained):
    for result in trained:
        assert result["calls"].count("/update_weights") == 3
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


def test_shares_are_equal_and_complete_and_ordered():
    assert equal_shares([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5, 1]]
    assert equal_shares([1], 3) == [[1], [1], [1]]
    assert equal_shares([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert equal_shares([], 2) == [[], []]


def test_the_server_recipe_only_differs_in_the_options_of_vllm():
    server, colocated = (
        yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        for name in ("hotpotqa_grpo_server.yaml", "hotpotqa_grpo.yaml")
    )
    arguments = ["--config", "hotpotqa_grpo_server", "--use_cpu", "--bf16", "false"]
    _, config = train.parse_arguments(arguments)
    assert config.vllm_mode == "server"
    differing = {name for name in server | colocated if server.get(name) != colocated.get(name)}
    assert {name for name in differing if not name.startswith("vllm_")} == {"output_dir"}


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


def test_tokens_and_log_probabilities_are_the_servers(server, generate):
    generation = generate()
    (body,) = server.bodies
    answer = server._complete(body)["choices"][0]  # once more, with the same seed
    assert body["prompt"] == generation.prompt_ids
    assert answer["token_ids"] == generation.completion_ids
    assert answer["logprobs"]["token_logprobs"] == generation.logprobs.tolist()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}]
)
def test_all_sampling_settings_are_sent(server, generate, sampling):
    generate(replace(SETTINGS, **sampling))
    (body,) = server.bodies
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: body[name] for name in own} == own | sampling
    assert body["max_tokens"] == 8


@pytest.mark.parametrize("faults", [[429, 500, 503], [1.0]])
def test_server_errors_and_timeouts_are_retried(server, generate, faults):
    untroubled = generate()
    server.faults = list(faults)
    assert generate(timeout_seconds=0.5).completion_ids == untroubled.completion_ids
    assert not server.faults


def test_a_persistent_server_error_is_raised(server, generate):
    server.faults = [503] * 3
    with pytest.raises(ServerError, match=rf"{server.url}/v1: status 503: not now"):
        generate(max_retries=2)
    assert not server.faults


def test_another_server_than_vllm_is_reported(server, generate, monkeypatch):
    monkeypatch.setattr(server, "get", lambda path: {"data": [{"id": "m"}]})
    with pytest.raises(ServerError, match="does not report max_model_len"):
        generate()


def test_requests_on_a_closed_connection_fail(server, tokenizer):
    policy = VLLMServerPolicy(server.url, ChatRenderer(tokenizer), SETTINGS)
    policy.close()
    with pytest.raises(ServerError, match="the connection was closed"):
        policy._complete_all([[1]], [np.random.default_rng(0)])
