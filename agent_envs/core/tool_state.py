"""The state of an environment and its tools: dump it, load it, say what cannot be dumped.

The state of a tool is the object whose method it is, or the variables that its function closes
over. Objects are loaded in place, so that a tool that is a method of one goes on with it.
"""

import copy
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym

from agent_envs.core.tool import Tool
from agent_envs.errors import SnapshotError

_ENVIRONMENT: Final = "the environment"
_MAX_DEPTH: Final = 8
_WAYS_OUT: Final = (
    "What no step changes, name in not_in_snapshots of its class; so, too, what on_restore() "
    "brings back. Keep the rest as plain data."
)


def dump_state(env: Any, callables: Mapping[str, Any]) -> bytes:
    """Pickle the state of `env` and of what it calls: its tools, and others, by their names.

    Raises:
        SnapshotError: If something cannot be pickled; names the attribute or the tool.
    """
    parts = _Parts(env, callables)
    place = ""
    try:
        states: dict[str, Any] = {}
        for place, holder in parts.holders.items():
            states[place] = _get_state(holder)
        for place, cells in parts.cells.items():
            states[place] = {name: _contents(cell) for name, cell in cells.items()}
        return parts.dump(states)
    except Exception as error:
        for name, state in states.items():
            if not _can_dump(state, parts.dump):
                where, culprit = find_culprit(state, parts.dump)
                place = f"{where} of {name}, a {type(culprit).__qualname__},"
                break
        raise SnapshotError(
            f"{type(env).__name__} cannot be saved, because {place} cannot be: {error}. {_WAYS_OUT}"
        ) from error


def load_state(env: Any, callables: Mapping[str, Any], state: bytes) -> set[str]:
    """Put what `dump_state` returned into `env` and what it calls.

    Returns:
        The names of what is not here: of other tools than those of `callables`.

    Raises:
        SnapshotError: If it cannot be unpickled here.
    """
    parts = _Parts(env, callables)
    try:
        states, missing = parts.load(state)
        if not isinstance(states, Mapping):
            raise TypeError(f"it holds {type(states).__name__}, no state")
    except Exception as error:
        name = type(env).__name__
        raise SnapshotError(f"{name}: the snapshot cannot be read here ({error}).") from error
    for place, holder in parts.holders.items():
        if place in states:
            _set_state(holder, states[place])
    for place, cells in parts.cells.items():
        for name, value in states.get(place, {}).items():
            if name in cells:
                _set_contents(cells[name], value)
    return missing | (states.keys() - parts.holders.keys() - parts.cells.keys())


def copy_tools(tools: Iterable[Any]) -> list[Any]:
    """Copy tools, and what holds their state, so that `load_state` gives the copies their own."""
    memo: dict[int, Any] = {}
    copied = []
    for tool in tools:
        again = tool
        if isinstance(tool, Tool):
            again = object.__new__(type(tool))
            vars(again).update(vars(tool))
            again.function = _copy_function(tool.function, memo)
        copied.append(again)
    return copied


def find_culprit(value: Any, dump: Callable[[Any], Any]) -> tuple[str, Any]:
    """Return what in `value` keeps `dump` from pickling it: its place, and the thing itself."""
    places: list[str] = []
    while len(places) < _MAX_DEPTH:
        for place, child in _children(value):
            if not _can_dump(child, dump):
                places.append(place)
                value = child
                break
        else:
            break
    first, *rest = places or [""]
    return "".join([first.strip("[]"), *rest]), value


