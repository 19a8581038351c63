"""Requests of ``/chat/completions``, ``/responses`` and ``/messages``, read into one form.

A parameter is honoured, has no effect, or is refused by name.
"""

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.openai_format import HERMES_TOOLS_TEXT
from agent_trainers.policies.policy import Schemas
from agent_trainers.trajectory import StopReason

_HONOURED: Final = {"model", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
CHAT_PARAMETERS: Final = _HONOURED | {
    "messages", "max_tokens", "max_completion_tokens", "stop", "seed", "stream", "stream_options"
}  # fmt: skip
RESPONSES_PARAMETERS: Final = _HONOURED | {"input", "instructions", "max_output_tokens"}
_WITHOUT_EFFECT: Final = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "max_tool_calls", "service_tier", "cache_control",
)  # fmt: skip
"""Parameters that change no reply, whatever their value."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "logprobs": False,
    "top_logprobs": 0, "n": 1, "modalities": ["text"], "include": [], "reasoning": {},
    "truncation": "disabled", "background": False, "stream": False,
    "thinking": {"type": "disabled"},
}  # fmt: skip
"""Values without effect of parameters that are refused otherwise."""
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
_MESSAGES_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


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
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_TYPES:
            raise ValueError(f"holds a part of type {kind!r:.40}; the policy reads text only")
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
    calls: Annotated[
        list[ApiCall], BeforeValidator(lambda calls: [] if calls is None else calls)
    ] = Field(default=[], validation_alias="tool_calls")
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
    for kind, group in itertools.groupby(items, _kind):
        if kind == "function_call":  # one turn is several items
            said = messages.pop() if messages and _kind(messages[-1]) == "assistant" else {}
            messages.append({"role": "assistant", **said, "tool_calls": list(group)})
        elif kind == "function_call_output":
            messages += [{**item, "role": "tool"} for item in group]
        else:
            messages += group
    return messages


def _kind(item: Any) -> Any:
    item = item if isinstance(item, dict) else {}
    return item.get("role") or item.get("type")


class _Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def tag(self) -> dict[str, Any]:
        """The form of a call of this function, in a structural tag."""
        return {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{self.name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": self.parameters or {}},
            "end": "}\n</tool_call>",
        }


def _as_function(tool: Any) -> Any:
    """Return the function of a tool, which is a member of it in ``/chat/completions``."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError("can only be a function: {'type': 'function', ...}")
    return tool.get("function", tool)


def _read_schema(form: Any) -> Any:
    """Return the JSON schema of a ``response_format``; None for plain text."""
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "json_schema":
        named = form.get("json_schema", form)
        return named.get("schema", {}) if isinstance(named, dict) else named
    if kind not in ("text", "json_object"):
        raise ValueError("its type can only be 'text', 'json_object' or 'json_schema'")
    return None if kind == "text" else {"type": "object"}


class Request(_Strict):
    """The honoured parameters of a request."""

    model: str = "policy"
    messages: Annotated[list[ApiMessage], Field(min_length=1), BeforeValidator(_as_messages)] = (
        Field(validation_alias=AliasChoices("messages", "input"))
    )
    instructions: str = ""
    tools: list[Annotated[_Function, BeforeValidator(_as_function)]] = Field(default=[])
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The only function that may be called."""
    parallel_tool_calls: bool = True
    answer_schema: Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)] = Field(
        default=None, validation_alias="response_format"
    )
    """JSON schema of a turn without calls."""
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

    @property
    def guide(self) -> dict[str, Any] | None:
        """The structural tag that a turn has to follow, if any."""
        forms: list[dict[str, Any]] = []
        is_required, can_call = self.tool_choice == "required", self.tool_choice != "none"
        if is_required or (self.answer_schema is not None and self.tools and can_call):
            called = [tool for tool in self.tools if self.tool_name in (None, tool.name)]
            is_single = self.tool_name is not None or not self.parallel_tool_calls
            forms.append({
                "type": "tags_with_separator",
                "tags": [tool.tag for tool in called],
                "separator": "\n",
                "at_least_one": True,
                "stop_after_first": is_single,
            })  # fmt: skip
        if self.answer_schema is not None and not is_required:
            forms.append({"type": "json_schema", "json_schema": self.answer_schema})
        if not forms:
            return None
        form = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
        return {"type": "structural_tag", "format": form}


def parse_request(
    body: Mapping[str, Any], honoured: Collection[str], sampling: Mapping[str, float]
) -> Request:
    """Return a validated request; `sampling` is the policy's distribution."""
    kept = {}
    neutral = {**_NEUTRAL, **sampling}
    for name, value in _unnested(body):
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in honoured:
            kept[name] = value
        elif name not in neutral:
            raise refused(name, f"Unrecognized request argument supplied: {name}.")
        elif value != neutral[name]:
            text = f"{name} can only be {neutral[name]!r}; the request asks for {value!r:.100}."
            raise refused(name, text)
    longest = [kept[name] for name in ("max_tokens", "max_completion_tokens") if name in kept]
    if longest[1:] not in ([], longest[:1]):
        raise refused("max_tokens", "max_tokens and max_completion_tokens differ; send one.")
    choice = kept.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        kept["tool_name"] = function.get("name") if isinstance(function, dict) else function
        kept["tool_choice"] = "required"
    try:
        request = Request.model_validate(kept)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        if "messages" not in honoured:
            param = param.replace("messages", "input", 1)
        text = f"{param}: {first['msg'].removeprefix('Value error, ')}."
        raise refused(param.partition(".")[0], text) from None
    _check_tools(request)
    return request


