"""Formats in plain text, for models without a markup of their own: one JSON object, and ReAct."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool
from agent_envs.formats.actions import (
    ANSWER_PLACEHOLDER,
    BAD_CALL_TEXT,
    MAX_CALLS,
    STRICT_JSON,
    ParsedAction,
    ToolFormat,
    example_arguments,
    leading_text_argument,
    skip_space,
)
from agent_envs.formats.turn_reading import Span, Understand, find_actions, find_spans

_OBJECT: Final = r'\{(?=\s*["}])'
_HEADING: Final = (
    r"(?:^|(?<=</think>))[ \t]*"
    r"(?P<heading>Thought|Action|Action Input|Observation|Final Answer)[ \t]*:"
)


class JsonFormat(ToolFormat):
    """A JSON object for each call, ``{"name": …, "arguments": …}``, or one ``{"answer": …}``.

    Other text may stand around it.
    """

    name = "json"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""

        def read(opening: re.Match[str]) -> Span[Understand]:
            try:
                value, end = STRICT_JSON.raw_decode(text, opening.start())
            except (ValueError, RecursionError) as error:
                return Span(len(text), False, partial(self.bad_json, error, tools))
            return Span(end, True, partial(self._read, value, tools))

        return self.turn(find_actions(text, _OBJECT, read), tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return json.dumps({"answer": answer}, ensure_ascii=False)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe each tool, since no chat template does."""
        lines = [
            "You have these tools; call one by writing a JSON object:",
            *(_description(self, tool) for tool in tools),
            "End with your final answer, and nothing but the answer, as "
            f"{self.write_answer(ANSWER_PLACEHOLDER)}.",
        ]
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a result as what the user says."""
        return {"role": "user", "content": f"Result of {name}:\n{content}"}

    def _read(self, value: dict[str, Any], tools: Mapping[str, Tool]) -> ParsedAction:
        if "answer" not in value or "name" in value:
            return self.checked_call(value.get("name"), value.get("arguments", {}), tools)
        answer = "" if value["answer"] is None else value["answer"]
        # A number, written as one, is an answer beyond doubt.
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        return self.checked_answer(text, tools)


class ReactFormat(ToolFormat):
    """``Thought: … Action: … Action Input: …`` and ``Final Answer: …`` (arXiv 2210.03629).

    The input is a JSON object, or plain text where the tool takes one string. What a model writes
    after an ``Observation:`` of its own is not read: ReAct stops there.
    """

    name = "react"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
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
        """Write a call the way `parse` reads it."""
        return f"Action: {name}\nAction Input: {json.dumps(dict(arguments), ensure_ascii=False)}"

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return f"Final Answer: {answer}"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the rhythm of thought, action and observation."""
        lines = [
            "Think before you act. Each of your turns is a thought and an action:",
            "Thought: what you know and what to find out next",
            "Action: the name of a tool",
            "Action Input: its arguments as a JSON object",
            "The result comes back as an Observation. These are the tools:",
            *(_description(self, tool) for tool in tools),
            "When you know the answer, end with a thought and nothing but the answer:",
            "Thought: I now know the final answer",
            f"Final Answer: {ANSWER_PLACEHOLDER}",
        ]
        return "\n".join(lines)

    def result_message(self, name: str, content: str) -> Message:
        """Wrap a result as an observation."""
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
    """Split a turn at its headings, up to an observation that the model made up."""

    def read(opening: re.Match[str]) -> Span[None]:
        end, start = opening.end(), skip_space(text, opening.end())
        if opening["heading"] == "Action Input" and text.startswith("{", start):
            with contextlib.suppress(ValueError, RecursionError):  # else it is said when read again
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


def _description(form: ToolFormat, tool: Tool) -> str:
    """Describe a tool by an example of a call and the schema of its arguments."""
    example = form.write_call(tool.name, example_arguments(tool)).replace("\n", " ")
    schema = json.dumps(tool.parameters.get("properties", {}), ensure_ascii=False)
    return f"- {example}: {' '.join(tool.description.split())} Arguments: {schema}"
