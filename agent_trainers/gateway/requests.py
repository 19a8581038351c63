"""Requests of ``/chat/completions`` and ``/responses``: untrusted JSON, read into one form."""

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import AliasChoices, BeforeValidator, Field

from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.chat_messages import HERMES_TOOLS_TEXT
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.gateway.conversation import ApiMessage, Strict
from agent_trainers.policies.policy import Schemas

_HONOURED: Final = {"model", "tools", "tool_choice", "parallel_tool_calls"}
CHAT_PARAMETERS: Final = _HONOURED | {
    "messages", "max_tokens", "max_completion_tokens", "stop", "seed", "stream", "stream_options"
}  # fmt: skip
RESPONSES_PARAMETERS: Final = _HONOURED | {"input", "instructions", "max_output_tokens"}
_WITHOUT_EFFECT: Final = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "max_tool_calls", "service_tier",
)  # fmt: skip
"""Parameters that change no reply, whatever their value."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "logprobs": False,
    "top_logprobs": 0, "n": 1, "response_format": {"type": "text"}, "modalities": ["text"],
    "text": {"format": {"type": "text"}}, "include": [], "reasoning": {},
    "truncation": "disabled", "background": False, "stream": False,
}  # fmt: skip
"""Values without effect of parameters that are refused otherwise."""
_WAYS_OUT: Final = "Gateway(…, ignored_parameters=[…]) ignores parameters."


def _as_messages(items: Any) -> Any:
    """Return the input of ``/responses`` as messages of ``/chat/completions``."""
    if not isinstance(items, list):
        return [{"role": "user", "content": items}] if isinstance(items, str) else items
    messages: list[Any] = []
    calls: list[Any] | None = None  # of the last message, if it is an assistant's
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":  # one turn is several items
            if calls is None:
                calls = []
                messages.append({"role": "assistant", "tool_calls": calls})
            calls.append(item)
            continue
        calls = None
        if kind == "function_call_output":
            item = {**item, "role": "tool"}
        elif isinstance(item, dict) and item.get("role") == "assistant":
            calls = []
            item = {"tool_calls": calls, **item}
        messages.append(item)
    return messages


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
    tools: list[Annotated[_Function, BeforeValidator(_as_function)]] = Field(default=[])
    tool_choice: Literal["auto", "none"] = "auto"
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

    @property
    def conversation(self) -> list[ApiMessage]:
        """The messages, with the instructions first."""
        text = self.instructions
        return [*([ApiMessage(role="system", content=text)] if text else []), *self.messages]


def parse_request(
    body: Mapping[str, Any],
    honoured: Collection[str],
    *,
    sampling: Mapping[str, float],
    ignored: Collection[str],
) -> Request:
    """Return a validated request."""
    kept = {}
    neutral = {**_NEUTRAL, **sampling}
    for name, value in body.items():
        if name in ignored or value is None or name in _WITHOUT_EFFECT:
            continue
        if name in honoured:
            kept[name] = value
        elif name not in neutral:
            raise _refusal(f"Unrecognized request argument supplied: {name}.")
        elif value != neutral[name]:
            text = f"{name} can only be {neutral[name]!r}; the request asks for {value!r:.100}."
            raise _refusal(text)
    try:
        return Request.model_validate(kept)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise _refusal(f"{param}: {first['msg']}.") from None


def read_tools(
    request: Request, *, are_shown: bool
) -> tuple[dict[str, Tool], Schemas, list[ApiMessage]]:
    """Return a request's functions by name, those for the chat template, and the conversation.

    Unless the template shows them (`are_shown`), the system prompt describes them.
    """
    messages = request.conversation
    dumped = [schema.model_dump(exclude_none=True) for schema in request.tools]
    tools: dict[str, Tool] = {schema["name"]: SchemaTool(**schema) for schema in dumped}
    if are_shown or not tools:
        return tools, [{"type": "function", "function": each} for each in dumped] or None, messages
    prompt = messages.pop(0).content if messages[0].role == "system" else ""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools.values())
    prompt = (prompt + HERMES_TOOLS_TEXT.format(schemas=schemas)).strip()
    return tools, None, [ApiMessage(role="system", content=prompt), *messages]


def _refusal(message: str) -> ApiError:
    return ApiError(400, f"{message} {_WAYS_OUT}")
