"""The conversations of a session: which of its messages are turns that were sampled.

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

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from agent_envs.core.messages import Message
from agent_envs.formats.chat_messages import action_text
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.trajectory import Transition

Schemas = list[dict[str, Any]]
_TEXT_TYPES = ("text", "input_text", "output_text")


class Strict(BaseModel):
    """JSON without type coercion; unknown members are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


def _join_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return "" if content is None else content
    if not all(isinstance(part, dict) and part.get("type") in _TEXT_TYPES for part in content):
        raise ValueError("can only hold parts of text")
    return "".join(str(part.get("text", "")) for part in content)


def _refuse(value: object) -> None:
    if value is not None:
        raise ValueError("is not supported: send text as content, and calls as tool_calls")


_Unsupported = Annotated[None, BeforeValidator(_refuse)]


class ApiCall(Strict):
    """A tool call with its id."""

    id: str = Field(validation_alias=AliasChoices("call_id", "id"))
    name: str = Field(validation_alias=AliasChoices(AliasPath("function", "name"), "name"))
    arguments: str = Field(
        default="", validation_alias=AliasChoices(AliasPath("function", "arguments"), "arguments")
    )


class ApiMessage(Strict):
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
    function_call: _Unsupported = None
    audio: _Unsupported = None

    def means(self, other: "ApiMessage") -> bool:
        """Return whether two assistant messages have the same meaning."""
        calls = [(call.name, _canonical(call.arguments)) for call in self.calls]
        same_calls = calls == [(call.name, _canonical(call.arguments)) for call in other.calls]
        return same_calls and self.content.strip() == other.content.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled turn."""

    transition: Transition
    """The turn as a step, whose reward is the sum of its reward terms at the end."""
    tools: Schemas | None
    """The tools that the chat template was given."""
    message: ApiMessage
    """The reply that the program received."""
    text: str
    """Its text in later states: the action, or the part before the text that stopped it."""
    is_whole: bool
    """Whether the model ended it, so that a state can begin with its tokens."""
    reply_id: str

    @property
    def finish_reason(self) -> str:
        """Why sampling ended: ``stop`` or ``length``."""
        return str(self.transition.info["finish_reason"])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state that a call shows the model."""

    messages: list[Message]
    digest: bytes
    """Hash of the messages, under which turns sampled here are stored."""
    previous: Turn | None
    """The newest turn with whose tokens the state begins."""


class Conversations:
    """The turns of one session, by the states in which they were sampled."""

    def __init__(self, tool_format: ToolFormat) -> None:
        """Start without turns."""
        self._format = tool_format
        self._turns: dict[bytes, list[Turn]] = {}
        self._names: dict[str, str] = {}  # function names by call id

    def add(self, state: State, turn: Turn) -> None:
        """Store a turn."""
        self._turns.setdefault(state.digest, []).append(turn)
        self._names |= {call.id: call.name for call in turn.message.calls}

    def read(self, conversation: Sequence[ApiMessage], tools: Schemas | None) -> State:
        """Return the state of a conversation with `tools` for the chat template."""
        messages: list[Message] = []
        names = dict(self._names)
        previous: Turn | None = None
        digest, num_hashed = hashlib.sha256(), 0
        for role, run in itertools.groupby(enumerate(conversation), key=lambda each: each[1].role):
            if role == "tool":
                self._append_results(messages, [self._result(*each, names) for each in run])
                continue
            for place, message in run:
                if role != "assistant":
                    messages.append({"role": message.role, "content": message.content})
                    continue
                digest.update(json.dumps(messages[num_hashed:]).encode())
                num_hashed = len(messages)
                turn = self._find(digest.digest(), message)
                names |= {call.id: call.name for call in message.calls}
                if turn:
                    messages = [*turn.transition.messages]  # equal, and shared in memory
                    text = turn.text
                else:
                    calls = [
                        FunctionCall(name=c.name, arguments=c.arguments) for c in message.calls
                    ]
                    text = action_text(message.content, calls, self._format)
                messages.append({"role": "assistant", "content": text})
                is_last = place + 1 == len(conversation)
                if turn and turn.is_whole and turn.tools == tools and not is_last:
                    previous = turn
        digest.update(json.dumps(messages[num_hashed:]).encode())
        return State(messages=messages, digest=digest.digest(), previous=previous)

    def _result(self, place: int, message: ApiMessage, names: Mapping[str, str]) -> Message:
        if message.call_id not in names:
            text = f"There is no tool call {message.call_id!r} before its result."
            raise ApiError(400, text, param=f"messages.{place}.tool_call_id")
        return self._format.result_message(names[message.call_id], message.content)

    def _append_results(self, messages: list[Message], results: list[Message]) -> None:
        """Append consecutive results as environments do.

        Formats without a tool role merge them, since templates alternate user and assistant.
        """
        role = results[0]["role"]
        if role == "tool":
            messages += results
            return
        first = [messages.pop()] if messages and messages[-1]["role"] == role else []
        text = "\n\n".join(message["content"] for message in [*first, *results])
        messages.append({"role": role, "content": text})

    def _find(self, digest: bytes, message: ApiMessage) -> Turn | None:
        """Return the turn that a message means; among equal ones the one with the same call ids."""
        equal = [turn for turn in self._turns.get(digest, ()) if turn.message.means(message)]
        ids = [call.id for call in message.calls]
        named = (t for t in reversed(equal) if [call.id for call in t.message.calls] == ids)
        return next(named, equal[-1] if equal else None)


def _canonical(arguments: str) -> str:
    try:
        # As text, because == does not distinguish 1, 1.0 and True.
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
