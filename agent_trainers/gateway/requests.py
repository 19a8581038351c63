"""Requests of ``/chat/completions`` and ``/responses``: untrusted JSON, read into one form."""

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.chat_messages import HERMES_TOOLS_TEXT
from agent_trainers.policies.policy import Schemas
from agent_trainers.trajectory import StopReason

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
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


class ApiError(Exception):
    """A request that is refused or that failed.

    Client libraries retry the statuses 408, 409, 429, and 500 and above. `stop_reason` is the
    episode's if no later call succeeds; None for a mistake of the program itself.
    """

    def __init__(self, status: int, message: str, stop_reason: StopReason | None = None) -> None:
        super().__init__(message)
        self.status, self.stop_reason = status, stop_reason


class _Strict(BaseModel):
    """JSON without type coercion; unknown members are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


def _join_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return "" if content is None else content
    if not all(isinstance(part, dict) and part.get("type") in _TEXT_TYPES for part in content):
        raise ValueError("can only hold parts of text")
    return "".join(str(part.get("text", "")) for part in content)


class ApiCall(_Strict):
    """A tool call with its id."""

    id: str = Field(validation_alias=AliasChoices("call_id", "id"))
    name: str = Field(validation_alias=AliasChoices(AliasPath("function", "name"), "name"))
    arguments: str = Field(
        default="", validation_alias=AliasChoices(AliasPath("function", "arguments"), "arguments")
    )


class ApiMessage(_Strict):
    """A message of a program, without members that no template shows."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_join_parts)] = Field(
        default="", validation_alias=AliasChoices("content", "output")
    )
    calls: list[ApiCall] = Field(default=[], validation_alias="tool_calls")
    call_id: str = Field(default="", validation_alias=AliasChoices("tool_call_id", "call_id"))
    """The call that a tool message answers."""
    function_call: None = None
    """Superseded by `calls`."""
    audio: None = None

    @property
    def meaning(self) -> tuple[str, list[tuple[str, str]]]:
        """The text up to white space around it, and the calls with canonical arguments."""
        calls = [(call.name, _canonical(call.arguments)) for call in self.calls]
        return self.content.strip(), calls


def _canonical(arguments: str) -> str:
    try:
        # As text, because == does not distinguish 1, 1.0 and True.
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


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


class _Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _as_function(tool: Any) -> Any:
    """Return the function of a tool, which is a member of it in ``/chat/completions``."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError("can only be a function: {'type': 'function', ...}")
    return tool.get("function", tool)


class Request(_Strict):
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
    stream_options: dict[str, bool] = Field(default={})


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
    messages = list(request.messages)
    if request.instructions:
        messages.insert(0, ApiMessage(role="system", content=request.instructions))
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
