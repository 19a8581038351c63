"""How a model writes a tool call or an answer, and how that is read back.

One parser per format, strict about what counts as an action: one call or several, or exactly one
answer, in a turn.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool
from agent_envs.formats.actions import (
    ANSWER_EXAMPLE,
    STRICT_JSON,
    UNCLOSED_TEXT,
    ParsedAction,
    ToolFormat,
    example_arguments,
    leading_text_argument,
    skip_space,
    text_argument,
)
from agent_envs.formats.openai_format import OpenAIFormat
from agent_envs.formats.plain_formats import JsonFormat, ReactFormat
from agent_envs.formats.turn_reading import END_OF_THOUGHT, Span, Understand, find_actions

__all__ = ["TOOL_FORMATS", "HermesFormat", "ParsedAction", "TagsFormat", "ToolFormat"]

_Span = Span[Understand]


class _MarkupFormat(ToolFormat):
    """What the formats with tags share: reading from left to right, and answers."""

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
        tags = "|".join(map(re.escape, [*self._call_tags(tools), "answer"]))

        def read(opening: re.Match[str]) -> _Span:
            tag = opening["tag"]
            read = self._read_answer if tag == "answer" else self._read_call
            return read(text, opening.end(), tag, tools)

        return self.turn(find_actions(text, f"<(?P<tag>{tags})>", read), tools)

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return f"<answer> {answer} </answer>"

    @abstractmethod
    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        """Return the tags that open a call."""

    @abstractmethod
    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> _Span:
        """Read the call whose opening tag ends at `start`."""

    def _read_answer(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> _Span:
        end = text.find("</answer>", start)
        if end < 0:
            return self._unclosed("bad_answer", text, tag, tools)
        # No answer is a thought's end: a thought that the template began may quote an opening tag.
        is_whole = text.find(END_OF_THOUGHT, start, end) < 0
        understand = partial(self.checked_answer, text[start:end], tools)
        return Span(end + len("</answer>"), is_whole, understand)

    def _unclosed(self, code: str, text: str, tag: str, tools: Mapping[str, Tool]) -> _Span:
        understand = partial(self.invalid, code, UNCLOSED_TEXT, tools, tag=tag)
        return Span(len(text), False, understand)

    def _read_object(
        self,
        text: str,
        start: int,
        tag: str,
        tools: Mapping[str, Tool],
        check: Callable[[Any], ParsedAction],
    ) -> _Span:
        """Read a JSON value up to the closing tag; `check` makes a call of it.

        The tag is not searched for: a query may itself contain it.
        """
        try:
            value, end = STRICT_JSON.raw_decode(text, skip_space(text, start))
        except (ValueError, RecursionError) as error:
            return Span(len(text), False, partial(self.bad_json, error, tools))
        end = skip_space(text, end)
        if text.startswith(f"</{tag}>", end):
            return Span(end + len(tag) + 3, True, partial(check, value))
        if end < len(text):  # a tag missing at the very end leaves no doubt; elsewhere it does
            return self._unclosed("bad_json", text, tag, tools)
        return Span(end, True, partial(check, value))


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
            "Call a tool, or end with your final answer, and nothing but the answer, "
            f"as {ANSWER_EXAMPLE}."
        )

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return ["tool_call"]

    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> _Span:
        return self._read_object(text, start, tag, tools, partial(self._checked, tools=tools))

    def _checked(self, call: Any, tools: Mapping[str, Tool]) -> ParsedAction:
        call = call if isinstance(call, dict) else {}
        return self.checked_call(call.get("name"), call.get("arguments", {}), tools)


class TagsFormat(_MarkupFormat):
    """``<search> … </search>`` and ``<answer> … </answer>``: the tool's name is the tag.

    It is written with spaces inside, as Search-R1 does: most tokenizers have a word with the space
    before it as one token, so what a model copies out of a passage is spelt as it stands there.
    The body is the value of the tool's only argument, or a JSON object where it has several. Where
    it requires one text of several, what does not begin like an object is that text.
    """

    name = "tags"

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        values = list(arguments.values())
        if len(values) == 1 and isinstance(values[0], str):
            return f"<{name}> {values[0]} </{name}>"
        return f"<{name}>{json.dumps(dict(arguments), ensure_ascii=False)}</{name}>"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe each tool, since no chat template does."""
        lines = ["You have these tools; call one by writing its tag:"]
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

    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> _Span:
        argument = text_argument(tools[tag])
        if argument is None and text.startswith("{", skip_space(text, start)):
            check = partial(self._checked, tag, tools)
            return self._read_object(text, start, tag, tools, check)
        end = text.find(f"</{tag}>", start)
        if end < 0:
            return self._unclosed("bad_call", text, tag, tools)
        body = text[start:end].strip()
        argument = leading_text_argument(tools[tag]) if body else argument
        understand = (
            partial(self.json_call, tag, body, tools)
            if argument is None
            else partial(self.checked_call, tag, {argument: body}, tools)
        )
        return Span(end + len(tag) + 3, True, understand)

    def _checked(self, name: str, tools: Mapping[str, Tool], arguments: Any) -> ParsedAction:
        return self.checked_call(name, arguments, tools)


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "tags": TagsFormat(),
    "json": JsonFormat(),
    "react": ReactFormat(),
    "openai": OpenAIFormat(),
}
