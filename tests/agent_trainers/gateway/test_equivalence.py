"""An episode through the gateway is the episode that a rollout would have played."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from agent_trainers import Gateway, Rollout, StepGRPOTrainer
from agent_trainers.rollout.collector import EpisodeSpec
from tests.agent_trainers.gateway.programs import as_it_came, chat, client_of, play
from tests.agent_trainers.gradients import gradient, micro_batches

ID = "AgentR1/SyntheticMultiHop-v0"
TASKS = [task for task in range(3) for _ in range(4)]


@pytest.fixture
def in_process(policy):
    specs = [
        EpisodeSpec(task=task, seed=task, group_id=str(task), rng=np.random.default_rng([7, i]))
        for i, task in enumerate(TASKS)
    ]
    return Rollout(lambda: gym.make(ID), policy).collect(specs)


def through_gateway(policy, echo=as_it_came, complete=chat):
    env, trajectories = gym.make(ID), []
    with Gateway(policy) as gateway:
        for i, task in enumerate(TASKS):
            session = gateway.open(task_id=str(task), group_id=str(task), seed=[7, i])
            trajectories.append(play(session, env, task, complete(client_of(session)), echo))
    return trajectories


def sampled(trajectory):
    # to Gymnasium's turn limit an answer in the last turn is truncated, too; a program only ends
    return [
        (
            t.messages,
            t.prompt_ids,
            t.completion_ids,
            t.action,
            t.terminated,
            t.truncated and not t.terminated,
        )
        for t in trajectory.transitions
    ]


def test_an_episode_is_the_same_in_process_and_through_the_gateway(policy, in_process):
    played = through_gateway(policy)
    assert max(len(trajectory.transitions) for trajectory in played) > 2
    for one, other in zip(played, in_process, strict=True):
        assert sampled(one) == sampled(other)
        assert one.stop_reason == other.stop_reason
        assert one.rewards == pytest.approx(other.rewards)
        assert [t.reward_terms for t in one.transitions] == [
            t.reward_terms for t in other.transitions
        ]
        assert one.usage == other.usage
        assert one.metrics == other.metrics
        if not one.transitions[-1].terminated:
            assert one.final_prompt_ids == other.final_prompt_ids
        for a, b in zip(one.transitions, other.transitions, strict=True):
            assert a.logprobs.dtype == np.float32
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def responses(client, **options):
    """Ask for responses; what is sent back are the items that came."""

    def complete(messages, tools):
        reply = client.responses.create(
            model="any",
            input=[item for message in messages for item in _items(message)],
            tools=[{"type": "function", **tool["function"]} for tool in tools],
            **options,
        )
        calls = [
            SimpleNamespace(id=item.call_id, function=item)
            for item in reply.output
            if item.type == "function_call"
        ]
        items = [item.model_dump() for item in reply.output]
        return SimpleNamespace(content=reply.output_text, tool_calls=calls, items=items)

    return complete


def _items(message):
    if message["role"] == "tool":
        call_id, output = message["tool_call_id"], message["content"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    return message.get("items") or [message]


def streamed(client):
    """Ask for chat completions, chunk by chunk."""

    def complete(messages, tools):
        with client.chat.completions.stream(model="any", messages=messages, tools=tools) as stream:
            return stream.get_final_completion().choices[0].message

    return complete


@pytest.mark.parametrize(
    ("complete", "echo"),
    [
        pytest.param(responses, lambda m: {"role": "assistant", "items": m.items}, id="responses"),
        pytest.param(streamed, as_it_came, id="streamed"),
    ],
)
def test_every_endpoint_plays_the_same_episode(policy, in_process, complete, echo):
    played = through_gateway(policy, echo, complete)
    assert [sampled(one) for one in played] == [sampled(other) for other in in_process]


def test_the_gradient_of_episodes_through_the_gateway_is_that_of_episodes_in_process(
    policy, in_process, tiny_policy, tokenizer, make_config
):
    config = make_config(per_device_train_batch_size=12)
    trainer = StepGRPOTrainer(tiny_policy, ID, config, processing_class=tokenizer)
    expected = gradient(trainer, micro_batches(trainer, in_process))
    found = gradient(trainer, micro_batches(trainer, through_gateway(policy)))
    assert expected.norm() > 1e-3
    assert (found - expected).abs().max() < 1e-7
