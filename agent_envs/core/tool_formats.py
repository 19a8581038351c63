"""How a model writes a tool call or an answer, and how that is read back.

One parser per format, strict about what counts as an action: exactly one call, or exactly one
answer, in a turn. What stands inside ``<think>…</think>`` is never an action. Whatever is not an
action is a `ParsedAction` of kind ``invalid`` with a short code and a sentence for the model.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool

ANSWER_EXAMPLE: Final = "<answer>your answer</answer>"
NO_ACTION_TEXT: Final = "Your turn held neither a tool call nor an answer. {examples}"
MULTIPLE_ACTIONS_TEXT: Final = (
    "Your turn held {count} actions; write exactly one tool call, or one answer, and then stop. "
    "{examples}"
)
BAD_JSON_TEXT: Final = "The tool call is not valid JSON ({reason}). {examples}"
BAD_CALL_TEXT: Final = (
    'The tool call must be a JSON object with "name" (a string) and "arguments" (an object). '
    "{examples}"
)
UNKNOWN_TOOL_TEXT: Final = "There is no tool '{name}'. {examples}"
BAD_ARGUMENTS_TEXT: Final = "Wrong arguments for '{name}': {reason}. {examples}"
EMPTY_ANSWER_TEXT: Final = "The answer is empty. {examples}"
UNCLOSED_TEXT: Final = "The tag <{tag}> is not closed. {examples}"
CALL_EXAMPLE_TEXT: Final = "To call a tool, write {call}. "
ANSWER_EXAMPLE_TEXT: Final = "To answer, write {answer}."

ErrorCode = Literal[
    "no_action",
    "multiple_actions",
    "bad_json",
    "bad_call",
    "unknown_tool",
    "bad_arguments",
    "bad_answer",
]

_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse_constant(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """What was understood of one model turn."""

    kind: Literal["tool_call", "answer", "invalid"]
    """Whether the turn calls a tool, answers, or is a mistake."""
    name: str | None = None
    """The tool, for a call."""
    arguments: Mapping[str, Any] | None = None
    """Validated arguments, for a call."""
    answer: str | None = None
    """The answer's text without surrounding white space, for an answer."""
    error: str | None = None
    """The short code of a mistake."""
    message: str | None = None
    """The sentence that tells the model what was wrong and how to write it right."""

    def as_info(self) -> dict[str, Any]:
        """Return the members that say something, for ``info["action"]``."""
        members: dict[str, Any] = {"kind": self.kind}
        for key in ("name", "answer", "error", "message"):
            if (value := getattr(self, key)) is not None:
                members[key] = value
        if self.arguments is not None:
            members["arguments"] = dict(self.arguments)
        return members


class ToolFormat(Protocol):
    """One way of writing actions."""

    name: str
    """The name under which `TOOL_FORMATS` lists it."""
    is_native: bool
    """Whether chat templates write the tool schemas into the prompt themselves."""

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn. Never raises, whatever the text."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Tell a model how to act; part of the system prompt."""

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a tool's result as a chat message."""


