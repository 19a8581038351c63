"""Back-ends, official checks and reference calls of BFCL.

The Python back-ends (a file system, a trading bot, tickets, messages, cars, travel, posts) are the
package's own classes, called by name with JSON values: no text of a model is ever evaluated. File
systems whose folders contain themselves and powers of millions of digits are refused. The checks
are the package's own functions.
"""

import ast
import contextlib
import copy
import decimal
import functools
import importlib
import inspect
import json
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from unittest.mock import patch

from agent_envs.core.tool import ToolResult
from agent_envs.envs.functions.bfcl_rows import LANGUAGES, Document, Row, tool_name

Call = tuple[str, Mapping[str, Any]]
"""The name of a function in the package, and its arguments."""
Reference = tuple[tuple[str, ...], Mapping[str, Any]]
"""Outcome of the ground truth of a turn: responses, and the back-ends after it, read only."""
ERROR_TEXT: Final = "Error during execution: {error}"
_STATELESS: Final = frozenset({"MathAPI"})
_MAX_MATH_PRECISION: Final = 1_000
"""For exponents, digits and precision."""
_MAX_FOLDER_ITEMS: Final = 20_000
_MAX_PATH_CHARS: Final = 1_000_000
_LOCK: Final = threading.Lock()  # mpmath's precision and some tables are global
_GROWING: Final = frozenset({"cp", "mv", "mkdir", "touch"})
_MODEL_TABLE: Final = "bfcl_eval.constants.model_config"
_MAX_VALUE_CHARS: Final = 400
_MAX_BRACKETS: Final = 12
_LONG_SPACE: Final = re.compile(r"\s{13}")
_EXAMPLES: Final[Mapping[str, Any]] = {
    "integer": 1, "float": 1.0, "number": 1.0, "boolean": True, "array": [], "tuple": [],
    "dict": {},
}  # fmt: skip


