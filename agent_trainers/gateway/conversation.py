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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from agent_envs.core.messages import Message
from agent_envs.formats.chat_messages import action_text
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.policies.policy import Schemas
from agent_trainers.trajectory import Transition

HERMES: Final = TOOL_FORMATS["hermes"]
"""The format in which models write calls."""
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


class Strict(BaseModel):
    """JSON without type coercion; unknown members are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


def _join_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return "" if content is None else content
    if not all(isinstance(part, dict) and part.get("type") in _TEXT_TYPES for part in content):
        raise ValueError("can only hold parts of text")
    return "".join(str(part.get("text", "")) for part in content)


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
    function_call: None = None
    """Superseded by `calls`."""
    audio: None = None

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
    tools: Schemas
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


TurnsByState = dict[int, list[Turn]]
"""The turns of a session, by the number of messages before them."""


def read_conversation(
    conversation: Sequence[ApiMessage], turns: TurnsByState, tools: Schemas
) -> tuple[list[Message], Turn | None]:
    """Return the state of a conversation, and the newest turn with whose tokens it begins.

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
            messages.append(HERMES.result_message(names[message.call_id], message.content))
            continue
        if message.role != "assistant":
            messages.append({"role": message.role, "content": message.content})
            continue
        names |= {call.id: call.name for call in message.calls}
        turn = _find(turns, messages, message)
        if turn:
            messages = [*turn.transition.messages]  # equal, and shared in memory
            text = turn.text
        else:
            calls = [FunctionCall(name=c.name, arguments=c.arguments) for c in message.calls]
            text = action_text(message.content, calls, HERMES)
        messages.append({"role": "assistant", "content": text})
        is_last = message is conversation[-1]
        if turn and turn.is_whole and turn.tools == tools and not is_last:
            previous = turn
    return messages, previous


def _find(turns: TurnsByState, messages: list[Message], message: ApiMessage) -> Turn | None:
    """Return the turn in the state `messages` that an assistant's message means."""
    equal = (t for t in reversed(turns.get(len(messages), ())) if t.transition.messages == messages)
    return next((turn for turn in equal if turn.message.means(message)), None)


def _canonical(arguments: str) -> str:
    try:
        # As text, because == does not distinguish 1, 1.0 and True.
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