class _MarkupFormat(ABC):
    """What the formats with tags share: reading from left to right, answers, feedback."""

    name: str
    is_native: bool

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
        text = text.rpartition("</think>")[2].partition("<think>")[0]
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
        if not actions:
            return self._invalid("no_action", NO_ACTION_TEXT, tools)
        if len(actions) > 1:
            count = len(actions)
            return self._invalid("multiple_actions", MULTIPLE_ACTIONS_TEXT, tools, count=count)
        return actions[0]

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return f"<answer>{answer}</answer>"

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""

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
            return self._invalid("bad_answer", UNCLOSED_TEXT, tools, tag=tag), len(text)
        answer = text[start:end].strip()
        if not answer:
            return self._invalid("bad_answer", EMPTY_ANSWER_TEXT, tools), end
        return ParsedAction(kind="answer", answer=answer), end + len("</answer>")

    def _checked_call(
        self, name: str, arguments: Mapping[str, Any], tools: Mapping[str, Tool]
    ) -> ParsedAction:
        if name not in tools:
            return self._invalid("unknown_tool", UNKNOWN_TOOL_TEXT, tools, name=name[:100])
        try:
            valid = tools[name].validate(arguments)
        except ValueError as error:
            fields = {"name": name, "reason": error}
            return self._invalid("bad_arguments", BAD_ARGUMENTS_TEXT, tools, **fields)
        return ParsedAction(kind="tool_call", name=name, arguments=valid)

    def _bad_json(self, error: Exception, tools: Mapping[str, Tool]) -> ParsedAction:
        # Other errors than JSON's own: nesting too deep, a number of thousands of digits.
        reason = getattr(error, "msg", "it is too deep, or holds a number that JSON lacks")
        return self._invalid("bad_json", BAD_JSON_TEXT, tools, reason=reason)

    def _invalid(
        self, code: ErrorCode, template: str, tools: Mapping[str, Tool], **fields: object
    ) -> ParsedAction:
        calls = [self.write_call(tool.name, _example_arguments(tool)) for tool in tools.values()]
        examples = CALL_EXAMPLE_TEXT.format(call=" or ".join(calls)) if calls else ""
        examples += ANSWER_EXAMPLE_TEXT.format(answer=ANSWER_EXAMPLE)
        message = template.format(examples=examples, **fields)
        return ParsedAction(kind="invalid", error=code, message=message)


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

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a result as a ``tool`` message; templates mark it as a tool's words."""
        return {"role": "tool", "name": name, "content": content}

    def _call_tags(self, tools: Mapping[str, Tool]) -> Iterable[str]:
        return ["tool_call"]

    def _parse_call(
        self, text: str, start: int, tag: str, tools: Mapping[str, Tool]
    ) -> tuple[ParsedAction, int]:
        # raw_decode, not a search for the closing tag: a query may itself contain "</tool_call>".
        try:
            call, end = _DECODER.raw_decode(text, _skip_space(text, start))
        except (ValueError, RecursionError) as error:
            return self._bad_json(error, tools), len(text)
        end = _skip_space(text, end)
        if text.startswith("</tool_call>", end):
            end += len("</tool_call>")
        elif end < len(text):  # a tag missing at the very end leaves no doubt; elsewhere it does
            return self._invalid("bad_json", UNCLOSED_TEXT, tools, tag=tag), len(text)
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return self._invalid("bad_call", BAD_CALL_TEXT, tools), end
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return self._invalid("bad_call", BAD_CALL_TEXT, tools), end
        return self._checked_call(call["name"], arguments, tools), end


class TagsFormat(_MarkupFormat):
    """``<search>…</search>`` and ``<answer>…</answer>``: the tool's name is the tag.

    The body is the value of the tool's only argument, or a JSON object where it has several.
    """

    name = "tags"
    is_native = False

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
            call = self.write_call(tool.name, _example_arguments(tool))
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
            return self._invalid("bad_call", UNCLOSED_TEXT, tools, tag=tag), len(text)
        body, end = text[start:end].strip(), end + len(f"</{tag}>")
        properties = tools[tag].parameters.get("properties", {})
        if [p.get("type") for p in properties.values()] == ["string"]:
            return self._checked_call(tag, {next(iter(properties)): body}, tools), end
        try:
            arguments = _DECODER.decode(body) if body else {}
        except (ValueError, RecursionError) as error:
            return self._bad_json(error, tools), end
        if not isinstance(arguments, dict):
            return self._invalid("bad_call", BAD_CALL_TEXT, tools), end
        return self._checked_call(tag, arguments, tools), end


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {"hermes": HermesFormat(), "tags": TagsFormat()}


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _example_arguments(tool: Tool) -> dict[str, str]:
    return {name: f"the {name}" for name in tool.parameters.get("required", [])}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
