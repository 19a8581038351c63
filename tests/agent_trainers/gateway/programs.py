"""Programs as users write them: loops with OpenAI's client."""

import functools
import json

import openai

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city", "big"],
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "big": {"type": "boolean"}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
"""A turn that is guided: a schema, a tool with it, and a reply in its form."""


@functools.cache
def shared_client():
    """Return one client for all tests: a new one reads all certificates."""
    return openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=0)


def client_of(session, **options):
    """Return OpenAI's client for a session."""
    return shared_client().with_options(base_url=session.base_url, api_key=session.key, **options)


def as_it_came(message):
    """Return the message that most programs send back of a reply."""
    return message.model_dump(exclude_none=True)


def play(session, env, task, complete, echo=as_it_came):
    """Run a task of an environment as a rollout does, and close the session.

    `complete` returns the model's message for messages and tools, and whether it was cut off, which
    ends the episode as in a rollout; `echo` returns the message that is sent back.
    """
    _, info = env.reset(seed=task, options={"task": task})
    messages = [dict(message) for message in info["messages"]]
    is_over = False
    while not is_over:
        message, is_cut = complete(messages, info["tools"])
        num_known = len(info["messages"]) + 1
        _, _, terminated, truncated, info = env.step(as_text(message))
        session.reward(info["reward_terms"])
        is_over = terminated or truncated or is_cut
        messages.append(echo(message))
        calls = list(message.tool_calls or ())
        for said in info["messages"][num_known:]:
            if calls and said["role"] == "tool":  # mistakes are user messages
                call = calls.pop(0)
                said = {"role": "tool", "tool_call_id": call.id, "content": said["content"]}
            messages.append(said)
    reason = "token_limit" if is_cut else "turn_limit"
    return session.close(metrics=info["metrics"], stop_reason=None if terminated else reason)


def chat(client, **options):
    """Call ``chat/completions``."""

    def complete(messages, tools):
        reply = client.chat.completions.create(
            model="any", messages=messages, tools=tools, **options
        )
        return _said(reply.choices[0])

    return complete


def streamed(client):
    """Call ``chat/completions`` with a stream."""

    def complete(messages, tools):
        with client.chat.completions.stream(model="any", messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            return _said(stream.current_completion_snapshot.choices[0])

    return complete


def _said(choice):
    return choice.message, choice.finish_reason == "length"


def as_text(message):
    """Return the message as an action in the format ``hermes``."""
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.tool_calls or ()
    ]
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    return "\n".join([message.content or "", *written])
