"""Our commands and policies against vLLM's server."""

import contextlib
import json

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` does it")

from agent_leaderboard import cli
from agent_leaderboard.records.results import read_run
from agent_leaderboard.verify.verify import check_run
from agent_trainers import TINY_POLICY, Gateway
from agent_trainers.cli import evaluate
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.local import eos_ids
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.trajectory import load_trajectories
from tests.agent_leaderboard.test_served_run import CONFIG
from tests.agent_trainers.gateway.programs import FORM, TOOL, client_of
from tests.vllm.test_engine import SAMPLING, logprobs_of, request, roll_out


@pytest.fixture(scope="module")
def model():
    return load_model(str(TINY_POLICY), "float32").eval()


@pytest.fixture(scope="module")
def connect(server):
    """Connect to the server with these sampling settings."""
    tokenizer = load_tokenizer(str(TINY_POLICY))
    with contextlib.ExitStack() as stack:

        def connect(**sampling):
            options = {"max_new_tokens": 24, "eos_token_ids": eos_ids(None, tokenizer)} | sampling
            renderer, settings = ChatRenderer(tokenizer), SamplingSettings(**options)
            policy = VLLMServerPolicy(server, renderer, settings)
            return stack.enter_context(contextlib.closing(policy))

        yield connect


def test_the_command_evaluates_a_served_model(server, tmp_path):
    path = tmp_path / "episodes.jsonl"
    evaluate.main([
        "--base_url", f"{server}/v1", "--model", "policy", "--num_tasks", "8",
        "--max_completion_length", "24", "--trajectories", str(path),
    ])  # fmt: skip
    episodes = load_trajectories(path)
    assert [episode.error for episode in episodes] == [None] * 8
    assert sum(len(episode.transitions) for episode in episodes) > 8


def test_a_leaderboard_of_a_served_model_verifies(server, tmp_path):
    settings = {"model": "policy", "max_new_tokens": 24}
    agents = [
        {"name": name, "kind": name, "settings": settings} for name in ("base_tool_call", "react")
    ]
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(CONFIG | {"agents": agents}), encoding="utf-8")
    cli.main(["--config", str(config), "--output", str(run), "--base_url", f"{server}/v1"])
    assert check_run(run).problems == []
    for results in read_run(run).results.values():
        assert [one.error for one in results] == [None] * 3


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda s: "-".join(s) or "plain")
def test_recorded_log_probabilities_are_those_of_the_sampling_distribution(
    connect, model, sampling
):
    policy = connect(**sampling)
    steps = [step for episode in roll_out(policy, 8) for step in episode.transitions]
    assert len(steps) > 8
    for step in steps:
        expected = logprobs_of(model, policy.settings, step.prompt_ids, step.completion_ids)
        np.testing.assert_allclose(step.logprobs, expected, atol=1e-3)


def test_a_turn_ends_at_any_stop_token(connect):
    (free,) = connect().generate([request()])
    stop = free.completion_ids[0]
    (stopped,) = connect(eos_token_ids=(stop,)).generate([request()])
    assert (stopped.completion_ids, stopped.finish_reason) == ([stop], "stop")


def test_a_program_behind_the_gateway_records_the_tokens_of_the_server(connect, model):
    policy = connect()
    with Gateway(policy) as gateway:
        session = gateway.open(task_id="0", seed=5)
        messages = [{"role": "user", "content": "where ?"}]
        client_of(session).chat.completions.create(model="any", messages=messages)
        (step,) = session.close(1.0).transitions
    expected = logprobs_of(model, policy.settings, step.prompt_ids, step.completion_ids)
    np.testing.assert_allclose(step.logprobs, expected, atol=1e-3)


@pytest.fixture(scope="module", params=["engine", "server"])
def guided(request, tmp_path_factory):
    """A random model with a tokenizer of parts of words, in the engine and behind the server."""
    from agent_trainers.policies.engines import load_engine_policy
    from tests.agent_trainers.real_models import save_model
    from tests.vllm.conftest import vllm_serve

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("guided")
    model = save_model(folder / "model", "qwen3", hidden_size=64, head_dim=32)
    if request.param == "engine":
        yield load_engine_policy(model, max_new_tokens=200, dtype="float32")
        return
    tokenizer = load_tokenizer(model)
    ends = eos_ids(None, tokenizer)
    with vllm_serve(model, folder) as url:
        settings = SamplingSettings(max_new_tokens=200, eos_token_ids=ends)
        policy = VLLMServerPolicy(url, ChatRenderer(tokenizer), settings)
        with contextlib.closing(policy):
            yield policy


def test_guided_turns_follow_schemas_and_required_calls(guided):
    with Gateway(guided) as gateway:
        session = gateway.open(task_id="0")

        def ask(**options):
            messages = [{"role": "user", "content": "hello"}]
            client = client_of(session)
            reply = client.chat.completions.create(model="any", messages=messages, **options)
            return reply.choices[0].message

        answer = ask(response_format=FORM)
        assert json.loads(answer.content)["city"] in ("Oslo", "Rome")
        (call,) = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        steps = session.close(1.0).transitions
    for step in steps:  # vLLM applies the guide first, so its log-probabilities are not the model's
        assert np.isnan(step.logprobs).all()
