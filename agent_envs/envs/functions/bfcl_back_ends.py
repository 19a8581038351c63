"""BFCL's Python back-ends: a file system, a trading bot, tickets, messages, cars, travel, posts.

They are the package's own classes, called by name with JSON values: nothing that a model writes is
ever evaluated. What the package leaves to the machine is bounded here: file systems whose folders
hold themselves, powers of millions of digits.
"""

import ast
import contextlib
import copy
import decimal
import functools
import importlib
import inspect
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.envs.functions.bfcl_rows import Row

_MODULES: Final = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_STATELESS: Final = frozenset({"MathAPI"})
_MAX_MATH_PRECISION: Final = 1_000
"""For exponents, digits and precision."""
_MAX_FOLDER_ITEMS: Final = 20_000
_MAX_PATH_CHARS: Final = 1_000_000
_LOCK: Final = threading.Lock()  # mpmath's precision and some tables belong to the whole process
ERROR_TEXT: Final = "Error during execution: {error}"
_TOO_LARGE_NUMBER: Final = (
    f"'{{name}}' must lie between -{_MAX_MATH_PRECISION} and {_MAX_MATH_PRECISION}"
)
_TOO_MUCH: Final = "a folder would hold itself, or too many files"
_GROWING: Final = frozenset({"cp", "mv", "mkdir", "touch"})


@dataclass(frozen=True, slots=True)
class Execution:
    """What a call brought about."""

    text: str
    """What the official checker compares, and the model reads."""
    has_failed: bool
    """Whether the function raised."""


class BackEnds:
    """The objects that the functions of one task act on."""

    def __init__(self, row: Row) -> None:
        """Set them up in the state that the task begins with."""
        self.instances: dict[str, Any] = {}
        for name in row.classes:
            instance = _class(name)()
            if name not in _STATELESS:
                instance._load_scenario(
                    copy.deepcopy(row.configuration.get(name, {})),
                    long_context="long_context" in row.category,
                )
            # A copy: long scenarios share tables of the module, which calls would change.
            self.instances[name] = copy.deepcopy(instance)

    def call(
        self, name: str, arguments: Mapping[str, Any], positional: Sequence[Any] = ()
    ) -> Execution:
        """Call a function; what goes wrong in it is its result, in the package's words."""
        owner = self._owner(name)
        if owner is None:
            return _failed(f"name '{name}' is not defined")
        if problem := _unbounded_argument(owner, arguments):
            return _failed(problem)
        before = copy.deepcopy(self.instances[owner]) if name in _GROWING else None
        with _LOCK, decimal.localcontext(), _own_precision(owner):
            try:
                value = getattr(self.instances[owner], name)(*positional, **arguments)
                text = _as_text(value)
            except Exception as error:  # noqa: BLE001 - foreign code on a model's arguments
                return _failed(error)
        if before is not None and not _is_bounded(self.instances[owner].root):
            self.instances[owner] = before
            return _failed(_TOO_MUCH)
        return Execution(text, has_failed=False)

    def _owner(self, name: str) -> str | None:
        # The last class wins, as in the package's table of methods.
        owners = [key for key in self.instances if name in _methods(key)]
        return owners[-1] if owners else None


@dataclass(frozen=True, slots=True)
class Reference:
    """What the ground truth of a turn leaves behind."""

    responses: tuple[str, ...]
    """What its calls returned."""
    instances: Mapping[str, Any]
    """The back-ends after it; read only."""


@functools.lru_cache(maxsize=64)
def play_ground_truth(row: Row) -> tuple[Reference, ...]:
    """Play the calls of each turn."""
    back_ends = BackEnds(row)
    references = []
    for calls in row.ground_truth:
        executions = [
            back_ends.call(name, arguments, positional)
            for name, positional, arguments in map(read_call, calls)
        ]
        texts = tuple(execution.text for execution in executions)
        references.append(Reference(texts, copy.deepcopy(back_ends.instances)))
    return tuple(references)


def read_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Read a Python call of the ground truth whose arguments are literals.

    Returns:
        The function's name, positional and named arguments.
    """
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)  # noqa: S101 - the package's own text
    assert isinstance(call.func, ast.Name)  # noqa: S101
    positional = [ast.literal_eval(value) for value in call.args]
    return call.func.id, positional, {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}


def named_arguments(row: Row, name: str, positional: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments of a back-end's function by name."""
    kind = next(_class(key) for key in reversed(row.classes) if name in _methods(key))
    names = list(inspect.signature(getattr(kind, name)).parameters)[1:]
    return dict(zip(names, positional, strict=False))


def _class(name: str) -> type:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    kind: type = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)
    return kind


@functools.cache
def _methods(name: str) -> frozenset[str]:
    found = inspect.getmembers(_class(name), inspect.isfunction)
    return frozenset(key for key, _ in found if not key.startswith("_"))


def _as_text(value: Any) -> str:
    """Write a result the way the package does."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return str(value)
    return str(value)


def _failed(error: object) -> Execution:
    return Execution(ERROR_TEXT.format(error=error), has_failed=True)


def _unbounded_argument(owner: str, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an argument that would take the machine for ever."""
    for name in ("exponent", "precision", "decimal_places") if owner == "MathAPI" else ():
        value = arguments.get(name)
        if isinstance(value, int | float) and not abs(value) <= _MAX_MATH_PRECISION:
            return _TOO_LARGE_NUMBER.format(name=name)
    return None


@contextlib.contextmanager
def _own_precision(owner: str) -> Iterator[None]:
    """Leave mpmath's precision as it was, which one function sets for the whole process."""
    if owner != "MathAPI":
        yield
        return
    import mpmath

    digits = mpmath.mp.dps
    try:
        yield
    finally:
        mpmath.mp.dps = digits


def _is_bounded(folder: Any) -> bool:
    """Return whether a walk through a folder ends, with not too much to say."""
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
