"""Replies of ``/responses``: whole, or as the events of a stream."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from agent_trainers.gateway.chat_reply import Member, event
from agent_trainers.gateway.conversation import Turn
from agent_trainers.gateway.responses_request import ResponsesRequest


def response(request: ResponsesRequest, reply_id: str, turn: Turn) -> Member:
    """Return a reply as one object."""
    sampled = turn.transition
    prompt, written = len(sampled.prompt_ids), len(sampled.completion_ids)
    is_cut = sampled.info["finish_reason"] == "length"
    return {
        "id": reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {},
        "model": request.model,
        "output": _output(reply_id, turn, "incomplete" if is_cut else "completed"),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [tool.model_dump() for tool in request.tools],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + written,
        },
    }


def response_events(request: ResponsesRequest, reply_id: str, turn: Turn) -> Iterator[str]:
    """Yield a reply as server-sent events."""
    numbers = itertools.count()

    def say(kind: str, **members: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **members}, kind)

    whole = response(request, reply_id, turn)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield say("response.created", response=begun)
    yield say("response.in_progress", response=begun)
    for place, item in enumerate(whole["output"]):
        at: Member = {"output_index": place, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: Member = {"arguments": ""} if is_call else {"content": []}
        opened = {**item, **empty, "status": "in_progress"}
        yield say("response.output_item.added", output_index=place, item=opened)
        if is_call:
            kind, written = "response.function_call_arguments", item["arguments"]
            yield say(f"{kind}.delta", **at, delta=written)
            yield say(f"{kind}.done", **at, name=item["name"], arguments=written)
        else:
            part = item["content"][0]
            at["content_index"] = 0
            yield say("response.content_part.added", **at, part={**part, "text": ""})
            yield say("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield say("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield say("response.content_part.done", **at, part=part)
        yield say("response.output_item.done", output_index=place, item=item)
    yield say(f"response.{whole['status']}", response=whole)


def _output(reply_id: str, turn: Turn, status: str) -> list[Member]:
    message = turn.message
    items: list[Member] = []
    if message.content or not message.calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
        }
        for call in message.calls
    ]
    return [
        {"id": f"{reply_id}-{place}", "status": status, **item} for place, item in enumerate(items)
    ]
