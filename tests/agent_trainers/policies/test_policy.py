"""Custom policies, and wrappers around policies."""

from dataclasses import replace

import pytest
import torch

from agent_envs import ConfigurationError
from agent_trainers.policies import Generation, Policy, PolicyWrapper, ScriptedPolicy, Usage
from agent_trainers.policies.policy import ConcurrentStream
from agent_trainers.policies.sampling import SamplingSettings, draw
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import roll_out


def test_a_custom_policy_only_needs_generate():
    class Shouting(Policy):
        def generate(self, requests):
            return [Generation(text=r.messages[-1]["content"].upper()) for r in requests]

    for trajectory in roll_out(Shouting(), range(6)):
        assert trajectory.stop_reason is StopReason.TURN_LIMIT
        first = trajectory.transitions[0]
        assert first.action == first.messages[-1]["content"].upper()


class Quoting(PolicyWrapper):
    """Answer the first turn itself, and change the later ones to upper case."""

    def before(self, request):
        if request.previous is None:
            return Generation(text="by myself", usage=Usage())
        messages = [*request.messages, {"role": "user", "content": "Hurry."}]
        return replace(request, messages=messages)

    def after(self, request, generation):
        assert request.messages[-1]["content"] != "Hurry."
        return replace(generation, text=generation.text.upper())


@pytest.mark.parametrize("max_concurrency", [None, 4])
def test_a_wrapper_changes_requests_and_generations(max_concurrency):
    asked = []

    def act(request):
        asked.append(request.messages[-1]["content"])
        return "hm"

    policy = ScriptedPolicy(act)
    policy.max_concurrency = max_concurrency
    for trajectory in roll_out(Quoting(policy), range(6)):
        actions = [step.action for step in trajectory.transitions]
        assert actions == ["by myself", *["HM"] * (len(actions) - 1)]
        assert trajectory.usage["calls"] == len(actions) - 1
    assert set(asked) == {"Hurry."}


def test_a_server_that_takes_no_request_is_refused():
    with pytest.raises(ConfigurationError, match="max_concurrency must be at least 1, not 0"):
        ConcurrentStream(lambda requests: [], 0)


def test_every_token_of_a_large_vocabulary_has_its_own_share_of_the_points():
    """Token k owns [k / V, (k + 1) / V): a thousandth into it, float32 could not tell it."""
    size = 200_003
    tokens = torch.arange(1_000, size, size // 64)
    points = (tokens.double() + 1e-3) / size
    drawn, _ = draw(torch.zeros(1, size).expand(len(tokens), -1), points)
    assert drawn.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("changes", "is_truncated"),
    [
        ({}, False), ({"temperature": 0.7}, False), ({"temperature": 0.0}, True),
        ({"top_p": 0.9}, True), ({"top_k": 1}, True), ({"min_p": 0.1}, True),
        ({"repetition_penalty": 0.9}, True), ({"repetition_penalty": 1.1}, True),
    ],
)  # fmt: skip
def test_a_cut_distribution_is_not_that_of_the_model(changes, is_truncated):
    settings = SamplingSettings(max_new_tokens=1, eos_token_ids=(), **changes)
    assert settings.is_truncated is is_truncated
    unchanged = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    assert settings.distribution == unchanged | {"repetition_penalty": 1.0} | changes
