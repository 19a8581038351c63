"""How a model writes a tool call or an answer, and how that is read back.

One parser per format, strict about what counts as an action: exactly one call, or exactly one
answer, in a turn.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent_envs.core.actions import (
    STRICT_JSON,
    UNCLOSED_TEXT,
    ParsedAction,
    ToolFormat,
    example_arguments,
    skip_space,
    text_argument,
    without_thoughts,
)
from agent_envs.core.messages import Message
from agent_envs.core.openai_format import OpenAIFormat
from agent_envs.core.plain_formats import JsonFormat, ReactFormat
from agent_envs.core.tool import Tool

__all__ = ["TOOL_FORMATS", "HermesFormat", "ParsedAction", "TagsFormat", "ToolFormat"]

ANSWER_EXAMPLE: Final = "<answer>your answer</answer>"


class _MarkupFormat(ToolFormat):
    """What the formats with tags share: reading from left to right, and answers."""

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
        text = without_thoughts(text)
        tags = [*self._call_tags(tools), "answer"]
        opening = re.compile("|".join(f"<({re.escape(tag)})>" for tag in tags))
        actions: list[ParsedAction] = []
        position = 0
        # From left to right, so that a tag inside an action is part of that action.
        while match := opening.search(text, position):
            tag = match.group(match.lastindex or 0)
            read = self._parse_answer if tag == "answer" else self._parse_call
            action, position = read(text, match.end(), tag, tools)
            actions.append(action)
        return self.only_action(actions, tools)

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return f"<answer>{answer}</answer>"

    @abstractmethod
    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        """Return the tags that open a call."""

    @abstractmethod
    def _parse_call(
        self, text: str, start: int, tag: str, tools: Mapping[str, Tool]
    ) -> tuple[ParsedAction, int]:
        """Read the call whose opening tag ends at `start`; return it and where it ends."""

    def _parse_answer(
        self, text: str, start: int, tag: str, tools: Mapping[str, Tool]
    ) -> tuple[ParsedAction, int]:
        end = text.find("</answer>", start)
        if end < 0:
            return self.invalid("bad_answer", UNCLOSED_TEXT, tools, tag=tag), len(text)
        return self.checked_answer(text[start:end], tools), end + len("</answer>")


class HermesFormat(_MarkupFormat):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, as Qwen-style templates write it."""

    name = "hermes"
    is_native = True

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>{call}</tool_call>"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Say how to answer; the chat template says how to call."""
        return (
            "Call one tool per turn, or end with your final answer, and nothing but the answer, "
            f"as {ANSWER_EXAMPLE}."
        )

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return ["tool_call"]

    def _parse_call(
        self, text: str, start: int, tag: str, tools: Mapping[str, Tool]
    ) -> tuple[ParsedAction, int]:
        # raw_decode, not a search for the closing tag: a query may itself contain "</tool_call>".
        try:
            call, end = STRICT_JSON.raw_decode(text, skip_space(text, start))
        except (ValueError, RecursionError) as error:
            return self.bad_json(error, tools), len(text)
        end = skip_space(text, end)
        if text.startswith("</tool_call>", end):
            end += len("</tool_call>")
        elif end < len(text):  # a tag missing at the very end leaves no doubt; elsewhere it does
            return self.invalid("bad_json", UNCLOSED_TEXT, tools, tag=tag), len(text)
        call = call if isinstance(call, dict) else {}
        return self.checked_call(call.get("name"), call.get("arguments", {}), tools), end


class TagsFormat(_MarkupFormat):
    """``<search>…</search>`` and ``<answer>…</answer>``: the tool's name is the tag.

    The body is the value of the tool's only argument, or a JSON object where it has several.
    """

    name = "tags"

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        values = list(arguments.values())
        if len(values) == 1 and isinstance(values[0], str):
            return f"<{name}>{values[0]}</{name}>"
        return f"<{name}>{json.dumps(dict(arguments), ensure_ascii=False)}</{name}>"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe each tool, since no chat template does."""
        lines = ["You have these tools; call one per turn by writing its tag:"]
        for tool in tools:
            call = self.write_call(tool.name, example_arguments(tool))
            lines.append(f"- {call}: {' '.join(tool.description.split())}")
        lines.append(
            "The result comes back inside <information> tags. End with your final answer, and "
            f"nothing but the answer, as {ANSWER_EXAMPLE}."
        )
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a result in ``<information>`` tags, as Search-R1 does."""
        return {"role": "user", "content": f"<information>{content}</information>"}

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return tools

    def _parse_call(
        self, text: str, start: int, tag: str, tools: Mapping[str, Tool]
    ) -> tuple[ParsedAction, int]:
        end = text.find(f"</{tag}>", start)
        if end < 0:
            return self.invalid("bad_call", UNCLOSED_TEXT, tools, tag=tag), len(text)
        body, end = text[start:end].strip(), end + len(f"</{tag}>")
        if argument := text_argument(tools[tag]):
            return self.checked_call(tag, {argument: body}, tools), end
        return self.json_call(tag, body, tools), end


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "tags": TagsFormat(),
    "json": JsonFormat(),
    "react": ReactFormat(),
    "openai": OpenAIFormat(),
}
