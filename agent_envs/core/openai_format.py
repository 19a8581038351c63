"""Native structured calls, as OpenAI-compatible servers write them.

An action is a message of the assistant as text: ``{"tool_calls": [{"function": {"name": …,
"arguments": …}}]}``, or plain text, which is the answer. `read_message` and `write_message` are the
way between such a text and the members of the API's message.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.actions import (
    BAD_CALL_TEXT,
    EMPTY_ANSWER_TEXT,
    MULTIPLE_ACTIONS_TEXT,
    STRICT_JSON,
    ParsedAction,
    ToolFormat,
    without_thoughts,
)
from agent_envs.core.tool import Tool

CALL_FUNCTION_TEXT: Final = "To call a tool, call one of the functions {names}. "
ANSWER_IN_TEXT: Final = "To answer, write nothing but the answer, without a call."
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One structured call."""

    name: str
    """The function."""
    arguments: str
    """Its arguments as JSON text, as the model wrote it: it may be malformed."""


def write_message(content: str, calls: Sequence[FunctionCall]) -> str:
    """Write a message of the assistant as the text of an action.

    Args:
        content: What was said besides.
        calls: The structured calls; without any, the text is `content`.
    """
    if not calls:
        return content
    # The server's call ids are left out: they differ from run to run.
    entries = [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    message = {"content": content, "tool_calls": entries} if content else {"tool_calls": entries}
    return json.dumps(message, ensure_ascii=False)


def read_message(text: str) -> tuple[str, list[FunctionCall] | None]:
    """Read what `write_message` wrote.

    Returns:
        What was said, and the calls; None where `text` looks like calls and is malformed.
    """
    stripped = text.strip()
    if not stripped.startswith("{"):
        return text, []
    try:
        message = STRICT_JSON.decode(stripped)
    except (ValueError, RecursionError):
        return text, []
    if not isinstance(message, dict) or "tool_calls" not in message:
        return text, []
    calls, content = message["tool_calls"], message.get("content")
    read = [_call(entry) for entry in calls] if isinstance(calls, list) else []
    is_whole = bool(read) and all(call is not None for call in read)
    kept = [call for call in read if call is not None]
    return content if isinstance(content, str) else "", kept if is_whole else None


class OpenAIFormat(ToolFormat):
    """Structured calls; a message without one is the answer."""

    name = "openai"
    is_native = True

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
        content, calls = read_message(text)
        if calls is None:
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        if len(calls) > 1:
            count = len(calls)
            return self.invalid("multiple_actions", MULTIPLE_ACTIONS_TEXT, tools, count=count)
        return self._read_call(calls[0], tools) if calls else self._read_answer(content, tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        written = json.dumps(dict(arguments), ensure_ascii=False)
        return write_message("", [FunctionCall(name=name, arguments=written)])

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return answer

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Say how to answer; the server says how to call."""
        return (
            "Call one tool per turn, or end with your final answer: a message that holds nothing "
            "but the answer."
        )

    def examples(self, tools: Mapping[str, Tool]) -> str:
        """Say how to call and how to answer; no model writes the structure itself."""
        return (CALL_FUNCTION_TEXT.format(names=", ".join(tools)) if tools else "") + ANSWER_IN_TEXT

    def _read_call(self, call: FunctionCall, tools: Mapping[str, Tool]) -> ParsedAction:
        try:
            arguments = STRICT_JSON.decode(call.arguments) if call.arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return self.bad_json(error, tools)
        return self.checked_call(call.name, arguments, tools)

    def _read_answer(self, content: str, tools: Mapping[str, Tool]) -> ParsedAction:
        answer = without_thoughts(content).strip()
        # A model used to answer tags means what stands between them.
        if len(tagged := _ANSWER.findall(answer)) == 1:
            answer = tagged[0].strip()
        if "<tool_call>" in answer:  # servers hand on what they cannot read as a call
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        if not answer:
            return self.invalid("bad_answer", EMPTY_ANSWER_TEXT, tools)
        return ParsedAction(kind="answer", answer=answer)


def _call(entry: Any) -> FunctionCall | None:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return FunctionCall(name=function["name"], arguments=text)
