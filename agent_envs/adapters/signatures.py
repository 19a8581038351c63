"""Give functions the signature and docstring of a tool's JSON schema.

``transformers.utils.get_json_schema`` then reads the same schema off them; an argument's text holds
what hints cannot express: defaults, ranges, the members of objects.
"""

import inspect
import json
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Union

import pydantic

from agent_envs.core.tool import Tool
from agent_envs.errors import ConfigurationError

_SCALARS: Final[Mapping[str, Any]] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": None,
    "object": dict,
    "array": list,
}
_TEXTS: Final = frozenset({"description", "default", "title", "$defs"})
"""Members of an argument's schema that do not concern its type."""
_SECTION: Final = re.compile(r"(Args|Returns|Raises):")
"""Headings of a docstring, which a text must not contain."""
_CHOICES: Final = re.compile(r"\(choices:", re.IGNORECASE)
"""Text that transformers would read as an enumeration."""
_MAX_DEPTH: Final = 5
"""Levels of references that are resolved; a tree refers to itself."""


def describe_as_function(function: Callable[..., Any], tool: Tool) -> None:
    """Give a method the name, signature, hints and docstring of a tool."""
    schema = tool.schema["function"]
    definitions = schema["parameters"].get("$defs", {})
    required = schema["parameters"].get("required", [])
    parameters, lines = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)], []
    hints: dict[str, Any] = {}
    for name, argument in schema["parameters"].get("properties", {}).items():
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(
                f"Tool {tool.name!r}: the argument {name!r} cannot be one of a Python function, "
                "and TRL reads tools off functions. Rename the argument."
            )
        argument = _inline(argument, definitions)
        hints[name] = _hint(argument)
        default = inspect.Parameter.empty if name in required else argument.get("default")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hints[name]))
        lines.append(f"    {name}: {_text(name, argument, hints[name])}")
    function.__name__ = function.__qualname__ = schema["name"]
    function.__annotations__ = hints  # no return: the tool's schema has none either
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__doc__ = _SECTION.sub(r"\1 :", schema["description"])
    if lines:
        function.__doc__ += "\n\nArgs:\n" + "\n".join(lines)


def _text(name: str, argument: Mapping[str, Any], hint: Any) -> str:
    """Return an argument's text on one line, with the parts of its schema that `hint` lacks."""
    text = " ".join(str(argument.get("description") or f"The {name}.").split())
    if argument.get("default") is not None:
        text += f" (default: {json.dumps(argument['default'], ensure_ascii=False)})"
    kind = {key: value for key, value in argument.items() if key not in _TEXTS}
    if kind != pydantic.TypeAdapter(hint).json_schema():
        text += f" JSON schema: {json.dumps(kind, ensure_ascii=False)}"
    return _CHOICES.sub("(one of:", _SECTION.sub(r"\1 :", text))


def _inline(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Replace references by their definitions."""
    if isinstance(schema, list):
        return [_inline(item, definitions, depth) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref")).rpartition("/")[2]
    if name in definitions and depth < _MAX_DEPTH:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**definitions[name], **rest}, definitions, depth + 1)
    return {key: _inline(value, definitions, depth) for key, value in schema.items()}


def _hint(schema: Mapping[str, Any]) -> Any:
    """Return the closest type hint that transformers can read."""
    kind, items = str(schema.get("type")), schema.get("prefixItems", ())
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    if values and not any(isinstance(value, list | dict) for value in values):
        return Literal[tuple(values)]
    if "anyOf" in schema:
        return Union[tuple(map(_hint, schema["anyOf"]))]  # noqa: UP007 - a computed union
    if len(items) > 1:
        return tuple[tuple(map(_hint, items))]  # type: ignore[misc]
    if kind == "array" and schema.get("items"):
        return list[_hint(schema["items"])]  # type: ignore[misc]
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return dict[str, _hint(values)]  # type: ignore[misc]
    return Any if "enum" in schema else _SCALARS.get(kind, Any)
