"""Replies of ``/chat/completions``: whole, or as the events of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agent_trainers.gateway.chat_request import ChatRequest
from agent_trainers.gateway.conversation import Turn
from agent_trainers.gateway.turn_end import Decode

Member = dict[str, Any]


def completion(
    request: ChatRequest, reply_id: str, turns: Sequence[Turn], decode: Decode
) -> Member:
    """Return a reply as one object."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "refusal": None, **_message(turn)},
            "logprobs": _logprobs(turn, decode) if request.logprobs else None,
            "finish_reason": _finish_reason(turn),
        }
        for i, turn in enumerate(turns)
    ]
    head = _head(request, reply_id, "chat.completion")
    return {**head, "choices": choices, "usage": usage(turns)}


def completion_events(
    request: ChatRequest, reply_id: str, turns: Sequence[Turn], decode: Decode
) -> Iterator[str]:
    """Yield a reply as server-sent events.

    A turn is known as a whole (its calls are read when it ends), so each choice is a few chunks.
    """
    head = _head(request, reply_id, "chat.completion.chunk")
    is_counted = bool(request.stream_options and request.stream_options.include_usage)
    with_usage = {"usage": None} if is_counted else {}

    def chunk(index: int, delta: Member, **members: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event({**head, "choices": [{**choice, **members}], **with_usage})

    for i, turn in enumerate(turns):
        logprobs = _logprobs(turn, decode) if request.logprobs else None
        yield chunk(i, {"role": "assistant", "content": None if turn.message.calls else ""})
        if turn.message.content:
            yield chunk(i, {"content": turn.message.content}, logprobs=logprobs)
        for place, call in enumerate(_message(turn).get("tool_calls", ())):
            function = call["function"]
            begun = {**call, "function": {**function, "arguments": ""}}
            yield chunk(i, {"tool_calls": [{"index": place, **begun}]})
            rest = {"index": place, "function": {"arguments": function["arguments"]}}
            yield chunk(i, {"tool_calls": [rest]})
        yield chunk(i, {}, finish_reason=_finish_reason(turn))
    if is_counted:
        yield event({**head, "choices": [], "usage": usage(turns)})
    yield "data: [DONE]\n\n"


def event(data: Member, name: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def usage(turns: Sequence[Turn]) -> Member:
    """Return what a reply took; its choices share their prompt."""
    prompt = len(turns[0].transition.prompt_ids)
    sampled = sum(len(turn.transition.completion_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _head(request: ChatRequest, reply_id: str, kind: str) -> Member:
    return {"id": reply_id, "object": kind, "created": int(time.time()), "model": request.model}


def _message(turn: Turn) -> Member:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in turn.message.calls
    ]
    content = turn.message.content
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _finish_reason(turn: Turn) -> str:
    reason = str(turn.transition.info["finish_reason"])
    # A turn that was cut off says so also where its calls are whole: a rollout ends with it.
    return "tool_calls" if turn.message.calls and reason == "stop" else reason


def _logprobs(turn: Turn, decode: Decode) -> Member:
    sampled = turn.transition
    texts = [decode([token]) or "" for token in sampled.completion_ids]
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in zip(texts, sampled.logprobs.tolist(), strict=True)
        ],
        "refusal": None,
    }
