"""Requests of programs: honoured, or refused by name with the errors of OpenAI's client."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from agent_envs.errors import ConfigurationError
from agent_trainers import Gateway
from agent_trainers.gateway import SessionLimits
from agent_trainers.gateway.turns import TurnEnd
from agent_trainers.policies import Generation
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.gateway.programs import client_of, shared_client

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def ask(session, messages=USER, **options):
    return client_of(session).chat.completions.create(model="any", messages=messages, **options)


def reply_with(text):
    return lambda request: text


REFUSED = [
    ({"temperature": 0.3}, "temperature can only be 1.0; the request asks for 0.3"),
    ({"top_p": 0.5}, "top_p can only be 1"),
    ({"temperature": 0.3}, "--ignored_parameters temperature ignores it"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice: guided decoding needs"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [TOOL]},
     "tool_choice: guided decoding needs"),
    ({"tool_choice": {"type": "function", "function": {"name": "drop"}}, "tools": [TOOL]},
     r"tool_choice: there is no function 'drop'"),
    ({"tool_choice": "required"}, "tool_choice: there are no tools"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice: Input should be"),
    ({"tools": [TOOL, TOOL]}, "tools: 2 functions have the name 'add'"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
    ({"response_format": {"type": "json_object"}}, "response_format: guided decoding needs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
     "response_format: guided decoding needs"),
    ({"response_format": {"type": "grammar"}}, "response_format: its type can only be"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logprobs": True}, "logprobs"),
    ({"extra_body": {"guided_regex": "a"}}, "Unrecognized request argument .*: guided_regex"),
    ({"n": 2}, "n can only be 1"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"tools": [{"type": "web_search"}]}, r"tools\.0"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "boss", "content": "x"}]}, r"messages\.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     r"messages\.0\.content: holds a part of type 'image_url'; the policy reads text only\."),
    ({"messages": [{"role": "user", "content": 7}]}, r"messages\.0\.content"),
    ({"messages": [*USER, {"role": "assistant", "function_call": {"name": "add"}}]},
     "messages.1.function_call"),
    ({"messages": [*USER, {"role": "assistant", "audio": {"id": "1"}}]}, "1.audio"),
    ({"messages": [*USER, {"role": "function", "name": "add"}]}, r"messages\.1"),
]  # fmt: skip


def test_unsupported_parameters_are_refused_by_name(gateway):
    session = gateway.open(task_id="0")
    for options, what in REFUSED:
        with pytest.raises(openai.BadRequestError, match=what) as caught:
            ask(session, **options)
        assert caught.value.type == "invalid_request_error"
    assert not session.close().transitions


def test_parameters_without_effect_and_ignored_ones_are_accepted(policy):
    with Gateway(policy, ignored_parameters=["temperature", "tool_choice", "foo"]) as gateway:
        session = gateway.open(task_id="0")
        ask(session, temperature=0.1, tools=[TOOL], tool_choice="required",
            extra_body={"foo": 1}, top_p=1.0, presence_penalty=0, user="u", metadata={"a": "b"},
            response_format={"type": "text"}, service_tier="auto", logit_bias={}, store=False,
            max_tokens=9999, parallel_tool_calls=True, seed=-(2**63))  # fmt: skip
        assert session.close().stop_reason is StopReason.ANSWERED


def test_a_dumped_message_may_be_sent_back(gateway):
    session = gateway.open(task_id="0")
    message = ask(session).choices[0].message.model_dump()
    ask(session, [*USER, message | {"tool_calls": None}, *USER])
    assert len(session.close().transitions) == 2


@pytest.mark.parametrize("value", ["Paris", None, float("nan")])
def test_metrics_of_a_session_are_numbers(gateway, value):
    session = gateway.open(task_id="0")
    with pytest.raises(ConfigurationError, match="metrics: answer: "):
        session.close(metrics={"answer": value})
    assert session.close(metrics={"answer": True}).metrics == {"answer": 1.0}


def test_a_turn_ends_after_the_requested_number_of_tokens(gateway):
    whole, cut, also = (gateway.open(task_id="0", seed=3) for _ in range(3))
    ask(whole)
    (one,) = whole.close().transitions
    choice = ask(cut, max_tokens=3).choices[0]
    assert ask(also, max_completion_tokens=3).choices[0].message == choice.message
    assert choice.finish_reason == "length"
    (other,) = cut.close().transitions
    assert other.completion_ids == one.completion_ids[:3]
    np.testing.assert_allclose(other.logprobs, one.logprobs[:3], rtol=1e-5)


def test_a_turn_ends_at_a_stop_which_the_program_does_not_see(scripted):
    gateway = scripted(reply_with("Action: look\nObservation: nothing"))
    session = gateway.open(task_id="0")
    choice = ask(session, stop=["Observation:", "never"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Action: look\n", "stop")
    echo = {"role": "assistant", "content": "Action: look\n"}
    ask(session, [*USER, echo, {"role": "user", "content": "Observation: a door"}])
    first, second = session.close(1.0).transitions
    assert bytes(first.completion_ids).decode() == first.action == "Action: look\nObservation:"
    assert len(first.logprobs) == len(first.completion_ids)
    assert second.messages[1]["content"] == "Action: look\n"


def test_a_seed_repeats_in_its_session_only(gateway):
    one, other = (gateway.open(task_id="0", seed=seed) for seed in (1, np.int64(2)))
    texts = [ask(s, seed=2**64).choices[0].message.content for s in (one, one, other)]
    assert texts[0] == texts[1] != texts[2]


def test_malformed_schemas_are_described(scripted):
    session = scripted(reply_with("<add>1")).open(task_id="0")
    endless = {"type": "array", "items": {"$ref": "#/$defs/A"}}
    for parameters in (
        {"properties": 7},
        {"properties": {"a": True}, "required": ["a"]},
        {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": endless}},
    ):
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
        assert ask(session, tools=[tool]).choices[0].message.content == "<add>1"


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        pytest.param(CALL, None, 1, id="a call"),
        pytest.param(f"I add. {CALL}", "I add.", 1, id="text and a call"),
        pytest.param(CALL + CALL, None, 2, id="two calls"),
        pytest.param(CALL.replace("add", "drop"), ..., 0, id="no such function"),
        pytest.param(CALL.replace("}", ""), ..., 0, id="bad JSON"),
        pytest.param(CALL.replace('{"a": 1}', "7"), ..., 0, id="arguments that are no object"),
        pytest.param("<tool_call>", ..., 0, id="a call without an end"),
        pytest.param("plain", ..., 0, id="plain text"),
        pytest.param("", ..., 0, id="nothing"),
    ],
)
def test_a_call_is_a_call_and_a_mistake_is_plain_content(scripted, text, content, num_calls):
    session = scripted(reply_with(text)).open(task_id="0")
    choice = ask(session, tools=[TOOL]).choices[0]
    calls = choice.message.tool_calls or []
    assert choice.message.content == (text if content is ... else content)
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}] * num_calls
    assert len({call.id for call in calls}) == num_calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert session.close().transitions[0].action == text


def test_unwanted_calls_are_plain_content(scripted):
    session = scripted(reply_with(CALL + CALL + "\ud800")).open(task_id="0")
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"},
                    {"tools": [TOOL], "parallel_tool_calls": False}):  # fmt: skip
        message = ask(session, **options).choices[0].message
        assert (message.content, message.tool_calls) == (CALL + CALL + "?", None)
    assert session.close().transitions[0].action == CALL + CALL + "\ud800"


def test_a_template_without_tools_gets_them_in_the_system_prompt():
    class Blind(ScriptedPolicy):
        def shows_tools(self, tools):
            return False

    with Gateway(Blind(reply_with(CALL))) as gateway:
        session = gateway.open(task_id="0")
        assert ask(session, tools=[TOOL]).choices[0].message.tool_calls
    (step,) = session.close().transitions
    assert step.messages[0]["role"] == "system"
    assert '"name": "add"' in step.messages[0]["content"]


def test_malformed_bodies_are_client_errors(scripted):
    session = scripted(reply_with("x")).open(task_id="0")
    client = client_of(session)
    for body in (
        b"", b"{", b"[]", b"7", b"\xff", b'{"n": NaN}', b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}", b'{"messages": {"role": "user"}}',
        b'{"messages": [null]}', b'{"messages": "x", "tools": 1}', b'{"tools": []}',
    ):  # fmt: skip
        for path in ("chat/completions", "responses"):
            url = f"{session.base_url}/{path}"
            reply = client._client.post(url, content=body, headers=client.auth_headers)
            assert (reply.status_code, bool(reply.json()["error"]["message"])) == (400, True)
    assert reply.json()["error"]["message"].startswith("input: Field")


def test_sessions_need_their_own_key(scripted):
    gateway = scripted(reply_with("x"))
    mine, other = (gateway.open(task_id=str(i)) for i in range(2))
    missing = mine.base_url.replace(mine.id, "missing")
    attempts = [*((other.base_url, key) for key in (mine.key, "x", "é")),
                (missing, mine.key), (missing, "-")]  # fmt: skip
    said = set()
    for base_url, key in attempts:
        headers = {"authorization": f"Bearer {key}".encode()}
        for verb, path in (("POST", "chat/completions"), ("POST", "responses"), ("GET", "models")):
            reply = shared_client()._client.request(verb, f"{base_url}/{path}", headers=headers)
            assert reply.status_code == 401
            said.add(reply.text)
    assert len(said) == 1  # it does not show which sessions exist
    for path in ("", "/", "/v1/models", f"/{mine.id}", "/docs", "/openapi.json"):
        reply = shared_client()._client.get(mine.base_url.partition(f"/{mine.id}")[0] + path)
        assert reply.status_code == 404
        assert mine.id not in reply.text.replace(path, "")
    mine.close()
    with pytest.raises(openai.AuthenticationError, match="its session is closed"):
        ask(mine)
    assert len(mine.id) >= 32 <= len(mine.key)


def test_rewards_go_to_the_newest_turn(scripted):
    session = scripted(reply_with("x")).open(task_id="17", group_id="g3")
    with pytest.raises(ValueError, match="no turn yet"):
        session.reward(1.0)
    ask(session)
    session.reward(0.5)
    ask(session)
    session.reward(0.25)
    session.reward({"style": 0.125, "process": 0.25})
    for wrong in (float("nan"), float("-inf"), "1", None, 1e300, 10**400, -(10**5000)):
        with pytest.raises(ValueError, match="must be a finite number"):
            session.reward(wrong)
    with pytest.raises(ValueError, match="bored"):
        session.close(reward=7.0, stop_reason="bored")  # rewards nothing
    trajectory = session.close(reward=1.0, metrics={"success": 1.0})
    assert session.close(reward=5.0) is trajectory
    assert (trajectory.task_id, trajectory.group_id) == ("17", "g3")
    assert trajectory.rewards == [0.5, 1.625]
    terms = {"process": 0.5, "style": 0.125, "outcome": 1.0}
    assert trajectory.transitions[1].reward_terms == terms
    assert [t.terminated for t in trajectory.transitions] == [False, True]
    assert trajectory.success


@pytest.mark.parametrize(
    ("limits", "lengths", "reason"),
    [
        ({"max_calls": 2}, [3, 3], StopReason.TURN_LIMIT),
        ({"max_tokens": 5}, [3, 2], StopReason.TOKEN_LIMIT),  # three bytes, then two
        ({"timeout_seconds": 1e-9}, [], StopReason.TIMEOUT),
    ],
)
def test_beyond_a_limit_calls_are_refused_and_the_episode_is_cut_off(
    scripted, limits, lengths, reason
):
    started = time.perf_counter()
    session = scripted(reply_with("abc"), limits=SessionLimits(**limits)).open(task_id="0")
    for _ in lengths:
        ask(session)
    with pytest.raises(openai.PermissionDeniedError, match=next(iter(limits))):
        ask(session)
    assert session.is_cut_off == (reason == StopReason.TOKEN_LIMIT)  # the last turn only
    trajectory = session.close(0.0)
    assert trajectory.timings["generate_seconds"] <= time.perf_counter() - started
    assert (trajectory.stop_reason, list(trajectory.lengths)) == (reason, lengths)
    for last in trajectory.transitions[-1:]:
        assert (last.terminated, last.truncated) == (False, True)
        assert trajectory.final_prompt_ids == [*last.prompt_ids, *last.completion_ids]


def test_calls_at_once_share_what_the_session_has_left(scripted):
    gate = threading.Event()
    act = lambda request: gate.wait(60) and "a longer turn"  # noqa: E731
    session = scripted(act, limits=SessionLimits(max_tokens=20)).open(task_id="0")
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(ask, session) for _ in range(3)]
        while len(session._busy_keys) < 3:
            time.sleep(0.01)
        gate.set()
    assert all(call.result() for call in calls)
    assert sorted(session.close(0.0).lengths) == [1, 6, 13]  # 13 were sampled, each time


def test_a_state_or_a_body_that_is_too_long_is_refused(gateway, scripted):
    too_long = [{"role": "user", "content": "amber " * 5000}]
    session, last = (gateway.open(task_id="0") for _ in range(2))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(session, too_long)
    assert caught.value.code == "context_length_exceeded"
    ask(session)
    assert session.close().stop_reason is StopReason.ANSWERED
    ask(last)
    with pytest.raises(openai.BadRequestError):
        ask(last, too_long)
    assert last.close().stop_reason is StopReason.CONTEXT_OVERFLOW
    small = scripted(reply_with("x"), limits=SessionLimits(max_body_bytes=1000)).open(task_id="0")
    with pytest.raises(openai.APIStatusError) as caught:
        ask(small, too_long)
    assert caught.value.status_code == 413
    ask(small)


def test_messages_that_the_template_refuses_are_a_client_error(model, tokenizer):
    policy = transformers_policy(model, tokenizer)
    with Gateway(policy) as gateway:
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        session = gateway.open(task_id="0")
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            ask(session)


def test_other_endpoints_are_refused(scripted):
    session = scripted(reply_with("x")).open(task_id="0")
    with pytest.raises(openai.NotFoundError, match="404"):
        client_of(session).embeddings.create(model="any", input="x")
    assert [model.id for model in client_of(session).models.list()] == ["policy"]


def test_the_end_of_a_turn_is_found_with_few_decodes():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "".join(map(chr, ids))

    ids = [97] * 4_000 + [98] + [97] * 4_000
    generation = Generation(text=decode(ids), completion_ids=ids, logprobs=np.zeros(len(ids)))
    end = TurnEnd(decode=decode, max_tokens=9_000, stops=["b"])
    cut, text = end.cut(generation, 8_000)
    assert (len(cut.completion_ids), text) == (4_001, "a" * 4_000)
    assert len(decoded) < 20
