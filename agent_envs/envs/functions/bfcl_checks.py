"""The official checks of BFCL, on plays that are made of names and JSON values.

They are the package's own functions. Its AST checker stands in a module that imports the handlers
of a hundred models, to look up whether a model writes ``.`` in names as ``_``; it is loaded here
without that table, and with the answer: yes, as all models with function calling do.
"""

import ast
import functools
import importlib.util
import re
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.envs.functions.bfcl_back_ends import Reference
from agent_envs.envs.functions.bfcl_rows import Row
from agent_envs.envs.functions.function_documents import LANGUAGES, tool_name

_AST_CHECKER: Final = "bfcl_eval.eval_checker.ast_eval.ast_checker"
_MODEL_TABLE: Final = "bfcl_eval.constants.model_config"
_MAX_VALUE_CHARS: Final = 400
_MAX_BRACKETS: Final = 12
_LONG_SPACE: Final = re.compile(r"\s{13}")

Call = tuple[str, Mapping[str, Any]]
"""A function's name, as the package documents it, and its arguments."""


def is_right_turn(row: Row, calls: Sequence[Call]) -> bool:
    """Judge the only turn of a task: its calls, or none where the model only talked."""
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
    except Exception:  # noqa: BLE001 - the checker meets what no right answer holds
        return False
    return bool(verdict["valid"])


def is_right_state(
    instances: Mapping[str, Any], responses: Counter[str], num_calls: int, reference: Reference
) -> bool:
    """Judge one turn of several, after it.

    Args:
        instances: The back-ends as the model left them.
        responses: What its calls have returned so far, all turns together.
        num_calls: How many calls it made in this turn.
        reference: What the ground truth of this turn leaves; right calls are never none.
    """
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
        response_checker,
        state_checker,
    )

    if not reference.responses:
        return True  # the user has asked for what cannot be done yet; the official check waits
    if not num_calls:
        return False
    said = list(responses.elements())
    try:
        state = state_checker(dict(instances), dict(reference.instances))
    except Exception:  # noqa: BLE001 - objects that cannot be compared are not equal
        return False
    return bool(state["valid"] and response_checker(said, list(reference.responses), 0)["valid"])


@functools.cache
def _ast_checker() -> Any:
    spec = importlib.util.find_spec(_AST_CHECKER)
    assert spec is not None  # noqa: S101 - the package is there
    assert spec.origin is not None  # noqa: S101
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin)
    tree.body = [
        statement
        for statement in tree.body
        if not (isinstance(statement, ast.ImportFrom) and statement.module == _MODEL_TABLE)
    ]
    members: dict[str, Any] = {
        "__name__": _AST_CHECKER,
        "MODEL_CONFIG_MAPPING": {"any": types.SimpleNamespace(underscore_to_dot=True)},
    }
    exec(compile(tree, spec.origin, "exec"), members)  # noqa: S102 - the package's own module
    return members["ast_checker"]


def _is_readable(calls: Sequence[Call]) -> bool:
    """Return whether Java or JavaScript in strings is of a size that right answers have.

    The package reads it by regular expressions whose time is exponential in the brackets, and a
    high power of the spaces in a row.
    """
    return all(
        len(value) <= _MAX_VALUE_CHARS
        and sum(map(value.count, "[({")) <= _MAX_BRACKETS
        and not _LONG_SPACE.search(value)
        for _, arguments in calls
        for value in arguments.values()
        if isinstance(value, str)
    )
