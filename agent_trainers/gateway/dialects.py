"""The APIs that programs speak: how each one's requests are read, and turns and errors written.

OpenAI's ``/chat/completions`` and ``/responses``, and Anthropic's ``/messages``.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_trainers.gateway.requests import (
    CHAT_PARAMETERS,
    RESPONSES_PARAMETERS,
    ApiError,
    Request,
    parse_request,
    read_messages_body,
)
from agent_trainers.gateway.turns import Turn
from agent_trainers.trajectory import StopReason

_Json = dict[str, Any]
_MESSAGES_ERRORS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API."""

    paths: Sequence[str]
    """Paths below the session's URL."""
    read: Callable[[_Json, Mapping[str, float]], Request]
    """Reads a body, with the policy's distribution; raises an `ApiError`."""
    reply: Callable[[Request, Turn], _Json]
    error: Callable[[ApiError], _Json]
    events: Callable[[Request, Turn], list[_Json]] | None = None
    """The events of a streamed turn; None without streams."""
    names_events: bool = False
    """Whether an event has its type as a name."""
    last_event: str = ""

    def write_event(self, event: _Json) -> str:
        """Return a server-sent event."""
        name = f"event: {event['type']}\n" if self.names_events else ""
        return f"{name}data: {json.dumps(event)}\n\n"

    def write_stream(self, request: Request, turn: Turn) -> str:
        """Return all events of a turn."""
        events = self.events(request, turn) if self.events else []
        return "".join(map(self.write_event, events)) + self.last_event


def _chat_head(request: Request, turn: Turn, kind: str) -> _Json:
    created = int(time.time())
    return {"id": turn.reply_id, "created": created, "model": request.model, "object": kind}


def _chat_reply(request: Request, turn: Turn) -> _Json:
    choices = [{**_choice(turn), "message": _chat_message(turn)}]
    head = _chat_head(request, turn, "chat.completion")
    return {**head, "choices": choices, "usage": _usage(turn)}


def _chat_events(request: Request, turn: Turn) -> list[_Json]:
    head = _chat_head(request, turn, "chat.completion.chunk")
    events = [{**head, "choices": [{**_choice(turn), "delta": _chat_message(turn)}]}]
    if request.stream_options.get("include_usage"):
        events.append({**head, "choices": [], "usage": _usage(turn)})
    return events


def _choice(turn: Turn) -> _Json:
    # A cut-off turn reports "length" even with whole calls, since a rollout ends there.
    is_call = turn.message.calls and turn.finish_reason == "stop"
    finish_reason = "tool_calls" if is_call else turn.finish_reason
    return {"index": 0, "logprobs": None, "finish_reason": finish_reason}


def _usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.transition.prompt_ids), len(turn.transition.completion_ids)
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**tokens, "total_tokens": prompt + completion}


def _chat_message(turn: Turn) -> _Json:
    content, calls = turn.message.content, turn.message.calls
    message = {"role": "assistant", "refusal": None, "content": content}
    if not calls:
        return message
    written = [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    return {**message, "content": content or None, "tool_calls": written}


def _openai_error(error: ApiError) -> _Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    is_overflow = error.stop_reason is StopReason.CONTEXT_OVERFLOW
    code = "context_length_exceeded" if is_overflow else None
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _response_reply(request: Request, turn: Turn) -> _Json:
    usage, is_cut = _usage(turn), turn.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    named = {"type": "function", "name": request.tool_name}
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
        "output": _response_output(turn, status),
        "parallel_tool_calls": request.parallel_tool_calls,
        "tool_choice": request.tool_choice if request.tool_name is None else named,
        "tools": [{"type": "function", **tool.model_dump()} for tool in request.tools],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _response_output(turn: Turn, status: str) -> list[_Json]:
    items: list[_Json] = []
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


def _message_reply(request: Request, turn: Turn) -> _Json:
    counted = _usage(turn)
    return {
        "id": turn.reply_id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _message_blocks(turn),
        **_message_end(request, turn),
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "output_tokens": counted["completion_tokens"],
        },
    }


def _message_blocks(turn: Turn) -> list[_Json]:
    text, calls = turn.message.content, turn.message.calls
    blocks: list[_Json] = [{"type": "text", "text": text}] if text or not calls else []
    return blocks + [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
        for c in calls
    ]


def _message_end(request: Request, turn: Turn) -> _Json:
    """Return why a turn ended, and the stop text that ended it."""
    end = turn.transition.action[len(turn.text) :]
    stop = next((text for text in request.stop if text and end.startswith(text)), None)
    reason = "tool_use" if turn.message.calls else "end_turn" if stop is None else "stop_sequence"
    is_cut = turn.finish_reason == "length"
    return {"stop_reason": "max_tokens" if is_cut else reason, "stop_sequence": stop}


def _message_events(request: Request, turn: Turn) -> list[_Json]:
    whole = _message_reply(request, turn)
    unknown: _Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    events: list[_Json] = [{"type": "message_start", "message": {**whole, **unknown}}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"])
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": written}
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {"type": "message_delta", "delta": _message_end(request, turn), "usage": whole["usage"]}
    return [*events, end, {"type": "message_stop"}]


def _message_error(error: ApiError) -> _Json:
    kind = _MESSAGES_ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


CHAT: Final = Dialect(
    paths=["chat/completions"],
    read=lambda body, sampling: parse_request(body, CHAT_PARAMETERS, sampling),
    reply=_chat_reply,
    error=_openai_error,
    events=_chat_events,
    last_event="data: [DONE]\n\n",
)
DIALECTS: Final = (
    CHAT,
    Dialect(
        paths=["responses"],
        read=lambda body, sampling: parse_request(body, RESPONSES_PARAMETERS, sampling),
        reply=_response_reply,
        error=_openai_error,
    ),
    Dialect(
        paths=["messages", "v1/messages"],  # Anthropic's clients append v1/ to their base URL
        read=lambda body, sampling: parse_request(
            read_messages_body(body), CHAT_PARAMETERS, sampling
        ),
        reply=_message_reply,
        error=_message_error,
        events=_message_events,
        names_events=True,
    ),
)
