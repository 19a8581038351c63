"""Replies of ``/chat/completions`` and ``/responses``.

Calls are read when a turn has ended, so a streamed turn is sent in a few events at its end.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

from agent_trainers.gateway.conversation import Turn
from agent_trainers.gateway.requests import Request

Json = dict[str, Any]


def chat_reply(request: Request, turn: Turn) -> Json:
    """Return a chat completion."""
    message = {"role": "assistant", "refusal": None, **_message(turn)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(turn)}
    return {**_head(request, turn, ""), "choices": [choice], "usage": _usage(turn)}


def chat_events(request: Request, turn: Turn) -> Iterator[str]:
    """Yield a chat completion as events."""
    with_usage = request.stream_options.include_usage
    head = _head(request, turn, ".chunk") | ({"usage": None} if with_usage else {})
    delta = {"role": "assistant", **_message(turn)}
    calls = [{"index": place, **call} for place, call in enumerate(delta.pop("tool_calls", ()))]
    deltas = [delta, *({"tool_calls": [call]} for call in calls), {}]
    for place, each in enumerate(deltas, start=1):
        reason = _finish(turn) if place == len(deltas) else None
        choice = {"index": 0, "delta": each, "logprobs": None, "finish_reason": reason}
        yield _event({**head, "choices": [choice]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def responses_reply(request: Request, turn: Turn) -> Json:
    """Return a response."""
    usage, is_cut = _usage(turn), turn.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": turn.reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions or None,
        "metadata": {},
        "model": request.model,
        "output": _output(turn, status),
        "parallel_tool_calls": request.parallel_tool_calls,
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", **tool.model_dump()} for tool in request.tools],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _head(request: Request, turn: Turn, suffix: str) -> Json:
    kind, created = f"chat.completion{suffix}", int(time.time())
    return {"id": turn.reply_id, "object": kind, "created": created, "model": request.model}


def _usage(turn: Turn) -> Json:
    prompt, completion = len(turn.transition.prompt_ids), len(turn.transition.completion_ids)
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**tokens, "total_tokens": prompt + completion}


def _message(turn: Turn) -> Json:
    content, calls = turn.message.content, turn.message.calls
    if not calls:
        return {"content": content}
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return {"content": content or None, "tool_calls": written}


def _finish(turn: Turn) -> str:
    # A cut-off turn reports "length" even with whole calls, since a rollout ends there.
    is_call = turn.message.calls and turn.finish_reason == "stop"
    return "tool_calls" if is_call else turn.finish_reason


def _output(turn: Turn, status: str) -> list[Json]:
    items: list[Json] = []
    if turn.message.content or not turn.message.calls:
        text = turn.message.content
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in turn.message.calls:
        function = {"name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "call_id": call.id, **function})
    return [
        {"id": f"{turn.reply_id}-{place}", "status": status, **item}
        for place, item in enumerate(items)
    ]
