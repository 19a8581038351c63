import json
import logging
import re

import pytest

from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.formats.openai_format import FunctionCall, write_message
from agent_trainers.policies import Usage
from tests.agent_trainers import made
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
    return made.request(seed, messages=messages, tools=tools)


def ask(reply, *requests, **settings):
    """Answer by `reply`, or a function; return what the policy made of it, and the server."""
    with chat_server(reply if callable(reply) else lambda *_: reply) as server:
        policy = OpenAIPolicy(base_url=server.url, model="m", **settings)
        try:
            return policy.generate(list(requests) or [request()]), server
        finally:
            policy.close()


def test_a_request_has_the_sampling_settings_a_seed_of_the_episode_and_is_retried():
    faults = [refuses(429, "slow down"), refuses(500, "oops"), refuses(503, "later")]
    replies = [*faults, says("Paris"), says("Oslo")]
    settings = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "max_concurrency": 1}
    asked = [request(seed=3), request(seed=3)]
    (generation, _), server = ask(lambda _, number: replies[number], *asked, **settings)
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"]) == ("m", 7)
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert {each["seed"] for each in server.bodies} == {body["seed"]}
    assert len(server.bodies) == 5
    assert (generation.text, generation.finish_reason) == ("Paris", "stop")
    assert generation.usage == Usage(calls=1, prompt_tokens=10, completion_tokens=5)
    assert generation.completion_ids == []


@pytest.mark.parametrize(("tool_format", "said", "text"), [
    ("openai", None, SEARCH_RED),
    ("hermes", "So.", f'So.\n<tool_call>{{"name": "search", "arguments": {RED}}}</tool_call>'),
    ("tags", "So.", "So.\n<search> red </search>"),
])  # fmt: skip
def test_calls_that_a_server_parses_become_actions_and_return_with_their_results(
    tool_format, said, text
):
    result = {"role": "tool", "name": "search", "content": "a red page"}
    history = [*QUESTION, {"role": "assistant", "content": SEARCH_RED}, result]
    reply = says(said, [("search", RED)])
    asked = [request(history), request(history, tools=None)]
    settings = {"tool_format": tool_format, "max_concurrency": 1}
    (generation, _), server = ask(reply, *asked, **settings)
    body, untold = server.bodies
    assert generation.text == text
    assert untold["messages"][0] == QUESTION[0]
    if tool_format == "hermes":
        assert "tools" not in body
        assert json.dumps(SCHEMA) in body["messages"][0]["content"]
        assert body["messages"][-1]["content"] == "<tool_response>\na red page\n</tool_response>"
    if tool_format == "openai":
        assert body["tools"] == [SCHEMA]
        *_, call, result = body["messages"]
        assert call["tool_calls"][0]["function"] == {"name": "search", "arguments": RED}
        call_id = call["tool_calls"][0]["id"]
        assert result == {"role": "tool", "tool_call_id": call_id, "content": "a red page"}


@pytest.mark.parametrize("words", [
    "This model's maximum context length is 10 tokens.",
    "the request exceeds the available context size",
])  # fmt: skip
def test_a_state_too_long_for_the_server_overflows(words):
    (generation,), _ = ask(refuses(400, words))
    assert (generation.finish_reason, generation.usage) == ("overflow", Usage())


@pytest.mark.parametrize(("reply", "message"), [
    (Reply("{}", seconds=0.5), "APITimeoutError"),
    (refuses(500, "out of memory"), "status 500: out of memory"),
    (refuses(401, "wrong key", code="invalid_api_key"), r"status 401: wrong key \(invalid_a"),
    (Reply("<html>502</html>", headers={"Content-Type": "text/html"}), "not a chat completion"),
    (Reply("{"), "JSONDecodeError"),
])  # fmt: skip
def test_other_failures_are_errors_that_name_the_server(reply, message):
    limit = 0.05 if reply.seconds else 60.0
    with pytest.raises(ServerError, match=rf"http://127\S+/v1, model 'm': .*{message}"):
        ask(reply, max_retries=0, timeout_seconds=limit)


def test_the_key_comes_from_the_environment_and_is_in_no_error_and_no_log(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", "sk-secret")
    refusal = refuses(401, "Incorrect API key provided: sk-secret")
    with chat_server(lambda *_: refusal) as server:
        policy = OpenAIPolicy(base_url=server.url, model="m", api_key_env="MY_KEY")
        with pytest.raises(ServerError) as error:
            policy.generate([request()])
        policy.close()
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(error.value) + caplog.text + repr(policy)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigurationError, match="MY_KEY is not set"):
        OpenAIPolicy(base_url="http://localhost/v1", model="m", api_key_env="MY_KEY")


def test_requests_run_concurrently_up_to_the_limit():
    def reply(body, _):
        answer = says(body["messages"][-1]["content"])
        answer.seconds = 0.05
        return answer

    with chat_server(reply) as server:
        stream = OpenAIPolicy(base_url=server.url, model="m", max_concurrency=3).open_stream()
        for i in range(9):
            stream.add(i, request([{"role": "user", "content": str(i)}]))
        said = {}
        while stream.has_requests:
            said |= {key: generation.text for key, generation in stream.advance()}
    assert said == {i: str(i) for i in range(9)}
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
    asked, settings = request(said, tools=(schema,)), {"control_tokens": ["#END#"]}
    _, server = ask(says("Paris"), asked, tool_format=tool_format, **settings)
    body = json.dumps(server.bodies[0])
    found = r"<\|\w+\|?>|\[INST\]|</s>|<start_of_turn>|#END#|</think>"
    assert re.findall(found, body) == []
    assert body.count("< |im_end|>") == 2
    assert "<tool_call>{" in body
    # what is around a result is ours, once
    assert body.count("</tool_response>") == (tool_format == "hermes")
