"""``/responses``: requests as untrusted JSON, and replies, whole or streamed."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.chat_api import (
    Content,
    Json,
    PositiveInt,
    Schema,
    Strict,
    event,
    make_call,
    text_of,
)
from agent_trainers.gateway.conversation import ApiCall, ApiMessage, ModelCall, Turn


class _MessageItem(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class _CallItem(Strict):
    call_id: str
    name: str
    arguments: str = ""


class _ResultItem(Strict):
    call_id: str
    output: Content


_Item = Annotated[
    Annotated[_MessageItem, pydantic.Tag("message")]
    | Annotated[_CallItem, pydantic.Tag("function_call")]
    | Annotated[_ResultItem, pydantic.Tag("function_call_output")],
    pydantic.Discriminator(
        lambda item: item.get("type", "message") if isinstance(item, dict) else None
    ),
]


class _FunctionTool(Schema):
    type: Literal["function"]


class ResponsesRequest(Strict):
    """The honoured parameters of a request."""

    model: str = "policy"
    input: str | Annotated[list[_Item], pydantic.Field(min_length=1)]
    instructions: str | None = None
    tools: list[_FunctionTool] = pydantic.Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: PositiveInt | None = None
    previous_response_id: str | None = None
    stream: bool = False


def responses_call(
    request: ResponsesRequest,
    earlier: Mapping[str, Sequence[ApiMessage]],
    tool_format: ToolFormat,
    *,
    shows_tools: bool,
) -> tuple[ModelCall, list[ApiMessage]]:
    """Return the call of a request, and its conversation without the instructions."""
    before = request.previous_response_id
    if before is not None and before not in earlier:
        raise ApiError(
            400,
            f"Previous response with id '{before}' not found in this session.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    conversation = [*(earlier[before] if before is not None else ())]
    if isinstance(request.input, str):
        conversation.append(ApiMessage(role="user", content=request.input))
    else:
        for item in request.input:
            _append(conversation, item)
    prompt = [ApiMessage(role="system", content=text)] if (text := request.instructions) else []
    call = make_call(
        [*prompt, *conversation],
        list(request.tools),
        request.tool_choice,
        tool_format,
        shows_tools=shows_tools,
        is_parallel=request.parallel_tool_calls,
        max_tokens=request.max_output_tokens,
        reply_kind="resp",
    )
    return call, conversation


def _append(conversation: list[ApiMessage], item: _MessageItem | _CallItem | _ResultItem) -> None:
    if isinstance(item, _ResultItem):
        output = text_of(item.output)
        conversation.append(ApiMessage(role="tool", content=output, call_id=item.call_id))
    elif isinstance(item, _CallItem):  # belongs to the assistant message before it
        call = ApiCall(id=item.call_id, name=item.name, arguments=item.arguments)
        is_same_turn = bool(conversation) and conversation[-1].role == "assistant"
        turn = conversation.pop() if is_same_turn else ApiMessage(role="assistant")
        calls = (*turn.calls, call)
        conversation.append(ApiMessage(role="assistant", content=turn.content, calls=calls))
    else:
        role = "system" if item.role == "developer" else item.role
        conversation.append(ApiMessage(role=role, content=text_of(item.content)))


def responses_reply(request: ResponsesRequest, reply_id: str, turn: Turn) -> Json:
    """Return a reply as one object."""
    prompt, written = len(turn.transition.prompt_ids), len(turn.transition.completion_ids)
    is_cut = turn.transition.info["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": reply_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {},
        "model": request.model,
        "output": _output(reply_id, turn, status),
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


def responses_events(request: ResponsesRequest, reply_id: str, turn: Turn) -> Iterator[str]:
    """Yield a reply as server-sent events."""
    numbers = itertools.count()

    def emit(kind: str, **members: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **members}, kind)

    whole = responses_reply(request, reply_id, turn)
    begun: Json = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield emit("response.created", response=whole | begun)
    yield emit("response.in_progress", response=whole | begun)
    for place, item in enumerate(whole["output"]):
        at: Json = {"output_index": place, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: Json = {"arguments": ""} if is_call else {"content": []}
        opened = {**item, **empty, "status": "in_progress"}
        yield emit("response.output_item.added", output_index=place, item=opened)
        if is_call:
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield emit(f"{kind}.delta", **at, delta=arguments)
            yield emit(f"{kind}.done", **at, name=item["name"], arguments=arguments)
        else:
            part = item["content"][0]
            at["content_index"] = 0
            yield emit("response.content_part.added", **at, part={**part, "text": ""})
            yield emit("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield emit("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield emit("response.content_part.done", **at, part=part)
        yield emit("response.output_item.done", output_index=place, item=item)
    yield emit(f"response.{whole['status']}", response=whole)


def _output(reply_id: str, turn: Turn, status: str) -> list[Json]:
    message = turn.message
    items: list[Json] = []
    if message.content or not message.calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in message.calls
    ]
    return [
        {"id": f"{reply_id}-{place}", "status": status, **item} for place, item in enumerate(items)
    ]