class _Parts:
    """What of an environment holds state, and what a state only refers to."""

    def __init__(self, env: Any, callables: Mapping[str, Any]) -> None:
        self.holders: dict[str, Any] = {_ENVIRONMENT: env}
        self.cells: dict[str, dict[str, types.CellType]] = {}
        self._known = {id(env)}
        for place, called in callables.items():
            self._add(called.function if isinstance(called, Tool) else called, place)
        self._live = {f"{place} itself": called for place, called in callables.items()}
        self._live |= self.holders
        for place, holder in self.holders.items():
            attributes = getattr(holder, "__dict__", {})
            for name in _left_out(type(holder)) & attributes.keys():
                self._live[f"{place}.{name}"] = attributes[name]
        self._places = {id(thing): place for place, thing in self._live.items()}

    def dump(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Pickler(file, self._places).dump(value)
        return file.getvalue()

    def load(self, data: bytes) -> tuple[dict[str, Any], set[str]]:
        unpickler = _Unpickler(io.BytesIO(data), self._live)
        return unpickler.load(), unpickler.missing

    def _add(self, function: Any, place: str) -> None:
        """Add what a tool's function holds: its object, its variables, those of its helpers."""
        holder = getattr(function, "__self__", function)
        if id(holder) in self._known or isinstance(holder, type | types.ModuleType):
            return
        self._known.add(id(holder))
        if not isinstance(holder, types.FunctionType):
            self.holders[place] = holder
            return
        variables: dict[str, types.CellType] = {}
        for name, cell in _cells(holder):
            content = _contents(cell)
            if isinstance(content, types.FunctionType | types.MethodType):
                self._add(content, f"{place}, in {name!r},")
            elif content is _Unset or not isinstance(content, type | types.ModuleType):
                variables[name] = cell
        if variables:
            self.cells[f"the variables of {place}"] = variables


class _Pickler(pickle.Pickler):
    """Writes a name for what is not part of the state but known wherever it is loaded."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._places = places

    def reducer_override(self, obj: Any) -> Any:
        place = self._places.get(id(obj))
        return NotImplemented if place is None else (_live, (place,))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, live: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._things = live
        self.missing: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        is_reference = (module, name) == (__name__, _live.__name__)
        return self._find if is_reference else super().find_class(module, name)

    def _find(self, place: str) -> Any:
        if place not in self._things:
            self.missing.add(place)
        return self._things.get(place)


def _live(place: str) -> Any:
    """Stand in a pickle for what the unpickler puts there."""
    raise LookupError(place)


def _left_out(kind: type) -> frozenset[str]:
    """Return what `kind` and its bases name in ``not_in_snapshots``."""
    names: set[str] = set()
    for base in kind.__mro__:
        declared = vars(base).get("not_in_snapshots", ())
        names |= {declared} if isinstance(declared, str) else set(declared)
    return frozenset(names)


def _has_own_state(holder: Any) -> bool:
    """Return whether a class says itself what its state is; for environments, it does not count.

    Gymnasium's EzPickle, for one, says that an environment's arguments are all of it.
    """
    own = any("__getstate__" in vars(kind) for kind in type(holder).__mro__[:-1])
    return own and not isinstance(holder, gym.Env)


def _get_state(holder: Any) -> Any:
    if _has_own_state(holder):
        return holder.__getstate__()
    state = object.__getstate__(holder)
    with_dict, with_slots = state if isinstance(state, tuple) else (state, None)
    attributes = {**(with_dict or {}), **(with_slots or {})}
    left_out = _left_out(type(holder))
    return {name: value for name, value in attributes.items() if name not in left_out}


def _set_state(holder: Any, state: Any) -> None:
    is_env = isinstance(holder, gym.Env)
    if hasattr(holder, "__setstate__") and not is_env:
        holder.__setstate__(state)
        return
    if not _has_own_state(holder):
        for name in _get_state(holder).keys() - state.keys():
            object.__delattr__(holder, name)
    for name, value in state.items():
        object.__setattr__(holder, name, value)


class _Unset:
    """Stands for a variable without a value."""


def _cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    """Yield the variables that a function closes over."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Unset


def _set_contents(cell: types.CellType, value: Any) -> None:
    if value is not _Unset:
        cell.cell_contents = value
    elif _contents(cell) is not _Unset:
        del cell.cell_contents


def _copy_function(function: Any, memo: dict[int, Any]) -> Any:
    """Copy a function with cells of its own, or a method with an object of its own."""
    if id(function) in memo:
        return memo[id(function)]
    if isinstance(function, types.MethodType):
        holder = function.__self__
        if not isinstance(holder, type | types.ModuleType):
            holder = memo.setdefault(id(holder), copy.copy(holder))
        return types.MethodType(function.__func__, holder)
    if not isinstance(function, types.FunctionType):
        return copy.copy(function)
    if not function.__closure__:
        return function
    cells = [memo.setdefault(id(cell), types.CellType()) for cell in function.__closure__]
    copied = memo[id(function)] = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    for cell, again in zip(function.__closure__, cells, strict=True):
        content = _contents(cell)
        is_code = isinstance(content, types.FunctionType | types.MethodType)
        _set_contents(again, _copy_function(content, memo) if is_code else content)
    return copied


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _can_dump(value: Any, dump: Callable[[Any], Any]) -> bool:
    try:
        dump(value)
    except Exception:  # noqa: BLE001 - the answer
        return False
    return True
