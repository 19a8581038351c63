"""Formats in plain text, for models without a markup of their own: one JSON object, and ReAct."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.actions import (
    ANSWER_PLACEHOLDER,
    BAD_CALL_TEXT,
    MULTIPLE_ACTIONS_TEXT,
    NO_ACTION_TEXT,
    STRICT_JSON,
    ParsedAction,
    ToolFormat,
    example_arguments,
    skip_space,
    text_argument,
    without_thoughts,
)
from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool

_OBJECT: Final = re.compile(r'\{(?=\s*["}])')
_HEADING: Final = re.compile(
    r"^[ \t]*(Thought|Action|Action Input|Observation|Final Answer)[ \t]*:", re.MULTILINE
)


class JsonFormat(ToolFormat):
    """One JSON object in a turn: ``{"name": …, "arguments": …}`` or ``{"answer": …}``.

    Other text may stand around it.
    """

    name = "json"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        """Read one model turn; see `ToolFormat.parse`."""
        text = without_thoughts(text)
        actions: list[ParsedAction] = []
        position = 0
        while match := _OBJECT.search(text, position):
            try:
                value, position = STRICT_JSON.raw_decode(text, match.start())
            except (ValueError, RecursionError) as error:
                return self.bad_json(error, tools)
            actions.append(self._read(value, tools))
        return self.only_action(actions, tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return json.dumps({"answer": answer}, ensure_ascii=False)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe each tool, since no chat template does."""
        lines = [
            "You have these tools; call one per turn by writing one JSON object:",
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
        sections = _sections(without_thoughts(text))
        headings = [heading for heading, _ in sections]
        count = headings.count("Action") + headings.count("Final Answer")
        if count == 0:
            return self.invalid("no_action", NO_ACTION_TEXT, tools)
        if count > 1 or headings.count("Action Input") > 1:
            count = max(count, headings.count("Action Input"))
            return self.invalid("multiple_actions", MULTIPLE_ACTIONS_TEXT, tools, count=count)
        bodies = dict(sections)
        if "Final Answer" in bodies:
            return self.checked_answer(bodies["Final Answer"], tools)
        return self._read_call(bodies["Action"], bodies.get("Action Input", ""), tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call the way `parse` reads it."""
        return f"Action: {name}\nAction Input: {json.dumps(dict(arguments), ensure_ascii=False)}"

    def write_answer(self, answer: str) -> str:
        """Write an answer the way `parse` reads it."""
        return f"Final Answer: {answer}"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describe the tools and the rhythm of thought, action and observation."""
        lines = [
            "Think before you act. Each of your turns is a thought and one action:",
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
        if body and not body.startswith("{") and (argument := text_argument(tools[name])):
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
    _, *parts = _HEADING.split(text)  # heading, body, heading, body, …
    headings, bodies = parts[::2], parts[1::2]
    if "Observation" in headings:
        headings = headings[: headings.index("Observation")]
    return [(heading, body.strip()) for heading, body in zip(headings, bodies, strict=False)]


def _description(form: ToolFormat, tool: Tool) -> str:
    """Describe a tool by an example of a call and the schema of its arguments."""
    example = form.write_call(tool.name, example_arguments(tool)).replace("\n", " ")
    schema = json.dumps(tool.parameters.get("properties", {}), ensure_ascii=False)
    return f"- {example}: {' '.join(tool.description.split())} Arguments: {schema}"
