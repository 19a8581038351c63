"""Programs of other people, as the tests know them: loops with OpenAI's own client."""

import functools
import json

import openai


@functools.cache
def shared_client():
    """One pool of connections: a new client reads all certificates, which takes its time."""
    return openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=0)


def client_of(session, **options):
    """OpenAI's client for a session."""
    return shared_client().with_options(base_url=session.base_url, api_key=session.key, **options)


def as_it_came(message):
    """What most programs send back of a reply."""
    return message.model_dump(exclude_none=True)


def play(session, env, task, complete, echo=as_it_came):
    """Play a task of an environment in a loop of one's own; return how the episode ended.

    `complete` gives the model's message for messages and tools; `echo` makes of it the one that is
    sent back.
    """
    _, info = env.reset(seed=task, options={"task": task})
    messages = [dict(message) for message in info["messages"]]
    is_over = False
    while not is_over:
        message = complete(messages, info["tools"])
        num_known = len(info["messages"]) + 1
        _, _, terminated, is_cut, info = env.step(as_text(message))
        session.reward(info["reward_terms"])
        is_over = terminated or is_cut
        messages.append(echo(message))
        calls = list(message.tool_calls or ())
        for said in info["messages"][num_known:]:
            if calls:
                call = calls.pop(0)
                said = {"role": "tool", "tool_call_id": call.id, "content": said["content"]}
            messages.append(said)
    reason = None if terminated else "turn_limit"
    return session.close(metrics=info["metrics"], stop_reason=reason)


def chat(client, **options):
    """Ask for chat completions."""

    def complete(messages, tools):
        reply = client.chat.completions.create(
            model="any", messages=messages, tools=tools, **options
        )
        return reply.choices[0].message

    return complete


def as_text(message):
    """What the model did, as an environment with the format ``hermes`` reads it."""
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.tool_calls or ()
    ]
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    return "\n".join([message.content or "", *written])
