"""From a tool's JSON schema to what a function would look like that had it.

Libraries such as transformers read a tool's schema off a Python function: its name, type hints and
Google-style docstring. `describe_as_function` gives a function those, so that
``transformers.utils.get_json_schema`` finds the same name, texts, types, enumerations and required
arguments again. What hints cannot say (a default, a range, the members of an object) is said in the
argument's text.
"""

import inspect
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Union

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
"""Members of an argument's schema that say nothing about its type."""
_SECTION: Final = re.compile(r"(Args|Returns|Raises):")
"""A heading of a docstring; within a text it would be taken for one."""
_CHOICES: Final = re.compile(r"\(choices:", re.IGNORECASE)
"""What transformers would read as an enumeration at the end of a text."""


def describe_as_function(function: Callable[..., Any], tool: Tool) -> None:
    """Give a method name, signature, hints and docstring of a tool.

    Args:
        function: Takes ``self`` and the tool's arguments by keyword.
        tool: What it calls.

    Raises:
        ConfigurationError: If an argument's name cannot be one in Python.
    """
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
        hints[name], is_whole = _hint(argument)
        default = inspect.Parameter.empty if name in required else argument.get("default")
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]
            )
        )
        lines.append(f"    {name}: {_text(name, argument, is_whole=is_whole)}")
    function.__name__ = function.__qualname__ = schema["name"]
    function.__annotations__ = hints  # no return: the tool's own schema has none either
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__doc__ = _SECTION.sub(r"\1 :", schema["description"])
    if lines:
        function.__doc__ += "\n\nArgs:\n" + "\n".join(lines)


def _text(name: str, argument: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return an argument's text on one line; never empty, since transformers wants one."""
    text = " ".join(str(argument.get("description") or f"The {name}.").split())
    if argument.get("default") is not None:
        text += f" (default: {json.dumps(argument['default'], ensure_ascii=False)})"
    if not is_whole:
        kind = {key: value for key, value in argument.items() if key not in _TEXTS}
        text += f" JSON schema: {json.dumps(kind, ensure_ascii=False)}"
    return _CHOICES.sub("(one of:", _SECTION.sub(r"\1 :", text))


def _inline(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Put definitions in the place of references to them; those nested too deep stay."""
    if isinstance(schema, list):
        return [_inline(item, definitions, depth) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    name = str(reference).rpartition("/")[2]
    if reference is not None and name in definitions and depth < 5:  # a tree refers to itself
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inline({**definitions[name], **rest}, definitions, depth + 1)
    return {key: _inline(value, definitions, depth) for key, value in schema.items()}


def _hint(schema: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the type hint nearest to a schema, and whether it says all that the schema says."""
    kind = {key: value for key, value in schema.items() if key not in _TEXTS}
    if not kind:
        return Any, True
    if "const" in kind:
        kind["enum"] = [kind.pop("const")]
    if "enum" in kind:
        if any(isinstance(value, list | dict) for value in kind["enum"]):
            return Any, False
        return Literal[tuple(kind["enum"])], True
    if "anyOf" in kind:
        return _union([_hint(option) for option in kind["anyOf"]], is_whole=len(kind) == 1)
    name = kind.get("type")
    if isinstance(name, list):
        return _union([_hint({**kind, "type": one}) for one in name])
    if name == "array":
        return _array_hint(kind)
    if name == "object":
        return _object_hint(kind)
    return _SCALARS.get(str(name), Any), name in _SCALARS and len(kind) == 1


def _union(options: Sequence[tuple[Any, bool]], *, is_whole: bool = True) -> tuple[Any, bool]:
    hints = tuple(hint for hint, _ in options)
    return Union[hints], is_whole and all(whole for _, whole in options)  # noqa: UP007 - as many as there are


def _array_hint(kind: Mapping[str, Any]) -> tuple[Any, bool]:
    if items := kind.get("prefixItems"):
        options = [_hint(item) for item in items]
        lengths = {kind.get("minItems", len(items)), kind.get("maxItems", len(items))}
        known = {"type", "prefixItems", "minItems", "maxItems"}
        is_whole = lengths == {len(items)} and kind.keys() <= known and len(items) > 1
        return tuple[tuple(hint for hint, _ in options)], is_whole and all(w for _, w in options)  # type: ignore[misc]
    if not kind.get("items"):
        return list, kind.keys() <= {"type", "items"}
    hint, is_whole = _hint(kind["items"])
    return list[hint], is_whole and kind.keys() == {"type", "items"}  # type: ignore[valid-type]


def _object_hint(kind: Mapping[str, Any]) -> tuple[Any, bool]:
    values = kind.get("additionalProperties", True)
    is_whole = kind.keys() <= {"type", "additionalProperties"}
    if not isinstance(values, dict):
        return dict, is_whole and values is True
    hint, is_whole_value = _hint(values)
    return dict[str, hint], is_whole and is_whole_value  # type: ignore[valid-type]
