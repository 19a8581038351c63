"""The conversations of a session: which of its messages are turns that were sampled.

A program sends its whole conversation with each call, its own rendering of the model's turns among
it. A message of the assistant *is* a turn that was sampled in this session if

* everything before it is what stood before that turn, and
* it means the same: the same text up to white space around it, and the same calls: as many, in the
  same order, of the same functions, with arguments that are equal as JSON.

Ids of calls, ``null`` for ``""``, parts instead of a text, and members that no template shows count
for nothing. Such a message stands for the sampled text itself, and the state for the sampled tokens
(see `ChatRenderer`). Any other message of the assistant is the program's own: the state is rendered
anew from there, and is a row of its own.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_envs.core.messages import Message
from agent_envs.formats.chat_messages import action_text
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.gateway.api_error import ApiError
from agent_trainers.trajectory import Transition

Schemas = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """A call as the API gives it."""

    id: str
    function: FunctionCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiMessage:
    """A message of a program, without what no template shows."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    calls: tuple[ApiCall, ...] = ()
    call_id: str = ""
    """The call that a tool's message answers."""

    def means(self, other: "ApiMessage") -> bool:
        """Say whether two messages of the assistant mean the same."""
        if len(self.calls) != len(other.calls):
            return False
        return self.content.strip() == other.content.strip() and all(
            one.function.name == two.function.name
            and _value(one.function.arguments) == _value(two.function.arguments)
            for one, two in zip(self.calls, other.calls, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that was sampled."""

    transition: Transition
    """The turn as a step, without its reward."""
    tools: Schemas | None
    """What the chat template was given."""
    message: ApiMessage
    """What the program was told."""
    text: str
    """What stands for it in a state: the action, or what the program saw of it if it was cut."""
    is_whole: bool
    """Whether the model ended it, so that a state can begin with its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a call shows the model."""

    messages: list[Message]
    digest: bytes
    """Of the messages: where a turn that is sampled here belongs."""
    previous: Turn | None
    """The newest turn whose tokens the state begins with."""


class Conversations:
    """The turns of one session, by the states in which they were sampled."""

    def __init__(self, tool_format: ToolFormat) -> None:
        """Begin without turns."""
        self._format = tool_format
        self._turns: dict[bytes, list[Turn]] = {}
        self._names: dict[str, str] = {}  # of functions, by the ids of their calls

    def note(self, state: State, turn: Turn) -> None:
        """Remember a turn."""
        self._turns.setdefault(state.digest, []).append(turn)
        self._names |= {call.id: call.function.name for call in turn.message.calls}

    def read(self, said: Sequence[ApiMessage], tools: Schemas | None) -> State:
        """Return the state that a program shows with `tools` for the chat template.

        Raises:
            ApiError: If a tool's message answers no call.
        """
        messages: list[Message] = []
        names = dict(self._names)
        previous: Turn | None = None
        digest, num_hashed = hashlib.sha256(), 0
        for role, run in itertools.groupby(enumerate(said), key=lambda each: each[1].role):
            if role == "tool":
                self._add_results(messages, [self._result(*each, names) for each in run])
                continue
            for place, message in run:
                if role != "assistant":
                    messages.append({"role": message.role, "content": message.content})
                    continue
                digest.update(json.dumps(messages[num_hashed:]).encode())
                num_hashed = len(messages)
                turn = self._find(digest.digest(), message)
                names |= {call.id: call.function.name for call in message.calls}
                calls = [call.function for call in message.calls]
                if turn:
                    messages = [*turn.transition.messages]  # equal: kept in memory once
                text = turn.text if turn else action_text(message.content, calls, self._format)
                messages.append({"role": "assistant", "content": text})
                is_last = place + 1 == len(said)
                if turn and turn.is_whole and turn.tools == tools and not is_last:
                    previous = turn
        digest.update(json.dumps(messages[num_hashed:]).encode())
        return State(messages=messages, digest=digest.digest(), previous=previous)

    def _result(self, place: int, message: ApiMessage, names: Mapping[str, str]) -> Message:
        if message.call_id not in names:
            raise ApiError(
                400,
                f"There is no tool call {message.call_id!r} before its result.",
                param=f"messages.{place}.tool_call_id",
            )
        return self._format.result_message(names[message.call_id], message.content)

    def _add_results(self, messages: list[Message], results: list[Message]) -> None:
        """Add results that follow each other as environments say them.

        In formats without a tool's role as one message: templates want users and models to take
        turns.
        """
        role = results[0]["role"]
        if role == "tool":
            messages += results
            return
        first = [messages.pop()] if messages and messages[-1]["role"] == role else []
        said = "\n\n".join(message["content"] for message in [*first, *results])
        messages.append({"role": role, "content": said})

    def _find(self, digest: bytes, message: ApiMessage) -> Turn | None:
        alike = [turn for turn in self._turns.get(digest, ()) if turn.message.means(message)]
        ids = [call.id for call in message.calls]
        named = (t for t in reversed(alike) if [call.id for call in t.message.calls] == ids)
        return next(named, alike[-1] if alike else None)


def _value(arguments: str) -> Any:
    try:
        # Written anew, 1 and 1.0 and true differ, which == does not tell apart.
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
