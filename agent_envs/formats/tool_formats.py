"""The tool formats: how a model writes a tool call or an answer, and how it is parsed.

One strict parser per format: a turn holds one call or several, or exactly one answer.
"""

import contextlib
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
    ANSWER_PLACEHOLDER,
    BAD_CALL_TEXT,
    END_OF_THOUGHT,
    MAX_CALLS,
    STRICT_JSON,
    UNCLOSED_TEXT,
    ParsedAction,
    Span,
    ToolFormat,
    example_arguments,
    find_actions,
    find_spans,
    leading_text_argument,
    skip_space,
    text_argument,
)
from agent_envs.formats.openai_format import OpenAIFormat

__all__ = ["TOOL_FORMATS", "HermesFormat", "ParsedAction", "TagsFormat", "ToolFormat"]

_OBJECT: Final = r'\{(?=\s*["}])'
_HEADING: Final = (
    r"(?:^|(?<=</think>))[ \t]*"
    r"(?P<heading>Thought|Action|Action Input|Observation|Final Answer)[ \t]*:"
)


class _MarkupFormat(ToolFormat):
    """Base of the formats with tags."""

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        tags = "|".join(map(re.escape, [*self._call_tags(tools), "answer"]))

        def read(opening: re.Match[str]) -> Span:
            reads = self._read_answer if opening["tag"] == "answer" else self._read_call
            return reads(text, opening.end(), opening["tag"], tools)

        return self.turn(find_actions(text, f"<(?P<tag>{tags})>", read), tools)

    def write_answer(self, answer: str) -> str:
        return f"<answer> {answer} </answer>"

    @abstractmethod
    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        """Return the tags that open a call."""

    @abstractmethod
    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> Span:
        """Read the call whose opening tag ends at `start`."""

    def _read_answer(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> Span:
        end = text.find("</answer>", start)
        if end < 0:
            return self._unclosed("bad_answer", text, tag, tools)
        # a thought that the template opened may quote an opening tag
        is_whole = text.find(END_OF_THOUGHT, start, end) < 0
        understand = partial(self.checked_answer, text[start:end], tools)
        return Span(end + len("</answer>"), is_whole, understand)

    def _unclosed(self, code: str, text: str, tag: str, tools: Mapping[str, Tool]) -> Span:
        understand = partial(self.invalid, code, UNCLOSED_TEXT, tools, tag=tag)
        return Span(len(text), False, understand)

    def _read_object(
        self,
        text: str,
        start: int,
        tag: str,
        tools: Mapping[str, Tool],
        check: Callable[[Any], ParsedAction],
    ) -> Span:
        """Read a JSON value and its closing tag, which the value may contain, too."""
        try:
            value, end = STRICT_JSON.raw_decode(text, skip_space(text, start))
        except (ValueError, RecursionError) as error:
            return Span(len(text), False, partial(self.bad_json, error, tools))
        end = skip_space(text, end)
        is_closed = text.startswith(f"</{tag}>", end)
        if end < len(text) and not is_closed:  # a tag may be missing only at the very end
            return self._unclosed("bad_json", text, tag, tools)
        return Span(end + is_closed * (len(tag) + 3), True, partial(check, value))


class HermesFormat(_MarkupFormat):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, as Qwen-style templates write it."""

    name = "hermes"
    is_native = True

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>{call}</tool_call>"

    def instructions(self, tools: Sequence[Tool]) -> str:
        return (
            "Call a tool, or end with your final answer, and nothing but the answer, "
            f"as {ANSWER_EXAMPLE}."
        )

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return ["tool_call"]

    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> Span:
        return self._read_object(text, start, tag, tools, partial(self.object_call, tools=tools))


class TagsFormat(_MarkupFormat):
    """``<search> … </search>`` and ``<answer> … </answer>``: the tool's name is the tag.

    The spaces inside are those of Search-R1: most tokenizers have a token for a word with the space
    before it, so words copied from a passage keep their tokens. The body is the value of the tool's
    only argument, or a JSON object if it has several. If only one of several is required, and is
    text, a body that does not start like an object is its value.
    """

    name = "tags"

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        values = list(arguments.values())
        if len(values) == 1 and isinstance(values[0], str):
            return f"<{name}> {values[0]} </{name}>"
        return f"<{name}>{json.dumps(dict(arguments), ensure_ascii=False)}</{name}>"

    def instructions(self, tools: Sequence[Tool]) -> str:
        lines = [
            "You have these tools; call one by writing its tag:",
            *(_description(self, tool) for tool in tools),
            "The result comes back inside <information> tags. End with your final answer, and "
            f"nothing but the answer, as {ANSWER_EXAMPLE}.",
        ]
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a result in ``<information>`` tags, as Search-R1 does."""
        return {"role": "user", "content": f"<information>{content}</information>"}

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return tools

    def _read_call(self, text: str, start: int, tag: str, tools: Mapping[str, Tool]) -> Span:
        argument = text_argument(tools[tag])
        if argument is None and text.startswith("{", skip_space(text, start)):
            check = partial(self.checked_call, tag, tools=tools)
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


class JsonFormat(ToolFormat):
    """A JSON object for each call, ``{"name": …, "arguments": …}``, or one ``{"answer": …}``.

    Other text around it is ignored.
    """

    name = "json"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Parse one model turn."""

        def read(opening: re.Match[str]) -> Span:
            try:
                value, end = STRICT_JSON.raw_decode(text, opening.start())
            except (ValueError, RecursionError) as error:
                return Span(len(text), False, partial(self.bad_json, error, tools))
            return Span(end, True, partial(self._read, value, tools))

        return self.turn(find_actions(text, _OBJECT, read), tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)

    def write_answer(self, answer: str) -> str:
        return json.dumps({"answer": answer}, ensure_ascii=False)

    def instructions(self, tools: Sequence[Tool]) -> str:
        lines = [
            "You have these tools; call one by writing a JSON object:",
            *(_description(self, tool, with_schema=True) for tool in tools),
            "End with your final answer, and nothing but the answer, as "
            f"{self.write_answer(ANSWER_PLACEHOLDER)}.",
        ]
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        return {"role": "user", "content": f"Result of {name}:\n{content}"}

    def _read(self, value: dict[str, Any], tools: Mapping[str, Tool]) -> ParsedAction:
        if "answer" not in value or "name" in value:
            return self.object_call(value, tools)
        answer = "" if value["answer"] is None else value["answer"]
        # a number is an answer, too
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        return self.checked_answer(text, tools)


class ReactFormat(ToolFormat):
    """``Thought: … Action: … Action Input: …`` and ``Final Answer: …`` (arXiv 2210.03629).

    The input is a JSON object, or plain text if the tool takes one string. Text after an
    ``Observation:`` by the model is ignored.
    """

    name = "react"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        calls: list[tuple[str, str]] = []
        answers: list[str] = []
        num_inputs = 0
        for heading, body in _sections(text):
            if heading == "Final Answer":
                answers.append(body)
            elif heading == "Action":
                calls.append((body, ""))
            elif heading == "Action Input":
                num_inputs += 1
                calls[-1:] = [(name, body) for name, _ in calls[-1:]]
        actions = [self.checked_answer(answer, tools) for answer in answers[: MAX_CALLS + 1]]
        if (calls or answers) and num_inputs > max(1, len(calls)):
            return self.only_one(max(num_inputs, len(calls) + len(answers)), tools)
        actions += [self._read_call(*call, tools) for call in calls[: MAX_CALLS + 1]]
        return self.turn(actions, tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"Action: {name}\nAction Input: {json.dumps(dict(arguments), ensure_ascii=False)}"

    def write_answer(self, answer: str) -> str:
        return f"Final Answer: {answer}"

    def instructions(self, tools: Sequence[Tool]) -> str:
        lines = [
            "Think before you act. Each of your turns is a thought and an action:",
            "Thought: what you know and what to find out next",
            "Action: the name of a tool",
            "Action Input: its arguments as a JSON object",
            "The result comes back as an Observation. These are the tools:",
            *(_description(self, tool, with_schema=True) for tool in tools),
            "When you know the answer, end with a thought and nothing but the answer:",
            "Thought: I now know the final answer",
            f"Final Answer: {ANSWER_PLACEHOLDER}",
        ]
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        return {"role": "user", "content": f"Observation: {content}"}

    def _read_call(self, name: str, body: str, tools: Mapping[str, Tool]) -> ParsedAction:
        if name not in tools:
            return self.checked_call(name, {}, tools)
        if body and not body.startswith("{") and (argument := leading_text_argument(tools[name])):
            return self.checked_call(name, {argument: body}, tools)
        try:
            arguments, end = STRICT_JSON.raw_decode(body, 0) if body else ({}, 0)
        except (ValueError, RecursionError) as error:
            return self.bad_json(error, tools)
        if skip_space(body, end) < len(body):
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        return self.checked_call(name, arguments, tools)


def _sections(text: str) -> list[tuple[str, str]]:
    """Split a turn at its headings, up to an observation by the model."""

    def read(opening: re.Match[str]) -> Span:
        end, start = opening.end(), skip_space(text, opening.end())
        if opening["heading"] == "Action Input" and text.startswith("{", start):
            with contextlib.suppress(ValueError, RecursionError):  # reported when read again
                _, end = STRICT_JSON.raw_decode(text, start)
        return Span(end, True, None)

    found = find_spans(text, _HEADING, read)
    starts = [heading.start() for heading, _ in found[1:]]
    sections = []
    for (heading, _), end in zip(found, [*starts, len(text)], strict=False):
        if heading["heading"] == "Observation":
            break
        body = text[heading.end() : end].strip()
        sections.append(
            (heading["heading"], body if body.startswith("{") else body.partition("<think>")[0])
        )
    return sections


def _description(form: ToolFormat, tool: Tool, *, with_schema: bool = False) -> str:
    """Describe a tool by an example of a call, and the schema of its arguments."""
    example = form.write_call(tool.name, example_arguments(tool))
    text = f"- {example}: {' '.join(tool.description.split())}"
    if not with_schema:
        return text
    schema = json.dumps(tool.parameters.get("properties", {}), ensure_ascii=False)
    return " ".join(text.split("\n")) + f" Arguments: {schema}"


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HermesFormat(),
    "tags": TagsFormat(),
    "json": JsonFormat(),
    "react": ReactFormat(),
    "openai": OpenAIFormat(),
}
