"""vLLM's engine in this process against transformers: tokens, log-probabilities, streams, ends."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` does it")

from agent_trainers import TINY_POLICY, Rollout
from agent_trainers.policies.engines import EnginePolicy, load_engine_policy
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import load_model
from agent_trainers.policies.policy import GenerationRequest
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture(scope="module")
def policy():
    return load_engine_policy(str(TINY_POLICY))


@pytest.fixture(scope="module")
def model():
    return load_model(str(TINY_POLICY), "float32").eval()


@pytest.fixture
def with_settings(policy):
    """The policy with other sampling settings, on the same engine."""

    def change(**changes):
        return EnginePolicy(
            policy._renderer, policy._engine, replace(policy.settings, **changes),
            max_prompt_tokens=policy._max_prompt_tokens, guides=policy._tags,
        )  # fmt: skip

    return change


def roll_out(policy, number=16):
    rollout = Rollout(lambda: gym.make(ID), policy)
    specs = [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng(i))
        for i in range(number)
    ]
    episodes = rollout.collect(specs)
    rollout.close()
    return episodes


def request(number=0, prompt=None, **options):
    messages = [{"role": "user", "content": "where ?"}]
    return GenerationRequest(
        episode_id=number, messages=messages, tools=None, previous=None,
        rng=np.random.default_rng(number), prompt_ids=prompt, **options,
    )  # fmt: skip


def logprobs_of(model, settings, prompt, tokens):
    """Log-probabilities of sampled tokens by transformers, with the same sampling settings."""
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    found = []
    for i, token in enumerate(tokens):
        scores = logits[i : i + 1]
        if settings.repetition_penalty != 1.0:
            penalty = RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
            scores = penalty(ids[:, : len(prompt) + i], scores)
        for warper in settings.warpers():
            scores = warper(None, scores)
        found.append(float(scores.log_softmax(-1)[0, token]))
    return np.array(found, np.float32)


SAMPLING = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2, "temperature": 1.3},
    {"repetition_penalty": 1.3},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda s: "-".join(s) or "plain")
def test_recorded_log_probabilities_are_those_of_the_sampling_distribution(
    with_settings, model, sampling
):
    policy = with_settings(**sampling)
    episodes = roll_out(policy)
    steps = [step for episode in episodes for step in episode.transitions]
    assert all(episode.error is None for episode in episodes)
    assert len(steps) > len(episodes)
    for step in steps:
        expected = logprobs_of(model, policy.settings, step.prompt_ids, step.completion_ids)
        np.testing.assert_allclose(step.logprobs, expected, atol=1e-3)


def test_greedy_episodes_are_those_of_transformers(with_settings):
    sampled = roll_out(with_settings(temperature=0.0))
    expected = roll_out(load_policy(str(TINY_POLICY), dtype="float32", temperature=0.0))
    texts = [[[step.action for step in e.transitions] for e in run] for run in (sampled, expected)]
    assert texts[0] == texts[1]


def test_a_turn_ends_at_any_stop_token_and_at_the_longest_turn(with_settings, policy):
    (free,) = policy.generate([request()])
    stop = free.completion_ids[0]
    (stopped,) = with_settings(eos_token_ids=(stop,)).generate([request()])
    assert (stopped.completion_ids, stopped.finish_reason) == ([stop], "stop")
    (cut,) = with_settings(max_new_tokens=1).generate([request()])
    assert (len(cut.completion_ids), cut.finish_reason) == (1, "length")


def test_a_turn_does_not_depend_on_the_others_of_the_batch(policy):
    (alone,) = policy.generate([request(3)])
    together = policy.generate([request(number) for number in range(8)])
    assert together[3].completion_ids == alone.completion_ids


def test_turns_join_and_leave_the_batch_one_by_one(with_settings):
    policy = with_settings(eos_token_ids=(), max_new_tokens=24)
    prompt = policy.encode(request())
    stream = policy.open_stream()
    stream.add(0, request(0, prompt))
    for _ in range(12):
        assert stream.advance() == []
    stream.add(1, request(1, prompt))
    ends = []
    while stream.has_requests:
        ends += [key for key, _ in stream.advance()]
        if ends == [0]:  # while the second turn is in its middle
            stream.add(2, request(2, prompt))
            stream.drop(2)
            ends.append(None)
    assert ends == [0, None, 1]
    stream.close()
    assert not policy._engine.has_unfinished_requests()


def test_a_state_that_does_not_fit_is_an_overflow(policy):
    (generation,) = policy.generate([request(prompt=None)])
    assert generation.finish_reason != "overflow"
    long = [{"role": "user", "content": "where ? " * 1000}]
    (generation,) = policy.generate([replace(request(), messages=long)])
    assert (generation.finish_reason, generation.completion_ids) == ("overflow", [])


def test_the_commands_evaluate_with_vllm(capsys, tmp_path):
    from agent_trainers.cli import evaluate

    output = tmp_path / "result.json"
    evaluate.main(["--use_vllm", "--num_tasks", "16", "--output", str(output)])
    assert "SyntheticMultiHop" in capsys.readouterr().out
    assert StopReason.POLICY_ERROR.value not in output.read_text(encoding="utf-8")
