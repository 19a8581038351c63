"""Requests of ``/chat/completions`` and ``/responses``: untrusted JSON, read into one form."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.chat_messages import HERMES_TOOLS_TEXT
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.conversation import ApiMessage, Schemas, Strict

_HONOURED: Final = {"model", "tools", "tool_choice", "parallel_tool_calls", "stream"}
CHAT_PARAMETERS: Final = _HONOURED | {
    "messages", "max_tokens", "max_completion_tokens", "stop", "seed", "stream_options"
}  # fmt: skip
RESPONSES_PARAMETERS: Final = _HONOURED | {
    "input", "instructions", "max_output_tokens", "previous_response_id"
}  # fmt: skip
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
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n": (1,),
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


def _as_messages(items: Any) -> Any:
    """Return the input of ``/responses`` as messages of ``/chat/completions``."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return [*map(_as_message, items)] if isinstance(items, list) else items


def _as_message(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [item]}
    return {**item, "role": "tool"} if kind == "function_call_output" else item


class _Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _as_function(tool: Any) -> Any:
    """Return the function of a tool, which is a member of it in ``/chat/completions``."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError("can only be a function: {'type': 'function', ...}")
    return tool.get("function", tool)


class _StreamOptions(Strict):
    include_usage: bool = False


class Request(Strict):
    """The honoured parameters of a request."""

    model: str = "policy"
    messages: Annotated[list[ApiMessage], Field(min_length=1), BeforeValidator(_as_messages)] = (
        Field(validation_alias=AliasChoices("messages", "input"))
    )
    instructions: str = ""
    previous_response_id: str | None = None
    tools: list[Annotated[_Function, BeforeValidator(_as_function)]] = Field(default=[])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "max_output_tokens"),
    )
    stop: Annotated[
        list[str],
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = Field(default=[])
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call to the model."""

    request: Request
    messages: list[ApiMessage]
    """The whole conversation, which describes the tools where `shown_tools` is None."""
    tools: Mapping[str, Tool]
    """The program's functions by name."""
    shown_tools: Schemas | None
    """The tools for the chat template."""
    role: str
    """Name of the calling role, where a program has several roles."""


def parse_request(
    body: Mapping[str, Any],
    honoured: Collection[str],
    *,
    sampling: Mapping[str, float],
    ignored: Collection[str],
) -> Request:
    """Return a validated request."""
    kept = {}
    for name, value in body.items():
        if name in ignored or value is None or name in _WITHOUT_EFFECT:
            continue
        if name in honoured:
            kept[name] = value
        elif name in sampling or name in _NEUTRAL:
            _check_neutral(name, value, sampling)
        else:
            raise _unsupported(name, f"Unrecognized request argument supplied: {name}.")
    try:
        request = Request.model_validate(kept)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{param}: {first['msg']}", param=param) from None
    if request.tool_choice not in ("auto", "none"):
        text = "tool_choice can be 'auto' or 'none': the model decides by itself whether to call."
        raise _unsupported("tool_choice", text)
    return request


def make_call(
    request: Request,
    messages: list[ApiMessage],
    tool_format: ToolFormat,
    *,
    shows_tools: bool,
    role: str,
) -> ModelCall:
    """Return a call with the request's functions where the model sees them."""
    dumped = [schema.model_dump(exclude_none=True) for schema in request.tools]
    tools: dict[str, Tool] = {schema["name"]: SchemaTool(**schema) for schema in dumped}
    shown = [{"type": "function", "function": schema} for schema in dumped] or None
    if tools and not shows_tools:
        prompt = messages[0].content if messages[0].role == "system" else ""
        rest = messages[1:] if messages[0].role == "system" else messages
        try:
            prompt = (prompt + _describe_tools(tools, tool_format)).strip()
        except Exception as error:  # noqa: BLE001 - schemas are foreign and may be malformed
            raise ApiError(400, f"The tools cannot be described: {error}", param="tools") from None
        messages, shown = [ApiMessage(role="system", content=prompt), *rest], None
    return ModelCall(request=request, messages=messages, tools=tools, shown_tools=shown, role=role)


def _describe_tools(tools: Mapping[str, Tool], tool_format: ToolFormat) -> str:
    if not tool_format.is_native:
        return "\n\n" + tool_format.instructions(list(tools.values()))
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools.values())
    return HERMES_TOOLS_TEXT.format(schemas=schemas)


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
    raise _unsupported(name, f"{reason}; the request asks for {value!r:.100}.")


def _unsupported(param: str, message: str) -> ApiError:
    text = f"{message} {_WAYS_OUT}"
    return ApiError(400, text, param=param, code="unsupported_parameter")
