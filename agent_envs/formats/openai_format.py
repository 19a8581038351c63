"""Native structured calls, as OpenAI-compatible servers write them.

An action is a message of the assistant as text: ``{"tool_calls": [{"function": {"name": …,
"arguments": …}}]}``, or plain text, which is the answer.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.tool import Tool
from agent_envs.formats.actions import (
    ANSWER_EXAMPLE,
    ANSWER_EXAMPLE_TEXT,
    BAD_CALL_TEXT,
    END_OF_THOUGHT,
    MAX_CALLS,
    STRICT_JSON,
    ParsedAction,
    Span,
    ToolFormat,
    find_spans,
    skip_space,
    without_thoughts,
)

CALL_FUNCTION_TEXT: Final = "To call a tool, call one of the functions {names}. "
ANSWER_IN_TEXT: Final = "To answer, write nothing but the answer, without a call."
_MARKUP: Final = "<(?P<tag>answer|tool_call)>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One structured call: name, and the model's JSON text, which may be malformed."""

    name: str
    arguments: str


def write_message(content: str, calls: Sequence[FunctionCall]) -> str:
    """Write the assistant's text and its calls as an action."""
    if not calls:
        return content
    # without the server's call ids, which differ from run to run
    entries = [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    said = {"content": content} if content else {}
    return json.dumps(said | {"tool_calls": entries}, ensure_ascii=False)


def read_message(text: str) -> tuple[str, list[FunctionCall] | None]:
    """Return text and calls of an action written by `write_message`; None for malformed calls."""
    try:
        message = STRICT_JSON.decode(text.strip())
    except (ValueError, RecursionError):
        return text, []
    if not isinstance(message, dict) or "tool_calls" not in message:
        return text, []
    entries, content = message["tool_calls"], message.get("content")
    calls = [_call(entry) for entry in entries] if isinstance(entries, list) else []
    known = [call for call in calls if call is not None]
    is_whole = known and len(known) == len(calls)
    return content if isinstance(content, str) else "", known if is_whole else None


class OpenAIFormat(ToolFormat):
    """Structured calls; a message without one is the answer, or goes to the user.

    With a user, an answer has tags.
    """

    name = "openai"
    is_native = is_structured = True

    def __init__(self, *, has_user: bool = False) -> None:
        """Set whether plain text goes to a user."""
        self._has_user = has_user

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Parse one model turn."""
        content, calls = read_message(text)
        if calls:
            read = [self.json_call(c.name, c.arguments, tools) for c in calls[: MAX_CALLS + 1]]
            return self.turn(read, tools)
        found = [span.content for _, span in find_spans(content, _MARKUP, _read_markup(content))]
        if calls is None or None in found:  # a call that the server could not parse
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        tagged = [answer for answer in found if answer]
        if self._has_user:
            each = [self.checked_answer(answer, tools) for answer in tagged[: MAX_CALLS + 1]]
            return self.turn(each, tools)
        # many models answer in tags
        answer = tagged[0] if len(tagged) == 1 else without_thoughts(content)
        return self.checked_answer(answer, tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call."""
        written = json.dumps(dict(arguments), ensure_ascii=False)
        return write_message("", [FunctionCall(name=name, arguments=written)])

    def write_answer(self, answer: str) -> str:
        """Write an answer."""
        return f"<answer>{answer}</answer>" if self._has_user else answer

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe answers; the server describes calls."""
        plain = ": a message that holds nothing but the answer."
        form = f", as {ANSWER_EXAMPLE}." if self._has_user else plain
        return f"Call a tool, or end with your final answer{form}"

    def examples(self, tools: Mapping[str, Tool]) -> str:
        """Describe calls and answers; no model writes the structure itself."""
        calls = CALL_FUNCTION_TEXT.format(names=", ".join(tools)) if tools else ""
        tagged = ANSWER_EXAMPLE_TEXT.format(answer=ANSWER_EXAMPLE)
        return calls + (tagged if self._has_user else ANSWER_IN_TEXT)

    def for_dialogue(self) -> ToolFormat:
        """Return the format in which an answer has tags; plain text goes to the user."""
        return OpenAIFormat(has_user=True)


def _read_markup(content: str) -> Callable[[re.Match[str]], Span]:
    """Return the reader of an answer between tags ("" if it is not closed), or None for a call."""
    last_end = content.rfind("</answer>")

    def read(opening: re.Match[str]) -> Span:
        start = opening.end()
        if opening["tag"] == "answer":
            if start > last_end:
                return Span(start, True, "")
            end = content.index("</answer>", start)
            is_whole = content.find(END_OF_THOUGHT, start, end) < 0
            return Span(end, is_whole, content[start:end])
        with contextlib.suppress(ValueError, RecursionError):
            return Span(STRICT_JSON.raw_decode(content, skip_space(content, start))[1], True, None)
        return Span(len(content), False, None)

    return read


def _call(entry: Any) -> FunctionCall | None:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return FunctionCall(name=function["name"], arguments=text)
