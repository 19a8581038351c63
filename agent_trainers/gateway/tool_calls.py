"""Calls in what a model wrote, read by our tool formats and given as the API's own."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.tool import Tool
from agent_envs.formats.chat_messages import HERMES_TOOLS_TEXT
from agent_envs.formats.openai_format import FunctionCall, read_message
from agent_envs.formats.tool_formats import ToolFormat
from agent_trainers.policies.control_tokens import clean

_FIRST_MARKS: Final[Mapping[str, Sequence[str]]] = {
    "hermes": ("<tool_call>",),
    "json": ("{",),
    "react": ("Action:",),
}
"""What the first call of a turn begins with, by tool format; what stands before it is said."""


class DeclaredTool(Tool):
    """A function of a program, which carries out its calls and checks their arguments itself."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Read a function's schema in the OpenAI format."""
        self.name = schema["name"]
        self.description = schema.get("description") or ""
        self.parameters = schema.get("parameters") or {}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are."""
        return dict(arguments)


def read_calls(
    text: str, tools: Mapping[str, Tool], tool_format: ToolFormat, is_parallel: bool
) -> tuple[str, list[FunctionCall], dict[str, Any]]:
    """Read a turn: what was said, its calls, and how it was understood.

    A turn with a mistake in it (bad JSON, a function that there is not, an answer beside a call, a
    second call where `is_parallel` is False) has no calls: it is said as it is written.
    """
    try:
        action = tool_format.parse(text, tools)
    except Exception as error:  # noqa: BLE001 - a format of one's own, or schemas that are none
        return text, [], {"kind": "invalid", "error": "unreadable", "message": str(error)}
    calls = action.each_call
    if not calls or not action.is_faultless or (len(calls) > 1 and not is_parallel):
        return text, [], action.as_info()
    read = [
        FunctionCall(
            name=call.name or "",
            arguments=_as_json(call.arguments or {}),
        )
        for call in calls
    ]
    return _said(text, tools, tool_format), read, action.as_info()


def describe_tools(tools: Mapping[str, Tool], tool_format: ToolFormat) -> str:
    """Return what the system prompt says of tools that no chat template describes."""
    if not tool_format.is_native:
        return "\n\n" + tool_format.instructions(list(tools.values()))
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools.values())
    return HERMES_TOOLS_TEXT.format(schemas=schemas)


def _as_json(arguments: Mapping[str, Any]) -> str:
    """Write the arguments of a call; escaped where a client could not send them back otherwise."""
    written = json.dumps(dict(arguments), ensure_ascii=False)
    return written if clean(written) == written else json.dumps(dict(arguments))


def _said(text: str, tools: Mapping[str, Tool], tool_format: ToolFormat) -> str:
    if tool_format.is_structured:
        return read_message(text)[0]
    marks = _FIRST_MARKS.get(tool_format.name, [f"<{name}>" for name in tools])
    places = [place for mark in marks if (place := text.find(mark)) >= 0]
    return text[: min(places, default=0)].strip()
