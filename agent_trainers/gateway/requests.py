"""Requests of ``/chat/completions`` and ``/responses``, read into one form.

A program sends its whole conversation with each call, including its own rendering of the model's
turns. An assistant message *is* a turn that was sampled in this session if

* everything before it equals the state in which that turn was sampled, and
* it has the same meaning: the same text up to surrounding white space, and the same calls in the
  same order, with arguments that are equal as JSON.

Call ids, ``null`` for ``""``, text parts, and members that no chat template shows are ignored. Such
a message is replaced by the sampled text, and the state by the sampled tokens (see `ChatRenderer`).
Any other assistant message was written by the program: the state is rendered again from there on,
and becomes a separate row.
"""

import bisect
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from agent_envs.core.messages import Message
from agent_envs.core.tool import SchemaTool, Tool
from agent_envs.formats.openai_format import HERMES_TOOLS_TEXT, FunctionCall, action_text
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.policies.control_tokens import clean
from agent_trainers.policies.policy import Generation, Schemas
from agent_trainers.trajectory import StopReason, Transition

_HERMES: Final = TOOL_FORMATS["hermes"]
"""The format in which models write calls."""
_EXTRA_TOKENS: Final = 8
"""Tokens decoded beyond one per byte of a stop text: some tokens have no text."""
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
    body: Mapping[str, Any], honoured: Collection[str], sampling: Mapping[str, float]
) -> Request:
    """Return a validated request; `sampling` is the policy's distribution."""
    kept = {}
    neutral = {**_NEUTRAL, **sampling}
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in honoured:
            kept[name] = value
        elif name not in neutral:
            raise ApiError(400, f"Unrecognized request argument supplied: {name}. {_WAYS_OUT}")
        elif value != neutral[name]:
            text = f"{name} can only be {neutral[name]!r}; the request asks for {value!r:.100}."
            raise ApiError(400, f"{text} {_WAYS_OUT}")
    try:
        return Request.model_validate(kept)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{param}: {first['msg']}. {_WAYS_OUT}") from None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled turn."""

    transition: Transition
    """The turn as a step, whose reward is the sum of its reward terms at the end."""
    tools: Schemas
    """The tools that the chat template was given."""
    message: ApiMessage
    """The reply that the program received."""
    text: str
    """Its text in later states: the action, or the part before the text that stopped it."""
    reply_id: str

    @property
    def finish_reason(self) -> str:
        """Why sampling ended: ``stop`` or ``length``."""
        return str(self.transition.info["finish_reason"])

    @property
    def is_whole(self) -> bool:
        """Whether the model ended it, so that a state can begin with its tokens."""
        return self.finish_reason == "stop" and self.text == self.transition.action


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The limits of one turn, besides those of the policy."""

    decode: Callable[[Sequence[int]], str | None]
    """Decodes sampled tokens; returns None where the policy knows no tokens."""
    max_tokens: int
    stops: Sequence[str]
    """Texts that end it."""

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Return whether the turn ends after these tokens."""
        if len(token_ids) >= self.max_tokens or not self.stops:
            return len(token_ids) >= self.max_tokens
        width = max(len(stop.encode("utf-8", "replace")) for stop in self.stops) + _EXTRA_TOKENS
        return self._has_stop(token_ids[-width:])

    def cut(self, generation: Generation, max_tokens: int) -> tuple[Generation, str]:
        """Cut a turn at its end; return its tokens up to there, and its text without the stop."""
        ids = generation.completion_ids
        num_tokens = min(len(ids), max_tokens, self.max_tokens)
        if self.stops and self._has_stop(ids[:num_tokens]):
            lengths = range(1, num_tokens)
            num_tokens = 1 + bisect.bisect(lengths, False, key=lambda n: self._has_stop(ids[:n]))
        if num_tokens < len(ids):
            generation = replace(
                generation,
                completion_ids=ids[:num_tokens],
                logprobs=generation.logprobs[:num_tokens],
                text=self.decode(ids[:num_tokens]) or "",
                finish_reason="length",
            )
        place = self._find_stop(generation.text)
        if place is not None:
            generation = replace(generation, finish_reason="stop")
        return generation, generation.text[:place]

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        return self._find_stop(self.decode(token_ids)) is not None

    def _find_stop(self, text: str | None) -> int | None:
        """Return where the first stop text begins."""
        places = [text.find(stop) for stop in self.stops] if text else []
        return min((place for place in places if place >= 0), default=None)


def read_conversation(
    conversation: Sequence[ApiMessage], turns: Sequence[Turn], tools: Schemas
) -> tuple[list[Message], Turn | None]:
    """Return the state of a conversation, and the newest of `turns` with whose tokens it begins.

    `tools` are those that the chat template shows.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}  # of functions, by call id
    previous: Turn | None = None
    for message in conversation:
        if message.role == "tool":
            if message.call_id not in names:
                text = f"There is no tool call {message.call_id!r} before its result."
                raise ApiError(400, text)
            messages.append(_HERMES.result_message(names[message.call_id], message.content))
            continue
        if message.role != "assistant":
            messages.append({"role": message.role, "content": message.content})
            continue
        names |= {call.id: call.name for call in message.calls}
        sampled = (t for t in reversed(turns) if t.transition.messages == messages)
        turn = next((t for t in sampled if t.message.meaning == message.meaning), None)
        if turn:
            messages = [*turn.transition.messages]  # equal, and shared in memory
            text = turn.text
        else:
            calls = [FunctionCall(name=c.name, arguments=c.arguments) for c in message.calls]
            text = action_text(message.content, calls, _HERMES)
        messages.append({"role": "assistant", "content": text})
        if turn and turn.is_whole and turn.tools == tools and message is not conversation[-1]:
            previous = turn
    return messages, previous


def read_calls(
    text: str, tools: Mapping[str, Tool], request: Request, prefix: str
) -> tuple[str, list[ApiCall], dict[str, Any] | None]:
    """Return a turn's content, its calls with ids that begin with `prefix`, and the parsed action.

    A turn with a mistake (bad JSON, an unknown function, an answer besides a call, a second call
    that is not allowed) has no calls; its content is its whole text.
    """
    if not tools or request.tool_choice == "none":
        return text, [], None
    try:
        action = _HERMES.parse(text, tools)
    except Exception as error:  # noqa: BLE001 - schemas are foreign and may be malformed
        return text, [], {"kind": "invalid", "error": "unreadable", "message": str(error)}
    parsed, info = action.each_call, action.as_info()
    has_too_many = len(parsed) > 1 and not request.parallel_tool_calls
    if not parsed or not action.is_faultless or has_too_many:
        return text, [], info
    calls = [
        ApiCall(id=f"{prefix}_{i}", name=each.name or "", arguments=_as_json(each.arguments or {}))
        for i, each in enumerate(parsed)
    ]
    return text.partition("<tool_call>")[0].strip(), calls, info


def _as_json(arguments: Mapping[str, Any]) -> str:
    """Write arguments; escaped where a client could not send them back otherwise."""
    written = json.dumps(dict(arguments), ensure_ascii=False)
    return written if clean(written) == written else json.dumps(dict(arguments))
