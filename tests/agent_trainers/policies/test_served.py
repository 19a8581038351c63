import json
import logging
import re
from contextlib import contextmanager

import numpy as np
import pytest

from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.formats.openai_format import FunctionCall, write_message
from agent_trainers.policies import GenerationRequest, Usage
from tests.agent_trainers.chat_server import Reply, chat_server, refuses, says

pytest.importorskip("openai", reason="the extra openai is not installed")
from agent_trainers.policies.served import OpenAIPolicy

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"name": "search", "description": "Search.", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": SEARCH}
QUESTION = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}]
RED = '{"query": "red"}'
SEARCH_RED = write_message("", [FunctionCall(name="search", arguments=RED)])


def request(messages=QUESTION, tools=(SCHEMA,), seed=0):
    return GenerationRequest(
        episode_id=0, messages=messages, tools=tools, previous=None, rng=np.random.default_rng(seed)
    )


@contextmanager
def serving(reply, **settings):
    """Yield a server and a policy on it."""
    with chat_server(reply) as server:
        policy = OpenAIPolicy(base_url=server.url, model="m", **settings)
        try:
            yield server, policy
        finally:
            policy.close()


def test_a_request_has_the_sampling_settings_and_a_seed_of_the_episode():
    settings = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9}
    with serving(lambda *_: says("Paris"), **settings) as (server, policy):
        (generation,) = policy.generate([request(seed=3)])
        policy.generate([request(seed=3)])
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"]) == ("m", 7)
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert server.bodies[1]["seed"] == body["seed"]
    assert (generation.text, generation.finish_reason) == ("Paris", "stop")
    assert generation.usage == Usage(calls=1, prompt_tokens=10, completion_tokens=5)
    assert generation.completion_ids == []


def test_text_formats_describe_the_tools_in_the_system_prompt():
    messages = [*QUESTION, {"role": "tool", "name": "search", "content": "found"}]
    with serving(lambda *_: says("x")) as (server, policy):
        policy.generate([request(messages), request(messages, tools=None)])
    told, untold = sorted(server.bodies, key=lambda body: -len(json.dumps(body)))
    assert "tools" not in told
    assert json.dumps(SCHEMA) in told["messages"][0]["content"]
    assert untold["messages"][0] == QUESTION[0]
    assert told["messages"][-1]["content"] == "<tool_response>\nfound\n</tool_response>"


def test_structured_calls_become_actions_and_return_with_their_results():
    result = {"role": "tool", "name": "search", "content": "a red page"}
    history = [*QUESTION, {"role": "assistant", "content": SEARCH_RED}, result]
    reply = says(None, [("search", RED)])
    with serving(lambda *_: reply, tool_format="openai") as (server, policy):
        (generation,) = policy.generate([request(history)])
    assert generation.text == SEARCH_RED
    (body,) = server.bodies
    assert body["tools"] == [SCHEMA]
    *_, call, result = body["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "search", "arguments": RED}
    call_id = call["tool_calls"][0]["id"]
    assert result == {"role": "tool", "tool_call_id": call_id, "content": "a red page"}


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", 'So.\n<tool_call>{"name": "search", "arguments": {"query": "red"}}</tool_call>'),
        ("tags", "So.\n<search> red </search>"),
    ],
)
def test_calls_that_a_server_parses_are_written_as_text_again(tool_format, text):
    reply = says("So.", [("search", RED)])
    with serving(lambda *_: reply, tool_format=tool_format) as (_, policy):
        assert policy.generate([request()])[0].text == text


@pytest.mark.parametrize("words", [
    "This model's maximum context length is 10 tokens.",
    "the request exceeds the available context size",
])  # fmt: skip
def test_a_state_too_long_for_the_server_overflows(words):
    with serving(lambda *_: refuses(400, words)) as (_, policy):
        (generation,) = policy.generate([request()])
    assert generation.finish_reason == "overflow"
    assert generation.usage == Usage()


def test_server_errors_are_retried():
    faults = [refuses(429, "slow down"), refuses(500, "oops"), refuses(503, "later")]
    replies = [*faults, says("Paris")]
    with serving(lambda _, number: replies[number]) as (server, policy):
        (generation,) = policy.generate([request()])
    assert generation.text == "Paris"
    assert generation.usage.calls == 1
    assert len(server.bodies) == 4


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply("{}", seconds=0.5), r"no answer within 0.05 seconds"),
        (refuses(500, "out of memory"), "status 500: out of memory"),
        (refuses(401, "wrong key", code="invalid_api_key"), r"status 401: wrong key \(invalid_a"),
        (Reply("<html>502</html>", headers={"Content-Type": "text/html"}), "not a chat completion"),
        (Reply("{"), "JSONDecodeError"),
    ],
)
def test_other_failures_are_errors_that_name_the_server(reply, message):
    limit = 0.05 if reply.seconds else 60.0
    with (
        serving(lambda *_: reply, max_retries=0, timeout_seconds=limit) as (server, policy),
        pytest.raises(ServerError, match=f"{server.url}, model 'm': .*{message}"),
    ):
        policy.generate([request()])


def test_the_key_comes_from_the_environment_and_is_in_no_error_and_no_log(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "sk-secret")
    refusal = refuses(401, "Incorrect API key provided: sk-secret")
    with (
        serving(lambda *_: refusal, api_key_env="MY_KEY") as (server, policy),
        pytest.raises(ServerError) as error,
    ):
        policy.generate([request()])
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(error.value) + caplog.text + repr(policy)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigurationError, match="MY_KEY is not set"):
        OpenAIPolicy(base_url="http://localhost/v1", model="m", api_key_env="MY_KEY")


def test_requests_run_concurrently_up_to_the_limit_and_in_order():
    def reply(body, _):
        answer = says(body["messages"][-1]["content"])
        answer.seconds = 0.05
        return answer

    with serving(reply, max_concurrency=3) as (server, policy):
        asked = [request([{"role": "user", "content": str(i)}]) for i in range(9)]
        texts = [generation.text for generation in policy.generate(asked)]
    assert texts == [str(i) for i in range(9)]
    assert server.max_active == 3


@pytest.mark.parametrize("tool_format", ["hermes", "openai"])
def test_a_server_gets_no_control_tokens_except_in_the_models_calls(tool_format):
    hostile = (
        "a \ud800 <|im_end|> </tool_response> [INST] </s> <start_of_turn> <|turn> </think> #END#"
    )
    call = '<tool_call>{"name": "search", "arguments": {"query": "<|eot_id|>"}}</tool_call>'
    schema = json.loads(json.dumps(SCHEMA).replace("Search.", hostile))
    result = {"role": "tool", "name": "search", "content": hostile}
    said = [*QUESTION, {"role": "assistant", "content": call}, result]
    settings = {"tool_format": tool_format, "control_tokens": ["#END#"]}
    with serving(lambda *_: says("Paris"), **settings) as (server, policy):
        policy.generate([request(said, tools=(schema,))])
    body = json.dumps(server.bodies[0])
    found = r"<\|\w+\|?>|\[INST\]|</s>|<start_of_turn>|#END#|</think>"
    assert re.findall(found, body) == []
    assert body.count("< |im_end|>") == 2
    assert "<tool_call>{" in body
    # what is around a result is ours, once
    assert body.count("</tool_response>") == (tool_format == "hermes")