def refused(name: str, text: str) -> ApiError:
    """Return the error of a parameter, and how it is ignored if a request can do without it."""
    if name not in ("messages", "input", "tools", "model"):
        python = f"in Python, ignored_parameters=[{name!r}]"
        text += f" --ignored_parameters {name} ignores it ({python})."
    return ApiError(400, text)


def _unnested(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters, with the members of those that hold a format and others."""
    for name, value in body.items():
        if name not in ("text", "output_config") or not isinstance(value, dict):
            yield name, value
            continue
        for member, inner in value.items():
            yield ("response_format" if member == "format" else f"{name}.{member}"), inner


def _check_tools(request: Request) -> None:
    counts = Counter(tool.name for tool in request.tools)
    if counts and (most := counts.most_common(1)[0])[1] > 1:
        raise refused("tools", f"tools: {most[1]} functions have the name {most[0]!r}.")
    if request.tool_choice != "required":
        return
    if not counts:
        raise refused("tool_choice", "tool_choice: there are no tools to call.")
    if request.tool_name is not None and request.tool_name not in counts:
        text = f"tool_choice: there is no function {request.tool_name!r:.100} in tools."
        raise refused("tool_choice", text)


def read_messages_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of Anthropic's ``/messages`` as one of ``/chat/completions``.

    Values that are malformed are kept, and refused by `parse_request`.
    """
    read = dict(body)
    if isinstance(messages := body.get("messages"), list):
        read["messages"] = list(itertools.chain.from_iterable(map(_split_message, messages)))
        if system := read.pop("system", None):
            read["messages"].insert(0, {"role": "system", "content": system})
    if isinstance(tools := body.get("tools"), list):
        read["tools"] = [_read_tool(tool) for tool in tools]
    if isinstance(choice := body.get("tool_choice"), dict):
        kind = choice.get("type")
        named = {"type": "function", "name": choice.get("name")}
        read["tool_choice"] = named if kind == "tool" else _MESSAGES_CHOICES.get(str(kind), kind)
        if choice.get("disable_parallel_tool_use"):
            read["parallel_tool_calls"] = False
    for name, other in (("stop_sequences", "stop"), ("output_format", "response_format")):
        if name in body:
            read[other] = read.pop(name)
    return read


def _read_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        return tool
    return {"type": "function", "function": {**tool, "parameters": tool.get("input_schema")}}


def _split_message(message: Any) -> list[Any]:
    """Return a message with blocks as messages with text, calls and results."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    if message.get("role") == "assistant":
        calls = [_read_call(block) for block in content if _kind(block) == "tool_use"]
        rest = [block for block in content if _kind(block) != "tool_use"]
        return [{"role": "assistant", "content": rest, "tool_calls": calls}]
    messages: list[Any] = []
    for is_result, blocks in itertools.groupby(content, lambda b: _kind(b) == "tool_result"):
        if is_result:
            messages += [
                {"role": "tool", "content": b.get("content"), "tool_call_id": b.get("tool_use_id")}
                for b in blocks
            ]
        else:
            messages.append({**message, "content": list(blocks)})
    return messages or [{**message, "content": ""}]


def _read_call(block: Mapping[str, Any]) -> dict[str, Any]:
    return {**block, "arguments": json.dumps(block.get("input", {}))}


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
