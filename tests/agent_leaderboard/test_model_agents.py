"""Agents on a model: the embedded policy, and servers."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_leaderboard.agents.agent import AGENTS, build_agent
from agent_trainers import TINY_POLICY
from agent_trainers.policies import Usage
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.chat_server import chat_server, refuses, says

MODEL = {"model": str(TINY_POLICY), "concurrency": 8}
MULTI_HOP, ARITHMETIC = "AgentR1/SyntheticMultiHop-v0", "AgentR1/SyntheticArithmetic-v0"
KINDS = [name for name, kind in AGENTS.items() if kind.needs_model and name != "program"]


def specs(count=3, seed=0):
    return [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng([seed, i]))
        for i in range(count)
    ]


def run_agent(kind, settings, env_id=MULTI_HOP, count=3, **kwargs):
    tool_format = settings.get("tool_format", AGENTS[kind].tool_format)
    if tool_format is not None:
        kwargs["tool_format"] = tool_format
    agent = build_agent(kind, settings)
    return agent.play(lambda: gym.make(env_id, **kwargs), specs(count))


@pytest.mark.parametrize("kind", KINDS)
def test_every_agent_runs_on_a_local_model_and_reports_usage(kind):
    small = {"reflexion": {"trials": 2}, "best_of_n": {"samples": 2}}.get(kind, {})
    played = run_agent(kind, MODEL | small, count=2)
    assert len(played) == 2
    for one in played:
        assert one.trajectory.error is None
        assert one.usage.calls > 0
        assert one.usage.prompt_tokens > one.usage.calls


def test_the_model_is_called_once_per_turn_and_a_search_by_plan_costs_nothing():
    for episode in run_agent("base_tool_call", MODEL):
        assert episode.usage.calls == len(episode.trajectory.transitions)
        assert episode.attempts == ()
    for episode in run_agent("naive_rag", MODEL):
        kinds = [step.info["action"]["kind"] for step in episode.trajectory.transitions]
        assert episode.usage.calls == len(kinds) - kinds.count("tool_call")


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        ("react", MODEL | {"temprature": 1}, UnknownNameError, "Did you mean 'temperature'"),
        ("react", {}, ConfigurationError, "Setting 'model' of react"),
        ("react", MODEL | {"dtype": "int"}, ConfigurationError, "Setting 'dtype' of react"),
        ("best_of_n", MODEL | {"temperature": 0}, ConfigurationError, "temperature 0"),
        ("reflexion", MODEL | {"trials": 0}, ConfigurationError, "'trials' of reflexion"),
        ("checkpoint", {"model": "no/where"}, ConfigurationError, "no model in no/where"),
    ],
)
def test_wrong_settings_are_named(kind, settings, error, message):
    with pytest.raises(error, match=message):
        build_agent(kind, settings)


def test_options_of_a_chat_template_cannot_replace_the_prompt():
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for options in (
        *({name: True} for name in own - {"self", "kwargs"}),
        {"messages": "x"},
        {"style": "x" * 33},
        {"style": ["x"]},
        {"style": 0.5},
    ):
        with pytest.raises(ConfigurationError, match="Setting 'chat_template_kwargs"):
            build_agent("react", MODEL | {"chat_template_kwargs": options})
    options = {"enable_thinking": False, "reasoning_effort": "high", "thinking_budget": 512}
    agent = build_agent("react", MODEL | {"chat_template_kwargs": options})
    assert agent.settings.chat_template_kwargs == options


@pytest.mark.parametrize(
    ("kind", "settings", "env_id", "message"),
    [
        ("naive_rag", {}, ARITHMETIC, "Agent 'naive_rag' needs .*SyntheticArith.* lacks"),
        ("iterative_rag", {"iterations": 7}, MULTI_HOP, "'iterative_rag' takes 8 turns .* after 4"),
        ("base_tool_call", {"tool_format": "openai"}, MULTI_HOP,
         "tool_format openai is for served models"),
    ],
)  # fmt: skip
def test_an_agent_that_does_not_fit_is_refused(kind, settings, env_id, message):
    with pytest.raises(ConfigurationError, match=message):
        run_agent(kind, MODEL | settings, env_id)


@pytest.fixture
def server():
    """A server whose model answers better once it reads its reflection."""
    pytest.importorskip("openai", reason="the extra openai is not installed")

    def reply(body, _):
        system, *_ = [m["content"] for m in body["messages"] if m["role"] == "system"] or [""]
        text = " ".join(str(m["content"]) for m in body["messages"])
        if "learn from your mistakes" in system:
            return says("I said what I did not know.", usage=(100, 10))
        answer = "<answer>wiser</answer>" if "What you noted then" in text else "<answer>x</answer>"
        return says(answer, usage=(50, 5))

    with chat_server(reply) as running:
        yield running


def test_reflexion_retries_with_its_reflection(server):
    settings = {"model": "m", "base_url": server.url, "trials": 2}
    (episode,) = run_agent("reflexion", settings, count=1)
    assert [t.action for t in episode.trajectory.transitions] == ["<answer>wiser</answer>"]
    (first,) = episode.attempts
    assert [t.action for t in first.transitions] == ["<answer>x</answer>"]
    # two turns and one reflection
    assert episode.usage == Usage(calls=3, prompt_tokens=200, completion_tokens=20)
    reminded = server.bodies[-1]["messages"][1]["content"]
    assert "- I said what I did not know." in reminded
    attempt = server.bodies[1]["messages"][-1]["content"]
    assert "You: <answer>x</answer>" in attempt


def test_best_of_n_takes_the_most_frequent_answer():
    answers = iter(["b", "The A.", "a"])
    with chat_server(lambda *_: says(f"<answer>{next(answers)}</answer>")) as running:
        settings = {"model": "m", "base_url": running.url, "samples": 3, "concurrency": 1}
        (episode,) = run_agent("best_of_n", settings, count=1)
    assert episode.trajectory.transitions[-1].info["action"]["answer"] == "The A."
    assert len(episode.attempts) == 2
    assert episode.usage.calls == 3


def test_an_infrastructure_failure_during_reflection_fails_the_episode():
    def reply(body, _):
        is_reflection = "learn from your mistakes" in body["messages"][0]["content"]
        return refuses(400, "no") if is_reflection else says("<answer>x</answer>")

    with chat_server(reply) as running:
        settings = {"model": "m", "base_url": running.url, "trials": 2}
        (episode,) = run_agent("reflexion", settings, count=1)
    assert episode.trajectory.stop_reason is StopReason.POLICY_ERROR
    assert not episode.trajectory.is_scorable
    assert "status 400: no" in episode.trajectory.error
    assert [t.action for t in episode.attempts[0].transitions] == ["<answer>x</answer>"]
