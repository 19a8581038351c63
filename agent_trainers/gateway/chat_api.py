"""``/chat/completions``: requests as untrusted JSON, and replies, whole or streamed."""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic

from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.chat_messages import HERMES_TOOLS_TEXT
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.conversation import ApiCall, ApiMessage, ModelCall, Turn
from agent_trainers.gateway.generation_loop import Decode

Json = dict[str, Any]
Body = TypeVar("Body", bound=pydantic.BaseModel)

_WITHOUT_EFFECT: Final = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "max_tool_calls",
)  # fmt: skip
"""Parameters that change no reply, whatever their value."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (),
    "top_p": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Values without effect of parameters that are refused otherwise. The policy adds those of its
sampling (``temperature``, ``top_p``, ...)."""
_WAYS_OUT: Final = "Leave it out, or have it ignored: Gateway(…, ignored_parameters=[…])."


class Strict(pydantic.BaseModel):
    """JSON without type coercion; unknown members are ignored."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")


class _TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[_TextPart]
PositiveInt = Annotated[int, pydantic.Field(ge=1)]


def _refuse(value: object) -> None:
    if value is not None:
        raise ValueError("is not supported: send text as content, and calls as tool_calls")


_Unsupported = Annotated[None, pydantic.BeforeValidator(_refuse)]


class _Function(Strict):
    name: str
    arguments: str = ""


class _Call(Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Spoken(Strict):
    role: Literal["system", "developer", "user"]
    content: Content


class _Assistant(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Unsupported = None
    audio: _Unsupported = None


class _Result(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class Schema(Strict):
    """A function that a program offers to the model."""

    name: Annotated[str, pydantic.Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ChatTool(Strict):
    type: Literal["function"]
    function: Schema


class _StreamOptions(Strict):
    include_usage: bool = False


_Message = Annotated[_Spoken | _Assistant | _Result, pydantic.Field(discriminator="role")]


class ChatRequest(Strict):
    """The honoured parameters of a request."""

    model: str = "policy"
    messages: Annotated[list[_Message], pydantic.Field(min_length=1)]
    tools: list[_ChatTool] = pydantic.Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    n: Annotated[int, pydantic.Field(ge=1, le=128)] = 1
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: str | Annotated[list[str], pydantic.Field(max_length=16)] = ""
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool = False


def parse_request(
    kind: type[Body],
    body: Mapping[str, Any],
    *,
    sampling: Mapping[str, float],
    ignored: Collection[str],
) -> Body:
    """Return a validated request."""
    honoured: Json = {}
    for name, value in body.items():
        if name in ignored or value is None or name in _WITHOUT_EFFECT:
            continue
        if name in kind.model_fields:
            honoured[name] = value
        elif name in sampling or name in _NEUTRAL:
            _check_neutral(name, value, sampling)
        else:
            raise _unsupported(name, f"Unrecognized request argument supplied: {name}. {_WAYS_OUT}")
    try:
        return kind.model_validate(honoured)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None


def _check_neutral(name: str, value: Any, sampling: Mapping[str, float]) -> None:
    neutral = (sampling[name],) if name in sampling else _NEUTRAL[name]
    if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        return
    if name in sampling:
        reason = f"The policy samples with {name}={sampling[name]:g}"
    elif neutral:
        reason = f"{name} can only be {' or '.join(map(repr, neutral))}"
    else:
        reason = f"The policy's sampling is not known, so {name} cannot be honoured"
    raise _unsupported(name, f"{reason}; the request asks for {value!r:.100}. {_WAYS_OUT}")


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def text_of(content: Content | None) -> str:
    """Return a message's text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def chat_call(request: ChatRequest, tool_format: ToolFormat, *, shows_tools: bool) -> ModelCall:
    """Return the call of a request; see `make_call`."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    return make_call(
        [_api_message(message) for message in request.messages],
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


def make_call(
    messages: list[ApiMessage],
    schemas: list[Schema],
    tool_choice: Any,
    tool_format: ToolFormat,
    *,
    shows_tools: bool,
    **options: Any,
) -> ModelCall:
    """Return a call, with its functions where the model sees them."""
    if tool_choice not in ("auto", "none"):
        text = "tool_choice can be 'auto' or 'none': the model decides by itself whether to call."
        raise _unsupported("tool_choice", f"{text} {_WAYS_OUT}")
    dumped = [schema.model_dump(exclude_none=True, exclude={"type"}) for schema in schemas]
    names = ("name", "description", "parameters")
    declared = [SchemaTool(**{n: each[n] for n in names if n in each}) for each in dumped]
    tools: dict[str, Tool] = {tool.name: tool for tool in declared}
    shown = [{"type": "function", "function": schema} for schema in dumped] or None
    if tools and not shows_tools:
        prompt = messages.pop(0).content if messages[0].role == "system" else ""
        try:
            prompt = (prompt + _describe_tools(tools, tool_format)).strip()
        except Exception as error:  # noqa: BLE001 - schemas are foreign and may be malformed
            raise ApiError(400, f"The tools cannot be described: {error}", param="tools") from None
        messages.insert(0, ApiMessage(role="system", content=prompt))
        shown = None
    return ModelCall(
        messages=messages,
        tools=tools,
        shown_tools=shown,
        reads_calls=tool_choice == "auto",
        **options,
    )


def _describe_tools(tools: Mapping[str, Tool], tool_format: ToolFormat) -> str:
    if not tool_format.is_native:
        return "\n\n" + tool_format.instructions(list(tools.values()))
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools.values())
    return HERMES_TOOLS_TEXT.format(schemas=schemas)


def _api_message(message: _Spoken | _Assistant | _Result) -> ApiMessage:
    content = text_of(message.content)
    if isinstance(message, _Result):
        return ApiMessage(role="tool", content=content, call_id=message.tool_call_id)
    if isinstance(message, _Assistant):
        calls = tuple(
            ApiCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        )
        return ApiMessage(role="assistant", content=content, calls=calls)
    return ApiMessage(role="user" if message.role == "user" else "system", content=content)


def chat_reply(request: ChatRequest, reply_id: str, turns: Sequence[Turn], decode: Decode) -> Json:
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
    return {**head, "choices": choices, "usage": _usage(turns)}


def chat_events(
    request: ChatRequest, reply_id: str, turns: Sequence[Turn], decode: Decode
) -> Iterator[str]:
    """Yield a reply as server-sent events.

    Calls are read when a turn has ended, so each choice is a few chunks.
    """
    head = _head(request, reply_id, "chat.completion.chunk")
    with_usage = bool(request.stream_options and request.stream_options.include_usage)
    usage = {"usage": None} if with_usage else {}

    def chunk(index: int, delta: Json, **members: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event({**head, "choices": [{**choice, **members}], **usage})

    for i, turn in enumerate(turns):
        logprobs = _logprobs(turn, decode) if request.logprobs else None
        yield chunk(i, {"role": "assistant", "content": None if turn.message.calls else ""})
        if turn.message.content:
            yield chunk(i, {"content": turn.message.content}, logprobs=logprobs)
        for place, call in enumerate(_message(turn).get("tool_calls", ())):
            yield chunk(i, {"tool_calls": [{"index": place, **call}]})
        yield chunk(i, {}, finish_reason=_finish_reason(turn))
    if with_usage:
        yield event({**head, "choices": [], "usage": _usage(turns)})
    yield "data: [DONE]\n\n"


def event(data: Json, name: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def _usage(turns: Sequence[Turn]) -> Json:
    prompt = len(turns[0].transition.prompt_ids)  # which the choices share
    completion = sum(len(turn.transition.completion_ids) for turn in turns)
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {**tokens, "total_tokens": prompt + completion}


def _head(request: ChatRequest, reply_id: str, kind: str) -> Json:
    return {"id": reply_id, "object": kind, "created": int(time.time()), "model": request.model}


def _message(turn: Turn) -> Json:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in turn.message.calls
    ]
    content = turn.message.content
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _finish_reason(turn: Turn) -> str:
    reason = str(turn.transition.info["finish_reason"])
    # A cut-off turn reports "length" even with whole calls, since a rollout ends there.
    return "tool_calls" if turn.message.calls and reason == "stop" else reason


def _logprobs(turn: Turn, decode: Decode) -> Json:
    sampled = turn.transition
    texts = [decode([token]) or "" for token in sampled.completion_ids]
    tokens = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in zip(texts, sampled.logprobs.tolist(), strict=True)
    ]
    return {"content": tokens, "refusal": None}
