"""Requests of ``/chat/completions``, as untrusted JSON, and what they ask."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError, refusal
from agent_trainers.gateway.ask import Ask
from agent_trainers.gateway.conversation import ApiCall, ApiMessage
from agent_trainers.gateway.tool_calls import DeclaredTool, describe_tools

Body = TypeVar("Body", bound=pydantic.BaseModel)


class Strict(pydantic.BaseModel):
    """JSON whose types count; members that no template shows may be there."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")


class TextPart(Strict):
    """A part of a message that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[TextPart]


class Function(Strict):
    """The function of a call."""

    name: str
    arguments: str = ""


class Call(Strict):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class Plain(Strict):
    """A message of the system or a user."""

    role: Literal["system", "developer", "user"]
    content: Content


def _refuse(value: object) -> None:
    if value is not None:
        raise ValueError("is not read: send texts as content, and calls as tool_calls")


Unread = Annotated[None, pydantic.BeforeValidator(_refuse)]
"""What says something in a form that is not read: it must not be lost silently."""


class Assistant(Strict):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[Call] | None = None
    function_call: Unread = None
    audio: Unread = None


class Result(Strict):
    """A message of a tool."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


ChatMessage = Annotated[Plain | Assistant | Result, pydantic.Field(discriminator="role")]


class Schema(Strict):
    """A function that a program brings."""

    name: Annotated[str, pydantic.Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Strict):
    """A tool of a request."""

    type: Literal["function"]
    function: Schema


class StreamOptions(Strict):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(Strict):
    """What is honoured of a request."""

    model: str = "policy"
    messages: Annotated[list[ChatMessage], pydantic.Field(min_length=1)]
    tools: list[ChatTool] = pydantic.Field(default_factory=list)
    tool_choice: Literal["auto", "none"] | Any = "auto"
    parallel_tool_calls: bool = True
    n: Annotated[int, pydantic.Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    stop: str | Annotated[list[str], pydantic.Field(max_length=16)] = ""
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False


def validated(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """Return a request; an `ApiError` names what is wrong with it."""
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None


def text_of(content: Content | None) -> str:
    """Return a message's text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def read_chat(request: ChatRequest, tool_format: ToolFormat, *, shows_tools: bool) -> Ask:
    """Return what a request asks.

    Args:
        request: The request.
        tool_format: How the model writes calls.
        shows_tools: Whether the chat template describes tools; else the system prompt does.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    return make_ask(
        [_message(message) for message in request.messages],
        [tool.function for tool in request.tools],
        request.tool_choice,
        tool_format,
        shows_tools=shows_tools,
        is_parallel=request.parallel_tool_calls,
        num_choices=request.n,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stops=tuple(stop for stop in stops if stop),
        seed=request.seed,
    )


def make_ask(
    messages: list[ApiMessage],
    schemas: list[Schema],
    tool_choice: Any,
    tool_format: ToolFormat,
    *,
    shows_tools: bool,
    **options: Any,
) -> Ask:
    """Return what a request asks, with its functions where the model sees them.

    Raises:
        ApiError: If a function must be called, as nobody can make the model do so, or if functions
            cannot be described.
    """
    if tool_choice not in ("auto", "none"):
        raise refusal(
            "tool_choice",
            "tool_choice can be 'auto' or 'none': the model decides by itself what it calls. Leave "
            "it out, or have it ignored: Gateway(…, ignored_parameters=[…]).",
        )
    dumped = [schema.model_dump(exclude_none=True) for schema in schemas]
    tools = {schema["name"]: DeclaredTool(schema) for schema in dumped}
    shown = [{"type": "function", "function": schema} for schema in dumped] or None
    if tools and not shows_tools:
        prompt = messages.pop(0).content if messages[0].role == "system" else ""
        try:
            described = (prompt + describe_tools(tools, tool_format)).strip()
        except Exception as error:  # noqa: BLE001 - schemas are foreign, and may be none
            raise ApiError(400, f"The tools cannot be described: {error}", param="tools") from None
        messages.insert(0, ApiMessage(role="system", content=described))
        shown = None
    reads_calls = tool_choice == "auto"
    return Ask(
        messages=messages, tools=tools, shown_tools=shown, reads_calls=reads_calls, **options
    )


def _message(message: Plain | Assistant | Result) -> ApiMessage:
    content = text_of(message.content)
    if isinstance(message, Result):
        return ApiMessage(role="tool", content=content, call_id=message.tool_call_id)
    if isinstance(message, Assistant):
        calls = tuple(
            ApiCall(
                id=call.id,
                function=FunctionCall(name=call.function.name, arguments=call.function.arguments),
            )
            for call in message.tool_calls or ()
        )
        return ApiMessage(role="assistant", content=content, calls=calls)
    return ApiMessage(role="user" if message.role == "user" else "system", content=content)
