"""Turns of the model: where they end, which messages of a program are one, and what they call.

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
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool
from agent_envs.formats.openai_format import FunctionCall, action_text
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.gateway.requests import ApiCall, ApiError, ApiMessage, Request
from agent_trainers.policies.control_tokens import clean
from agent_trainers.policies.policy import Generation, Schemas
from agent_trainers.trajectory import Transition

_HERMES: Final = TOOL_FORMATS["hermes"]
"""The format in which models write calls."""
_EXTRA_TOKENS: Final = 8
"""Tokens decoded beyond one per byte of a stop text: some tokens have no text."""


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
