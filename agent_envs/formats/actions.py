"""Parsed actions, the base class of the tool formats, and how actions are found in a text.

Text inside an action, such as a tag in a query, is part of that action. Thoughts are ignored, and
so is code between backquotes, unless all actions are in code: many models write them so.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, NoReturn

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool

ANSWER_PLACEHOLDER: Final = "your answer"
ANSWER_EXAMPLE: Final = f"<answer> {ANSWER_PLACEHOLDER} </answer>"
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
TOO_MANY_CALLS_TEXT: Final = (
    "Your turn held more than {limit} tool calls; write at most {limit}, and then stop. {examples}"
)

MAX_CALLS: Final = 16
"""Maximum number of calls in one turn."""
MAX_REASON_CHARS: Final = 500
"""Maximum length of the reason in a feedback."""
MAX_EXAMPLE_CHARS: Final = 2_000
"""Maximum length of the examples in a feedback; further tools are left out."""
MAX_EXAMPLE_OBJECTS: Final = 500
"""Maximum number of objects in the example of a call."""
END_OF_THOUGHT: Final = "</think>"
MAX_BROKEN: Final = 100
"""Maximum number of half-written actions in thoughts; a turn with more holds no action."""
_THOUGHT: Final = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARKS: Final = r"(?P<think></?think>)|(?P<code>`+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """One model turn, parsed."""

    kind: Literal["tool_call", "answer", "message", "summary", "invalid"]
    """A tool call, an answer, a message to a user, a requested summary, or a mistake."""
    name: str | None = None
    arguments: Mapping[str, Any] | None = None
    """Validated arguments of the tool `name`, for a call."""
    answer: str | None = None
    """The text of an answer, without surrounding white space."""
    text: str | None = None
    """The text of a message to a user, or of a summary."""
    error: str | None = None
    """The short code of a mistake: ``no_action``, ``multiple_actions``, ``bad_json``, ``bad_call``,
    ``unknown_tool``, ``bad_arguments``, ``bad_answer``, or one of a custom format."""
    message: str | None = None
    """The feedback to the model: the mistake, and how to fix it."""
    calls: tuple["ParsedAction", ...] = ()
    """Every call of a turn with several, in order, including mistakes; the other fields are those
    of the first valid call. Empty for any other turn."""

    @property
    def each_call(self) -> tuple["ParsedAction", ...]:
        """The calls of the turn, one or several."""
        return self.calls or ((self,) if self.kind == "tool_call" else ())

    @property
    def is_faultless(self) -> bool:
        """Whether the turn holds no mistake."""
        return self.kind != "invalid" and all(call.kind == "tool_call" for call in self.calls)

    def as_info(self) -> dict[str, Any]:
        """Return the fields that are set, for ``info["action"]``."""
        members: dict[str, Any] = {"kind": self.kind}
        for key in ("name", "answer", "text", "error", "message"):
            if (value := getattr(self, key)) is not None:
                members[key] = value
        if self.arguments is not None:
            members["arguments"] = dict(self.arguments)
        if self.calls:
            members["calls"] = [call.as_info() for call in self.calls]
        return members


class ToolFormat(ABC):
    """A syntax of actions; ``tool_format=`` takes an object of any subclass."""

    name: str
    """Value of ``info["tool_format"]``."""
    is_native: bool = False
    """Whether chat templates write the tool schemas into the prompt."""
    is_structured: bool = False
    """Whether calls are separate from the text, as in OpenAI's API."""

    @abstractmethod
    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Parse one model turn."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call, as `parse` reads it."""

    @abstractmethod
    def write_answer(self, answer: str) -> str:
        """Write an answer, as `parse` reads it."""

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the syntax; part of the system prompt."""

    def result_message(self, name: str, content: str) -> Message:
        """Wrap the result of tool `name`; by default as a ``tool`` message."""
        return {"role": "tool", "name": name, "content": content}

    def for_dialogue(self) -> "ToolFormat":
        """Return the format for environments with a user, to whom plain text goes."""
        return self

    def examples(self, tools: Mapping[str, Tool]) -> str:
        """Return an example of each call and of an answer; part of every feedback."""
        calls: list[str] = []
        for tool in tools.values():
            calls.append(self.write_call(tool.name, example_arguments(tool)))
            if sum(map(len, calls)) > MAX_EXAMPLE_CHARS and len(calls) > 1:
                del calls[-1]
                break
        text = CALL_EXAMPLE_TEXT.format(call=" or ".join(calls)) if calls else ""
        return text + ANSWER_EXAMPLE_TEXT.format(answer=self.write_answer(ANSWER_PLACEHOLDER))

    def turn(self, actions: Sequence[ParsedAction], tools: Mapping[str, Tool]) -> ParsedAction:
        """Return the action of a turn that held `actions`; an answer among others is a mistake."""
        if not actions:
            return self.invalid("no_action", NO_ACTION_TEXT, tools)
        if len(actions) == 1:
            return actions[0]
        if any(action.kind == "answer" or action.error == "bad_answer" for action in actions):
            count = len(actions) if len(actions) <= MAX_CALLS else f"over {MAX_CALLS}"
            return self.only_one(count, tools)
        if len(actions) > MAX_CALLS:
            return self.invalid("multiple_actions", TOO_MANY_CALLS_TEXT, tools, limit=MAX_CALLS)
        first = next((a for a in actions if a.kind == "tool_call"), actions[0])
        return replace(first, calls=tuple(actions))

    def only_one(self, count: int | str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return the mistake of a turn with `count` actions instead of one."""
        return self.invalid("multiple_actions", MULTIPLE_ACTIONS_TEXT, tools, count=count)

    def checked_call(self, name: Any, arguments: Any, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return a call if its arguments fit the tool, else the mistake."""
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        if name not in tools:
            return self.invalid("unknown_tool", UNKNOWN_TOOL_TEXT, tools, name=name[:100])
        try:
            valid = tools[name].validate(arguments)
        except ValueError as error:
            reason = str(error)
            if len(reason) > MAX_REASON_CHARS:
                reason = reason[:MAX_REASON_CHARS] + " …"
            return self.invalid(
                "bad_arguments", BAD_ARGUMENTS_TEXT, tools, name=name, reason=reason
            )
        return ParsedAction(kind="tool_call", name=name, arguments=valid)

    def object_call(self, value: Any, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return the call that an object with ``name`` and ``arguments`` makes."""
        call = value if isinstance(value, dict) else {}
        return self.checked_call(call.get("name"), call.get("arguments", {}), tools)

    def json_call(self, name: str, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return a call whose arguments are a JSON object or empty; see `checked_call`."""
        try:
            arguments = STRICT_JSON.decode(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            return self.bad_json(error, tools)
        return self.checked_call(name, arguments, tools)

    def checked_answer(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return a stripped answer; an empty one is a mistake."""
        if answer := text.strip():
            return ParsedAction(kind="answer", answer=answer)
        return self.invalid("bad_answer", EMPTY_ANSWER_TEXT, tools)

    def bad_json(self, error: Exception, tools: Mapping[str, Tool]) -> ParsedAction:
        """Return the mistake of a call that is not JSON."""
        # errors without a message: too deep nesting, or a number of thousands of digits
        reason = getattr(error, "msg", "it is too deep, or holds a number that JSON lacks")
        return self.invalid("bad_json", BAD_JSON_TEXT, tools, reason=reason)

    def invalid(
        self, code: str, template: str, tools: Mapping[str, Tool], **fields: object
    ) -> ParsedAction:
        """Return a mistake; `template` takes ``{examples}`` and the `fields`."""
        message = template.format(examples=self.examples(tools), **fields)
        return ParsedAction(kind="invalid", error=code, message=message)


class Span(NamedTuple):
    """A candidate for an action or a part of one."""

    end: int
    is_whole: bool
    """Whether it was closed; else it may be a mention in a thought."""
    content: Any
    """For `find_actions` a function that checks the content, since feedback is expensive."""


Read = Callable[[re.Match[str]], Span]


def find_actions(text: str, opening: str, read: Read) -> list[ParsedAction]:
    """Return the actions of a turn, including mistakes, up to one more than allowed.

    `opening` is the pattern of the start of an action; `read` finds its end, in linear time.
    """
    return [span.content() for _, span in find_spans(text, opening, read, MAX_CALLS + 1)]


def find_spans(
    text: str, opening: str, read: Read, limit: int | None = None
) -> list[tuple[re.Match[str], Span]]:
    """Return at most `limit` spans, each with the match of its start; see `find_actions`."""
    pattern = re.compile(f"{_MARKS}|{opening}", re.MULTILINE)
    outside_of_code = _find(text, pattern, read, limit, skips_code=True)
    return outside_of_code or _find(text, pattern, read, limit, skips_code=False)


def without_thoughts(text: str) -> str:
    """Return the text outside ``<think>…</think>``, closed or not."""
    return _THOUGHT.sub("", text).rpartition(END_OF_THOUGHT)[2]  # the template may open one


def _find(
    text: str, pattern: re.Pattern[str], read: Read, limit: int | None, *, skips_code: bool
) -> list[tuple[re.Match[str], Span]]:
    found: list[tuple[re.Match[str], Span]] = []
    position = num_broken = 0
    while match := pattern.search(text, position):
        position = match.end()
        if match["code"]:
            if skips_code:
                position = _end_of_code(text, match)
        elif match["think"] == "<think>":
            if (end := text.find(END_OF_THOUGHT, position)) < 0:
                break
            position = end + len(END_OF_THOUGHT)
        elif match["think"]:  # a thought that the template opened: the text before belongs to it
            found.clear()
        else:
            span = read(match)
            position = span.end
            if not span.is_whole and (end := text.find(END_OF_THOUGHT, match.end())) >= 0:
                found.clear()
                position = end + len(END_OF_THOUGHT)
                num_broken += 1
                if num_broken > MAX_BROKEN:  # each costs as much as the turn is long
                    break
            elif limit is None or len(found) < limit:
                found.append((match, span))
    return found


def _end_of_code(text: str, opening: re.Match[str]) -> int:
    """Return the end of code; without one, the end of the mark."""
    mark, start = opening["code"], opening.end()
    end = text.find(mark, start)
    is_closed = end >= 0 and (len(mark) >= 3 or text.find("\n", start, end) < 0)
    return end + len(mark) if is_closed else start


def skip_space(text: str, start: int) -> int:
    """Return the end of the white space at `start`."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def example_arguments(tool: Tool) -> dict[str, Any]:
    """Return an example value for each required argument; a RecursionError if they are endless."""
    left = iter(range(MAX_EXAMPLE_OBJECTS))
    return _example_members(tool.parameters, tool.parameters.get("$defs", {}), left)


def text_argument(tool: Tool) -> str | None:
    """Return the name of a tool's only argument if it is text, which needs no JSON."""
    properties = tool.parameters.get("properties", {})
    is_text = [p.get("type") for p in properties.values()] == ["string"]
    return next(iter(properties)) if is_text else None


def leading_text_argument(tool: Tool) -> str | None:
    """Return the name of a tool's only required argument if it is text."""
    properties, required = (tool.parameters.get(key, {}) for key in ("properties", "required"))
    schemas = [properties.get(name, {}) for name in required]
    if len(schemas) != 1 or not any(
        kind.get("type") == "string" for kind in [*schemas, *schemas[0].get("anyOf", [])]
    ):
        return text_argument(tool)
    return str(required[0])


def _example_members(
    schema: Mapping[str, Any], types: Mapping[str, Any], left: Iterator[int]
) -> dict[str, Any]:
    if next(left, None) is None:  # definitions that refer to others twice double at each step
        raise RecursionError(f"the schema requires more than {MAX_EXAMPLE_OBJECTS} objects")
    properties = schema.get("properties", {})
    return {
        name: _example(properties.get(name, {}), types, f"the {name}", left)
        for name in schema.get("required", [])
    }


def _example(schema: Any, types: Mapping[str, Any], text: str, left: Iterator[int]) -> Any:
    """Return a value that fits a schema, `text` if it may be text."""
    schema = schema if isinstance(schema, dict) else {}
    if "$ref" in schema:
        return _example(types.get(schema["$ref"].rpartition("/")[2]), types, text, left)
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], types, text, left)
    if "const" in schema:
        return schema["const"]
    kind, number = str(schema.get("type")), schema.get("minimum", 1)
    if kind == "array":
        return [_example(schema.get("items"), types, text, left)]
    if kind == "object":
        return _example_members(schema, types, left)
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse_constant(text)


STRICT_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
"""JSON decoder that refuses NaN, Infinity and numbers that are too large, such as 1e999."""
