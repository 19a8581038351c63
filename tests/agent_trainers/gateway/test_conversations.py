"""Which messages of a program are sampled turns."""

import json
import time
from types import SimpleNamespace

import gymnasium as gym
import openai
import pytest

from agent_trainers.batching.rows import make_rows
from agent_trainers.gateway.requests import ApiCall, ApiMessage
from agent_trainers.gateway.turns import read_conversation
from tests.agent_trainers.gateway.programs import as_it_came, client_of

QUESTION = {"role": "user", "content": "what is the employer of the star of amber island ?"}
ASK = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tools():
    _, info = gym.make("AgentR1/SyntheticMultiHop-v0").reset(seed=0)
    return info["tools"]


@pytest.fixture
def episode(gateway, tools):
    """A session in which the model has called a tool, with its message."""
    session = gateway.open(task_id="0", seed=[7, 0])
    client = client_of(session)

    def complete(*messages, **options):
        return client.chat.completions.create(
            model="any", messages=list(messages), **({"tools": tools} | options)
        )

    message = complete(QUESTION).choices[0].message
    assert message.tool_calls
    return SimpleNamespace(session=session, complete=complete, message=message)


def result(call, content="the star of amber island is tilda ekberg ."):
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def changed(**members):
    return lambda message: message | members


def other_arguments(write):
    def change(message):
        (call,) = message["tool_calls"]
        function = call["function"]
        written = write(json.loads(function["arguments"]))
        return message | {"tool_calls": [call | {"function": function | {"arguments": written}}]}

    return change


SAME = {
    "as it came": changed(),
    "no content": changed(content=None),
    "empty content": changed(content=""),
    "parts": changed(content=[{"type": "text", "text": ""}]),
    "formatted arguments": other_arguments(lambda a: json.dumps(a, indent=2, sort_keys=True)),
    "members of others": changed(
        reasoning_content="hm", name="agent", refusal=None, annotations=[]
    ),
    "another id": lambda m: m | {"tool_calls": [m["tool_calls"][0] | {"id": "call-of-mine"}]},
    "an index": lambda m: m | {"tool_calls": [m["tool_calls"][0] | {"index": 0}]},
}
OTHER = {
    "more content": changed(content="I search."),
    "other arguments": other_arguments(lambda a: json.dumps({"query": "something else"})),
    "arguments that are no JSON": other_arguments(lambda a: "{"),
    "a call more": lambda m: m | {"tool_calls": [*m["tool_calls"], m["tool_calls"][0]]},
}


def rendered(policy, messages, tools):
    return policy._renderer.prompt_ids(messages, tools, None)


@pytest.mark.parametrize("change", [*SAME.values(), *OTHER.values()], ids=[*SAME, *OTHER])
def test_a_message_with_the_turns_meaning_keeps_its_tokens_and_others_are_rendered_again(
    episode, change, policy, tools
):
    echo = change(as_it_came(episode.message))
    episode.complete(QUESTION, echo, result(echo["tool_calls"][0]))
    trajectory = episode.session.close(1.0)
    first, second = trajectory.transitions
    start = [*first.prompt_ids, *first.completion_ids]
    is_same = change in SAME.values()
    assert (second.messages[1] == {"role": "assistant", "content": first.action}) == is_same
    assert len(make_rows(trajectory)) == (1 if is_same else 2)
    if is_same:
        assert second.prompt_ids[: len(start)] == start
    else:
        assert second.messages[1]["content"] != first.action
        assert second.prompt_ids == rendered(policy, second.messages, tools)


def test_other_tools_are_another_state_and_a_result_needs_its_call(episode, policy, tools):
    echo = as_it_came(episode.message)
    with pytest.raises(openai.BadRequestError, match="no tool call 'missing'"):
        episode.complete(QUESTION, result({"id": "missing"}))
    episode.complete(QUESTION, echo, result(echo["tool_calls"][0]), tools=[*tools, ASK])
    first, second = episode.session.close(1.0).transitions
    assert second.messages[1]["content"] == first.action
    assert second.prompt_ids == rendered(policy, second.messages, [*tools, ASK])


def test_forks_are_rows_and_the_main_conversation_keeps_its_tokens(episode):
    echo = as_it_came(episode.message)
    found = result(echo["tool_calls"][0])
    second = episode.complete(QUESTION, echo, found).choices[0].message
    helper = {"role": "user", "content": "who is tilda ekberg ?"}
    messages = as_it_came(episode.complete(helper, tools=[]).choices[0].message)
    episode.complete(helper, messages, {"role": "user", "content": "and ?"}, tools=[])
    again = {"role": "user", "content": "so ?"}
    episode.complete(QUESTION, echo, found, {"role": "assistant", "content": second.content}, again)
    compacted = {"role": "user", "content": "amber island : tilda ekberg ."}
    episode.complete(QUESTION, compacted)
    trajectory = episode.session.close(1.0)
    assert [row.steps[-1] for row in make_rows(trajectory)] == [1, 3, 4, 5]
    main = trajectory.transitions[1]
    start = [*main.prompt_ids, *main.completion_ids]
    if second.content:
        assert trajectory.transitions[4].prompt_ids[: len(start)] == start


def test_consecutive_results_are_read_in_linear_time():
    call = ApiCall(id="a", name="f", arguments="{}")
    messages = [ApiMessage(role="user", content="hi"), ApiMessage(role="assistant", calls=[call])]
    messages += [ApiMessage(role="tool", content="x" * 300, call_id="a")] * 20_000
    began = time.process_time()
    read, _ = read_conversation(messages, [], None)
    # 0.1 s; quadratic time would be 20 s, in which all sessions wait
    assert time.process_time() - began < 2
    assert [message["role"] for message in read] == ["user", "assistant", *["tool"] * 20_000]
