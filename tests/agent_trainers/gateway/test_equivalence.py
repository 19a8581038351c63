"""An episode through the gateway equals the episode of a rollout."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from agent_trainers import Gateway
from agent_trainers.batching.rows import make_rows
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.gateway.programs import (
    as_it_came,
    as_text,
    chat,
    client_of,
    play,
    streamed,
)
from tests.agent_trainers.gradients import TOLERANCE, assert_close, gradient, micro_batches
from tests.agent_trainers.made import roll_out

ID = "AgentR1/SyntheticMultiHop-v0"
TASKS = [task for task in range(3) for _ in range(4)]


@pytest.fixture(scope="module")
def in_process(policy):
    return roll_out(policy, TASKS)


@pytest.fixture(scope="module")
def played(policy):
    return through_gateway(policy)


def through_gateway(policy, echo=as_it_came, complete=chat, tasks=TASKS):
    env, trajectories = gym.make(ID), []
    with Gateway(policy) as gateway:
        for i, task in enumerate(tasks):
            session = gateway.open(task_id=str(task), group_id=str(task), seed=[7, i])
            trajectories.append(play(session, env, task, complete(client_of(session)), echo))
    return trajectories


def sampled(trajectory):
    return [
        (t.messages, t.prompt_ids, t.completion_ids, t.action, t.terminated, t.truncated)
        for t in trajectory.transitions
    ]


def test_an_episode_is_the_same_in_process_and_through_the_gateway(played, in_process):
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
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=TOLERANCE, atol=TOLERANCE)


def responses(client, **options):
    """Call ``responses``; the reply's items are sent back."""

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
        message = SimpleNamespace(content=reply.output_text, tool_calls=calls, items=items)
        return message, reply.status == "incomplete"

    return complete


def items_back(message):
    """Return the items of a response, which a program sends back."""
    return {"role": "assistant", "items": message.items}


def _items(message):
    if message["role"] == "tool":
        call_id, output = message["tool_call_id"], message["content"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    return message.get("items") or [message]


BACK = {chat: as_it_came, streamed: as_it_came, responses: items_back}


@pytest.mark.parametrize(
    ("complete", "max_new_tokens", "temperature"),
    [  # after 6 tokens the call is whole, but the turn has no end
        pytest.param(streamed, 24, 1.0, id="streamed, whole"),
        pytest.param(responses, 6, 1.0, id="responses, after the call"),
        pytest.param(chat, 10, 2.0, id="chat, anywhere"),
    ],
)
def test_an_episode_is_the_same_at_every_endpoint_and_where_turns_are_cut_off(
    model, tokenizer, complete, max_new_tokens, temperature
):
    policy = transformers_policy(
        model.eval(), tokenizer, max_new_tokens=max_new_tokens, temperature=temperature
    )
    in_process = roll_out(policy, TASKS[:4])
    reasons = [one.stop_reason for one in in_process]
    assert (StopReason.TOKEN_LIMIT in reasons) == (max_new_tokens < 24)
    played = through_gateway(policy, BACK[complete], complete, TASKS[:4])
    assert [sampled(one) for one in played] == [sampled(other) for other in in_process]
    assert [one.stop_reason for one in played] == reasons


CALL = '<tool_call>{"name": "search", "arguments": {"query": "director of a"}}</tool_call>'
TURNS = {
    "nothing": "",
    "white space": " \n",
    "a call": CALL,
    "a call with white space around it": f"\n{CALL}\n\n",
    "text and a call": f"I look it up. {CALL}",
    "a call and text": f"{CALL} So be it.",
    "two calls": f"{CALL}and{CALL}",
    "bad JSON": CALL.replace("}}", "}"),
    "an argument of another type": CALL.replace('"director of a"', "7"),
    "escapes": CALL.replace("director", "d\\u00e9\\ud83d\\ude00 \\n"),
    "a call without an end": CALL.removesuffix("</tool_call>"),
    "no such tool": CALL.replace("search", "look"),
    "a call and an answer": f"{CALL}<answer>x</answer>",
    "an answer without an end": "<answer>x",
    "a call in a thought": f"<think>{CALL}</think>",
    "control characters": "<|im_end|>\0",
    "half a character": "\ud800",
    "half a character in an argument": CALL.replace("director", "\\ud800"),
}


@pytest.mark.parametrize("complete", [chat, streamed, responses])
def test_an_episode_is_the_same_whatever_the_model_writes(complete):
    turns = list(TURNS.values())
    policy = ScriptedPolicy(lambda request: turns[request.episode_id])
    tasks = [0] * len(turns)
    in_process = roll_out(policy, tasks)
    played = through_gateway(policy, BACK[complete], complete, tasks)
    for what, one, other in zip(TURNS, played, in_process, strict=True):
        assert sampled(one) == sampled(other), what
        assert one.rewards == pytest.approx(other.rewards), what
        assert (one.metrics, one.stop_reason) == (other.metrics, other.stop_reason), what


def test_the_gradient_of_episodes_through_the_gateway_is_that_of_episodes_in_process(
    played, in_process, make_trainer
):
    trainer = make_trainer(per_device_train_batch_size=12)
    expected = gradient(trainer, micro_batches(trainer, in_process))
    found = gradient(trainer, micro_batches(trainer, played))
    assert expected.norm() > 1e-3
    assert_close(found, expected)


def test_a_program_that_compacts_has_the_rows_of_the_context_policy(policy):
    context = {"name": "policy", "budget_tokens": 150}
    options = {"context": context, "hops": 4, "max_episode_steps": 12}
    tasks = TASKS[:4]
    in_process = roll_out(policy, tasks, **options)
    env, played = gym.make(ID, **options), []
    with Gateway(policy) as gateway:
        for i, task in enumerate(tasks):
            session = gateway.open(task_id=str(task), group_id=str(task), seed=[7, i])
            complete = chat(client_of(session))
            _, info = env.reset(seed=task, options={"task": task})
            conversation, is_over = [*info["messages"]], False
            while not is_over:
                message, is_cut = complete(conversation, info["tools"])
                num_known = len(info["messages"]) + 1
                _, _, terminated, truncated, info = env.step(as_text(message))
                session.reward(info["reward_terms"])
                is_over = terminated or truncated or is_cut
                if info["action"]["kind"] == "summary":  # the program begins a new conversation
                    conversation = [*info["messages"]]
                    continue
                conversation.append(as_it_came(message))
                calls = [call.id for call in message.tool_calls or ()]
                for reply in info["messages"][num_known:]:
                    is_result = reply["role"] == "tool"
                    own = {"tool_call_id": calls.pop(0)} if is_result else {}
                    conversation.append({**reply, **own})
            reason = None if terminated else "token_limit" if is_cut else "turn_limit"
            played.append(session.close(metrics=info["metrics"], stop_reason=reason))
    rows, expected = ([make_rows(each) for each in episodes] for episodes in (played, in_process))
    assert max(map(len, expected)) > 2
    for own, others in zip(rows, expected, strict=True):
        assert [(row.prompt_ids, row.completion_ids, row.steps) for row in own] == [
            (row.prompt_ids, row.completion_ids, row.steps) for row in others
        ]
        assert [row.is_trained for row in own] == [row.is_trained for row in others]