class BackEnds:
    """The stateful objects of one task."""

    def __init__(self, row: Row) -> None:
        self.instances: dict[str, Any] = {}
        for name in row.classes:
            instance = _class(name)()
            if name not in _STATELESS:
                instance._load_scenario(
                    copy.deepcopy(row.configuration.get(name, {})),
                    long_context="long_context" in row.category,
                )
            # A copy: long scenarios share tables of the module.
            self.instances[name] = copy.deepcopy(instance)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a function; an exception becomes a result, as in the package."""
        try:
            return ToolResult(self._call(name, arguments))
        except Exception as error:  # noqa: BLE001 - foreign code on a model's arguments
            return ToolResult(ERROR_TEXT.format(error=error), error="tool_error")

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        import mpmath

        # The last class wins, as in the package's table of methods.
        owner = next((key for key in reversed(self.instances) if name in _methods(key)), None)
        if owner is None:
            raise NameError(f"name '{name}' is not defined")
        for key in ("exponent", "precision", "decimal_places") if owner == "MathAPI" else ():
            value, most = arguments.get(key), _MAX_MATH_PRECISION
            if isinstance(value, int | float) and not abs(value) <= most:
                raise ValueError(f"'{key}' must lie between -{most} and {most}")
        before = copy.deepcopy(self.instances[owner]) if name in _GROWING else None
        with _LOCK, decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
            text = _as_text(getattr(self.instances[owner], name)(**arguments))
        if before is not None and not _is_bounded(self.instances[owner].root):
            self.instances[owner] = before
            raise ValueError("a folder would hold itself, or too many files")
        return text


@functools.lru_cache(maxsize=64)
def run_ground_truth(row: Row) -> tuple[Reference, ...]:
    """Run the calls of each turn."""
    back_ends = BackEnds(row)
    references: list[Reference] = []
    for calls in row.ground_truth:
        texts = tuple(back_ends.call(*_read_call(row, text)).content for text in calls)
        references.append((texts, copy.deepcopy(back_ends.instances)))
    return tuple(references)


def _read_call(row: Row, text: str) -> Call:
    """Parse a Python call of the ground truth into name and named arguments."""
    call: Any = ast.parse(text.strip(), mode="eval").body
    name = call.func.id
    kind = next(_class(key) for key in reversed(row.classes) if name in _methods(key))
    names = list(inspect.signature(getattr(kind, name)).parameters)[1:]
    given = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    return name, {key: ast.literal_eval(value) for key, value in given}


def _class(name: str) -> type:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    kind: type = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)
    return kind


@functools.cache
def _methods(name: str) -> frozenset[str]:
    found = inspect.getmembers(_class(name), inspect.isfunction)
    return frozenset(key for key, _ in found if not key.startswith("_"))


def _as_text(value: Any) -> str:
    """Write a result as the package does."""
    if isinstance(value, dict):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(value)
    return str(value)


def _is_bounded(folder: Any) -> bool:
    """Return whether a folder is finite and small."""
    waiting = [(folder, 0)]
    num_items = num_chars = 0
    while waiting:
        item, num_path_chars = waiting.pop()
        num_items += 1
        num_chars += num_path_chars
        if num_items > _MAX_FOLDER_ITEMS or num_chars > _MAX_PATH_CHARS:
            return False
        contents: Mapping[str, Any] = getattr(item, "contents", {})
        waiting += [(child, num_path_chars + len(name) + 1) for name, child in contents.items()]
    return True


def is_right_turn(row: Row, calls: Sequence[Call]) -> bool:
    """Judge the only turn of a task by its calls."""
    if "relevance" in row.category:
        return bool(calls) == ("irrelevance" not in row.category)
    if not calls:
        return False
    from bfcl_eval.constants.enums import Language

    language = LANGUAGES.get(row.category, "Python")
    if language != "Python" and not _is_readable(calls):
        return False
    written = [{tool_name(name): dict(arguments)} for name, arguments in calls]
    try:
        verdict = _ast_checker()(
            list(row.functions), written, list(row.ground_truth),
            Language[language.upper()], row.category, "any",
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - the checker fails on some wrong answers
        return False
    return bool(verdict["valid"])


def is_right_state(
    instances: Mapping[str, Any], responses: Counter[str], num_calls: int, reference: Reference
) -> bool:
    """Judge one turn of several after its end.

    Args:
        instances: The model's back-ends.
        responses: Results of its calls in all turns so far.
        num_calls: Number of its calls in this turn.
        reference: Outcome of the ground truth of this turn.
    """
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
        response_checker,
        state_checker,
    )

    expected, back_ends = reference
    if not expected:
        return True  # the request cannot be fulfilled yet, and is not checked
    if not num_calls:
        return False
    texts = [text for text in responses.elements() if text in expected]
    try:
        state = state_checker(dict(instances), dict(back_ends))
    except Exception:  # noqa: BLE001 - objects that cannot be compared are not equal
        return False
    return bool(state["valid"] and response_checker(texts, list(expected), 0)["valid"])


@functools.cache
def _ast_checker() -> Any:
    """Import the checker without the module of a hundred models' handlers.

    It would look up there whether a model writes ``.`` in names as ``_``: yes, with tools.
    """
    table: Any = types.ModuleType(_MODEL_TABLE)
    table.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=True)}
    with patch.dict(sys.modules, {_MODEL_TABLE: table}):
        return importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker


def _is_readable(calls: Sequence[Call]) -> bool:
    """Return whether Java or JavaScript in strings is as short as right answers are.

    The package's regular expressions take time exponential in the number of brackets.
    """
    return all(
        len(value) <= _MAX_VALUE_CHARS
        and sum(map(value.count, "[({")) <= _MAX_BRACKETS
        and not _LONG_SPACE.search(value)
        for _, arguments in calls
        for value in arguments.values()
        if isinstance(value, str)
    )


def right_turns(row: Row) -> list[list[Call]]:
    """Return the right calls of each user turn; an empty list if none is known.

    The ground truth of a single turn lists the accepted values: the first ones are taken, with or
    without the arguments that may be left out.
    """
    if row.is_multi_turn:
        return [[_read_call(row, text) for text in calls] for calls in row.ground_truth]
    if "irrelevance" in row.category:
        return [[]]
    if "relevance" in row.category:
        return [[_example(row.functions[0])]]
    for keeps_optional in (True, False):
        calls: list[Call] = [
            (name, _accepted(accepted, row.category, keeps_optional=keeps_optional))
            for truth in row.ground_truth
            for name, accepted in truth.items()
        ]
        if is_right_turn(row, calls):
            return [calls]
    return []


def _example(document: Document) -> Call:
    parameters = document["parameters"]
    properties = parameters.get("properties", {})
    return document["name"], {
        name: _EXAMPLES.get(properties[name].get("type"), "example")
        for name in parameters.get("required", ())
    }


def _accepted(
    accepted: Mapping[str, Sequence[Any]], category: str, *, keeps_optional: bool
) -> dict[str, Any]:
    """Return the first accepted value of each argument; "" marks those that may be left out."""
    values = {
        name: _read(next((value for value in values if value != ""), ""))
        for name, values in accepted.items()
        if keeps_optional or "" not in values
    }
    if category not in LANGUAGES:
        return values
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in values.items()}


def _read(value: Any) -> Any:
    """Choose the first accepted entry of each member of a value."""
    if isinstance(value, dict):
        return {
            key: _read(next(choice for choice in choices if choice != ""))
            for key, choices in value.items()
            if isinstance(choices, list) and any(choice != "" for choice in choices)
        } | {key: choice for key, choice in value.items() if not isinstance(choice, list)}
    return [_read(item) for item in value] if isinstance(value, list) else value
