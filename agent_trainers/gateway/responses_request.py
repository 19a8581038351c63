"""Requests of ``/responses``, as untrusted JSON, and what they ask."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.ask import Ask
from agent_trainers.gateway.chat_request import Content, Schema, Strict, make_ask, text_of
from agent_trainers.gateway.conversation import ApiCall, ApiMessage


class Spoken(Strict):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Strict):
    """A call of the model."""

    call_id: str
    name: str
    arguments: str = ""


class OutputItem(Strict):
    """The result of a call."""

    call_id: str
    output: Content


Item = Annotated[
    Annotated[Spoken, pydantic.Tag("message")]
    | Annotated[CallItem, pydantic.Tag("function_call")]
    | Annotated[OutputItem, pydantic.Tag("function_call_output")],
    pydantic.Discriminator(
        lambda item: item.get("type", "message") if isinstance(item, dict) else None
    ),
]


class FunctionTool(Schema):
    """A function that a program brings."""

    type: Literal["function"]


class ResponsesRequest(Strict):
    """What is honoured of a request."""

    model: str = "policy"
    input: str | Annotated[list[Item], pydantic.Field(min_length=1)]
    instructions: str | None = None
    tools: list[FunctionTool] = pydantic.Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    previous_response_id: str | None = None
    stream: bool = False


def read_responses(
    request: ResponsesRequest,
    earlier: Mapping[str, Sequence[ApiMessage]],
    tool_format: ToolFormat,
    *,
    shows_tools: bool,
) -> tuple[Ask, list[ApiMessage]]:
    """Return what a request asks, and its conversation without the instructions.

    Args:
        request: The request.
        earlier: The conversations of the session's replies, by their ids.
        tool_format: How the model writes calls.
        shows_tools: Whether the chat template describes tools; else the system prompt does.

    Raises:
        ApiError: If it goes on from a reply that there is not.
    """
    before = request.previous_response_id
    if before is not None and before not in earlier:
        raise ApiError(
            400,
            f"Previous response with id '{before}' not found in this session.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    said = [*(earlier[before] if before is not None else ())]
    given = request.input
    for item in [Spoken(role="user", content=given)] if isinstance(given, str) else given:
        _append(said, item)
    prompt = [ApiMessage(role="system", content=text)] if (text := request.instructions) else []
    ask = make_ask(
        [*prompt, *said],
        [Schema(**tool.model_dump(exclude={"type"})) for tool in request.tools],
        request.tool_choice,
        tool_format,
        shows_tools=shows_tools,
        is_parallel=request.parallel_tool_calls,
        max_tokens=request.max_output_tokens,
        reply_kind="resp",
    )
    return ask, said


def _append(said: list[ApiMessage], item: Spoken | CallItem | OutputItem) -> None:
    if isinstance(item, OutputItem):
        output = text_of(item.output)
        said.append(ApiMessage(role="tool", content=output, call_id=item.call_id))
    elif isinstance(item, CallItem):  # part of the turn in which the model said what stands before
        function = FunctionCall(name=item.name, arguments=item.arguments)
        call = ApiCall(id=item.call_id, function=function)
        is_same = bool(said) and said[-1].role == "assistant"
        turn = said.pop() if is_same else ApiMessage(role="assistant")
        calls = (*turn.calls, call)
        said.append(ApiMessage(role="assistant", content=turn.content, calls=calls))
    else:
        role = "system" if item.role == "developer" else item.role
        said.append(ApiMessage(role=role, content=text_of(item.content)))
