"""BFCL's function documents as tools.

They are JSON schemas with types of their own, named in Python, Java or JavaScript; models get them
the way the package itself gives them to models with function calling.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from agent_envs.core.tool import Tool, ToolResult
from agent_envs.envs.functions.bfcl_rows import Document, Row

MAX_ARGUMENT_CHARS: Final = 20_000
MAX_DEPTH: Final = 20
MAX_RESULT_CHARS: Final = 200_000
"""The category ``multi_turn_long_context`` is about long results."""
LANGUAGES: Final[Mapping[str, str]] = {"simple_java": "Java", "simple_javascript": "JavaScript"}
_HINTS: Final[Mapping[str | None, str]] = {
    "Java": " Note that the provided function is in Java 8 SDK syntax.",
    "JavaScript": " Note that the provided function is in JavaScript syntax.",
    None: " Note that the provided function is in Python 3 syntax.",
}
_TYPES: Final[Mapping[str, str]] = {
    "integer": "integer", "number": "number", "float": "number", "boolean": "boolean",
    "bool": "boolean", "array": "array", "list": "array", "tuple": "array", "dict": "object",
    "object": "object",
}  # fmt: skip
"""The package's types in Python and JSON's; what is not here is a string, as in the package."""


class FunctionTool(Tool):
    """A function that a JSON schema describes; its arguments are any JSON object.

    Whether they are right is what the benchmark judges: a wrong one is executed, or judged, as it
    is. Only their size is limited.
    """

    def __init__(self, document: Document, language: str | None, run: Callable[..., Any]) -> None:
        """Make a tool from a document.

        Args:
            document: The package's description.
            language: Java or JavaScript, whose values are written as strings; None for Python.
            run: Takes the tool's name in the package and the arguments; returns what to show.
        """
        self.name = tool_name(document["name"])
        self.original_name: str = document["name"]
        """Its name in the package, which may have dots."""
        self.description = document["description"] + _HINTS[language]
        self.parameters = make_schema(document["parameters"], language)
        self.timeout = None
        self.stateful = True
        self.max_result_chars = MAX_RESULT_CHARS
        self.function = run

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are.

        Raises:
            ValueError: If they are too long, too deep or hold a number that is too large.
        """
        num_chars = 0
        for value, depth in _parts(dict(arguments)):
            num_chars += len(value) if isinstance(value, str) else 1
            if depth > MAX_DEPTH:
                raise ValueError(f"they are nested deeper than {MAX_DEPTH} levels")
            if isinstance(value, int) and abs(value) > 10**18:
                raise ValueError("they hold an integer of more than 18 digits")
            if num_chars > MAX_ARGUMENT_CHARS:
                raise ValueError(f"they hold more than {MAX_ARGUMENT_CHARS} characters")
        return dict(arguments)

    def run(self, /, **arguments: Any) -> ToolResult:
        """Run the function; an argument may have any name."""
        return self._cut(self.function(self.original_name, arguments))

    def __repr__(self) -> str:
        """Show name and arguments."""
        return f"FunctionTool({self.name}({', '.join(self.parameters['properties'])}))"


def make_tools(
    documents: tuple[Document, ...], row: Row, run: Callable[..., Any]
) -> list[FunctionTool]:
    """Return the tools that documents of a row describe."""
    return [FunctionTool(document, LANGUAGES.get(row.category), run) for document in documents]


def tool_name(name: str) -> str:
    """Return a function's name as models with function calling may write it: without dots."""
    return re.sub(r"\.", "_", name)


def make_schema(parameters: Mapping[str, Any], language: str | None) -> dict[str, Any]:
    """Return a document's parameters as JSON schema."""
    return {
        "type": "object",
        "properties": {
            name: _convert(value) if language is None else _as_text(value, language)
            for name, value in parameters.get("properties", {}).items()
        },
        "required": list(parameters.get("required", ())),
    }


def _convert(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON's types, at any depth."""
    made = dict(schema)
    made["type"] = _TYPES.get(str(schema.get("type")), "string")
    if schema.get("type") == "float":
        made["format"] = "float"
        made["description"] = f"{schema.get('description', '')} This is a float type value.".strip()
    if isinstance(properties := schema.get("properties"), dict):
        made["properties"] = {
            name: _convert(value) if isinstance(value, dict) else value
            for name, value in properties.items()
        }
    if isinstance(items := schema.get("items"), dict):
        made["items"] = _convert(items)
    return made


def _as_text(schema: Mapping[str, Any], language: str) -> dict[str, Any]:
    """Return a schema for a value that is written in another language, in a string."""
    kind = schema["type"]
    description = schema.get("description", "")
    if kind == "any":
        description += (
            f" This parameter can be of any type of {language} object in string representation."
        )
    else:
        description += f" This is {language} {kind} type parameter in string representation."
    if kind in ("ArrayList", "Array", "array") and "items" in schema:
        description += (
            f" The list elements are of type {schema['items']['type']}; they are not in string "
            "representation."
        )
    if kind == "dict" and "properties" in schema:
        description += (
            " The dictionary entries have the following schema; they are not in string "
            f"representation. {json.dumps(schema['properties'])}"
        )
    others = {k: v for k, v in schema.items() if k not in ("items", "properties")}
    return others | {"type": "string", "description": description}


def _parts(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value and all that it holds, each with its depth."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        yield part, depth
        if isinstance(part, dict):
            waiting += [(piece, depth + 1) for pair in part.items() for piece in pair]
        elif isinstance(part, list):
            waiting += [(piece, depth + 1) for piece in part]
