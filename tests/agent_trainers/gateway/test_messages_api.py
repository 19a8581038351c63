"""Anthropic's Messages API: its requests, replies, streams and errors."""

import json

import pytest

from agent_trainers.batching.rows import make_rows
from tests.agent_trainers.gateway.programs import shared_client

USER = [{"role": "user", "content": "hello"}]
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def post(session, messages=USER, path="messages", headers=None, **options):
    body = {"model": "any", "max_tokens": 1000, "messages": messages, **options}
    headers = {"x-api-key": session.key} if headers is None else headers
    return shared_client()._client.post(f"{session.base_url}/{path}", json=body, headers=headers)


@pytest.mark.parametrize("path", ["messages", "v1/messages"])
@pytest.mark.parametrize("scheme", ["x-api-key", "bearer"])
def test_a_turn_is_a_message_of_text(scripted, path, scheme):
    session = scripted(lambda request: "hi").open(task_id="0")
    key = f"{session.key}.helper"
    headers = {"x-api-key": key} if scheme == "x-api-key" else {"authorization": f"Bearer {key}"}
    reply = post(session, path=path, headers=headers)
    assert reply.json() == {
        "id": "turn-0",
        "type": "message",
        "role": "assistant",
        "model": "any",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 2},  # bytes
    }
    assert session.close(1.0).transitions[0].role == "helper"


def test_calls_and_results_are_the_state_of_the_next_turn(scripted):
    turns = iter([f"I add. {CALL}{CALL}", "3"])
    session = scripted(lambda request: next(turns)).open(task_id="0")
    options = {"system": [{"type": "text", "text": "Be brief."}], "tools": [TOOL]}
    reply = post(session, **options).json()
    text, first, second = reply["content"]
    assert text == {"type": "text", "text": "I add."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "add", {"a": 1})
    assert reply["stop_reason"] == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": first["id"], "content": "1"},
        {"type": "tool_result", "tool_use_id": second["id"],
         "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "so ?"},
    ]  # fmt: skip
    echo = {"role": "assistant", "content": reply["content"]}
    assert post(session, [*USER, echo, {"role": "user", "content": results}], **options).is_success
    trajectory = session.close(1.0)
    assert [(m["role"], m["content"]) for m in trajectory.transitions[1].messages] == [
        ("system", "Be brief."), ("user", "hello"), ("assistant", f"I add. {CALL}{CALL}"),
        ("tool", "1"), ("tool", "2"), ("user", "so ?"),
    ]  # fmt: skip


def test_an_echoed_turn_keeps_its_tokens(gateway):
    session = gateway.open(task_id="0", seed=[7, 0])
    question = {"role": "user", "content": "what is the employer of the star of amber island ?"}
    search = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {}}}}
    reply = post(session, [question], tools=[search]).json()
    *_, call = reply["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "tilda ekberg ."}
    echo = {"role": "assistant", "content": reply["content"]}
    post(session, [question, echo, {"role": "user", "content": [result]}], tools=[search])
    (row,) = make_rows(session.close(1.0))
    assert sorted(set(row.steps)) == [0, 1]


@pytest.mark.parametrize(
    ("options", "reason", "stop"),
    [
        ({"stop_sequences": ["b", "z"]}, "stop_sequence", "b"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({}, "end_turn", None),
    ],
)
def test_the_stop_reason_names_what_ended_the_turn(scripted, options, reason, stop):
    session = scripted(lambda request: "aaab").open(task_id="0")
    reply = post(session, **options).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, stop)


def test_a_stream_has_the_events_of_a_whole_message(scripted):
    session = scripted(lambda request: f"I add. {CALL}").open(task_id="0")
    written = post(session, tools=[TOOL], stream=True).text
    events = [json.loads(each.partition("data: ")[2]) for each in written.split("\n\n")[:-1]]
    assert [f"event: {event['type']}" for event in events] == [
        line for line in written.splitlines() if line.startswith("event")
    ]
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert events[2]["delta"] == {"type": "text_delta", "text": "I add."}
    assert events[4]["content_block"]["input"] == {}
    assert events[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert events[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


REFUSED = [
    ({"temperature": 0.3}, "--ignored_parameters temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking can only be"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools.0: can only be a function"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice: guided decoding needs"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "drop"}}, "no function 'drop'"),
    ({"tools": [TOOL], "tool_choice": {"type": "most"}}, "tool_choice: Input should be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format: "),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "type 'thinking'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
     "no tool call 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "what"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(gateway, options, what):
    session = gateway.open(task_id="0")
    reply = post(session, **{"messages": USER, **options})
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert what in reply.json()["error"]["message"]
    assert not session.close().transitions


def test_neutral_parameters_are_accepted(scripted):
    session = scripted(lambda request: CALL + CALL).open(task_id="0")
    options = {
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "x"}, "system": "",
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL],
    }  # fmt: skip
    (block,) = post(session, **options).json()["content"]
    assert block["type"] == "text"  # two calls are not allowed


WRONG = [None, 7, "x", [], [None], [[]], [{"type": "tool_result"}], [{"type": []}], {"type": {}}]


def test_wrong_types_are_client_errors(scripted):
    session = scripted(lambda request: "x").open(task_id="0")
    for value in WRONG:
        for name in ("messages", "system", "tools", "tool_choice", "stop_sequences", "metadata",
                     "output_config", "output_format", "thinking", "max_tokens"):  # fmt: skip
            assert post(session, **{name: value}).status_code in (200, 400), (name, value)
        for role in ("user", "assistant", "system", 7, None, []):
            messages = [{"role": role, "content": value}]
            assert post(session, messages).status_code in (200, 400), (role, value)
            messages = [
                {"role": role, "content": [{"type": "tool_use", "id": "a", "input": value}]}
            ]
            assert post(session, messages).status_code in (200, 400), (role, value)
    assert post(session, headers={"x-api-key": "no"}).json()["error"]["type"] == (
        "authentication_error"
    )
