"""Snapshots, copies and pickles of environments.

The state of an environment is what `reset` and `step` may change: its attributes, and those of the
objects whose methods are its tools. A class lists in ``not_in_snapshots`` the attributes that the
constructor makes and no step changes: data sets, search engines, sandboxes, connections. State that
cannot be pickled is not copied: its snapshot holds the episode's start and actions, and `restore`
replays them.

A pickle holds the constructor's arguments and a snapshot; unpickling calls the constructor again.
"""

import copy
import dataclasses
import functools
import hashlib
import io
import json
import pickle
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar, Final, Self

import gymnasium as gym

from agent_envs.core.replay import replay
from agent_envs.core.tool import Tool
from agent_envs.errors import SnapshotError

_MAX_ARGUMENT_CHARS: Final = 120
_ENVIRONMENT: Final = "the environment"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of an environment: opaque, small and picklable.

    Like a pickle, it can run code when it is restored: do not restore snapshots from strangers.
    """

    environment: str
    """Id of the environment, or its class."""
    arguments: Mapping[str, str] = dataclasses.field(repr=False)
    """A description of each constructor argument."""
    state: bytes = dataclasses.field(repr=False)
    """The pickled state, or the pickled `Record` of the episode."""
    is_replayed: bool = False
    """Whether `restore` replays the recorded actions."""


@dataclasses.dataclass(slots=True)
class Record:
    """Start, actions and results of an episode, for its replay."""

    random_state: Mapping[str, Any]
    """State of the random generator at the reset."""
    task: int | None
    """Option ``task`` of the reset."""
    observations: list[str] = dataclasses.field(default_factory=list)
    actions: list[str] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)


class RestorableEnv(gym.Env[str, str]):
    """An environment with snapshots, copies and pickles."""

    not_in_snapshots: ClassVar[frozenset[str]] = frozenset(
        {
            "_made_with", "_description", "action_space", "observation_space",
            "render_mode", "spec", "max_turns",
        }
    )  # fmt: skip
    """Attributes that the constructor makes and no step changes, and those that `on_restore` sets;
    a subclass adds its own. The class of an object whose methods are tools may have it, too."""
    max_turns: int | None = None
    """The turn limit of Gymnasium around this environment; known after a `reset` or `step`."""
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _episode_record: Record | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments of the constructor."""
        env = super().__new__(cls)
        env._made_with = (args, kwargs)
        return env

    def snapshot(self) -> Snapshot:
        """Return the state, from which `restore` continues.

        Raises:
            SnapshotError: If it can be neither copied nor replayed; names the attribute or tool.
        """
        try:
            is_replayed, state = False, self._dump()
        except SnapshotError:
            raise
        except Exception as error:
            if self._episode_record is None:
                raise SnapshotError(
                    f"{type(self).__name__} cannot be saved ({error}). List in not_in_snapshots "
                    "of its class what no step changes, and keep the rest as plain data."
                ) from error
            is_replayed, state = True, pickle.dumps(self._episode_record)
        name, arguments = self._description
        return Snapshot(environment=name, arguments=arguments, state=state, is_replayed=is_replayed)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from `snapshot`, in any state of this environment.

        Args:
            snapshot: From an environment that was made with the same arguments, in any process.

        Raises:
            SnapshotError: If it is from another environment or has other arguments; `ReplayError`
                if replayed actions lead to another state.
        """
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"restore() takes a Snapshot, not {type(snapshot).__name__}.")
        _check_same(snapshot, *self._description)
        self._load(snapshot, is_restored=True)

    def _tools_with_state(self) -> Mapping[str, Tool]:
        """Return the tools whose state belongs to the environment, by name."""
        return {}

    def _resume(self, *, is_restored: bool) -> None:
        """Set what a snapshot leaves out; `is_restored` is False in a pickle or a copy."""

    def _state_holders(self) -> dict[str, Any]:
        holders: dict[str, Any] = {_ENVIRONMENT: self}
        for name, tool in self._tools_with_state().items():
            holder = _holder_of(tool)
            if holder is not None and all(holder is not other for other in holders.values()):
                holders[f"the tool {name!r}"] = holder
        return holders

    def _dump(self) -> bytes:
        """Pickle the state.

        Raises:
            TypeError: If a tool keeps state in variables of its function.
            Exception: If something cannot be pickled.
        """
        for name, tool in self._tools_with_state().items():
            if _has_hidden_state(tool):
                raise TypeError(f"the function of the stateful tool {name!r} has variables")
        holders = self._state_holders()
        file = io.BytesIO()
        pickler = _Pickler(file, protocol=5)
        pickler.names = {id(thing): name for name, thing in _references(holders)}
        pickler.dump({name: _state_of(holder) for name, holder in holders.items()})
        return file.getvalue()

    def _load(self, snapshot: Snapshot, *, is_restored: bool) -> None:
        if snapshot.is_replayed:
            self._replay(_unpickled(self, snapshot.state, Record))
            self._resume(is_restored=is_restored)
            return
        holders = self._load_state(snapshot.state)
        self._resume(is_restored=is_restored)
        if holders != [*map(id, self._state_holders().values())]:
            self._load_state(snapshot.state)  # on_restore() has offered other tools

    def _load_state(self, state: bytes) -> list[int]:
        """Load a state in place; return the ids of the objects that hold it."""
        holders = self._state_holders()
        things = dict(_references(holders))
        states = _unpickled(self, state, dict, things)
        for name in states.keys() & holders.keys():
            _set_state(holders[name], states[name])
        return [*map(id, holders.values())]

    def _replay(self, record: Record) -> None:
        self.np_random.bit_generator.state = record.random_state
        for _ in replay(
            self, None, record.task, record.actions,
            observations=record.observations, rewards=record.rewards,
        ):  # fmt: skip
            pass

    @functools.cached_property
    def _description(self) -> tuple[str, dict[str, str]]:
        """Name and arguments of the environment, to be compared with those of a snapshot."""
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        args, kwargs = self._made_with
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        given.pop("render_mode", None)  # changes no episode
        texts = {name: _describe(value) for name, value in given.items()}
        return kind if self.spec is None else self.spec.id, {"class": kind} | texts

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Pickle the constructor's arguments and a snapshot.

        Raises:
            SnapshotError: If an argument cannot be pickled; names it.
        """
        args, kwargs = self._made_with
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        for name, value in given.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise SnapshotError(
                    f"{type(self).__name__} cannot be pickled, because of its argument {name!r}: "
                    f"{error}. Pass what another process can import: functions and tools of a "
                    "module's top level, names, paths."
                ) from error
        return _make_again, (type(self), self._made_with, self._kept(), self.snapshot())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the state; what no step changes is shared.

        Raises:
            SnapshotError: If the state can be neither copied nor replayed.
        """
        args, kwargs = self._made_with
        if kwargs.get("tools"):
            kwargs = kwargs | {"tools": [_copy_tool(tool, memo) for tool in kwargs["tools"]]}
        kept = copy.deepcopy(self._kept(), memo)
        env: Self = _make_again(type(self), (args, kwargs), kept, self.snapshot())
        memo[id(self)] = env
        return env

    def _kept(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles that snapshots leave out."""
        names = ("action_space", "observation_space", "spec", "max_turns")
        return {name: getattr(self, name) for name in names}


def _make_again(
    kind: type[Any],
    made_with: tuple[tuple[Any, ...], dict[str, Any]],
    kept: Mapping[str, Any],
    snapshot: Snapshot,
) -> Any:
    env = kind(*made_with[0], **made_with[1])
    for name, value in kept.items():
        setattr(env, name, value)
    env._load(snapshot, is_restored=False)
    return env


class _Pickler(pickle.Pickler):
    """Replaces objects that are part of every such environment by their names."""

    names: Mapping[int, str]

    def persistent_id(self, obj: Any) -> str | None:
        return self.names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    things: Mapping[str, Any]

    def persistent_load(self, pid: str) -> Any:
        return self.things.get(pid)  # None for a tool that on_restore() has yet to offer


def _unpickled(env: Any, state: bytes, kind: type, things: Mapping[str, Any] | None = None) -> Any:
    try:
        unpickler = _Unpickler(io.BytesIO(state))
        unpickler.things = things or {}
        found = unpickler.load()
        if not isinstance(found, kind):
            raise TypeError(f"it holds {type(found).__name__}, no state")
    except Exception as error:
        name = type(env).__name__
        raise SnapshotError(f"{name}: the snapshot cannot be read here ({error}).") from error
    return found


def _references(holders: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects, with names, that a state refers to instead of containing them."""
    for name, holder in holders.items():
        yield name, holder
        attributes = getattr(holder, "__dict__", {})
        for left_out in sorted(_left_out(type(holder)) & attributes.keys()):
            value = attributes[left_out]
            if not isinstance(value, str | bytes | int | float | tuple | frozenset | None):
                yield f"{name}.{left_out}", value


def _holder_of(tool: Tool) -> Any:
    """Return the object whose method, or which itself, is the function of a tool; None for none."""
    function = tool.function
    holder = getattr(function, "__self__", function)
    is_code = isinstance(holder, type | types.ModuleType | types.FunctionType | functools.partial)
    return None if is_code else holder


def _has_hidden_state(tool: Tool) -> bool:
    """Return whether a tool declares that it has state, and keeps it in variables of a function."""
    return tool.stateful and bool(getattr(tool.function, "__closure__", None))


def _copy_tool(tool: Any, memo: dict[int, Any]) -> Any:
    """Copy a tool and the object that holds its state."""
    if not isinstance(tool, Tool):
        return tool
    if _has_hidden_state(tool):
        raise SnapshotError(
            f"The tool {tool.name!r} cannot be copied: its state is in variables of a function. "
            "Make it a method of an object."
        )
    copied = tool.renamed(tool.name)
    holder = _holder_of(tool)
    if holder is not None:
        again = memo.setdefault(id(holder), copy.copy(holder))
        function: Any = tool.function
        is_method = isinstance(function, types.MethodType)
        copied.function = types.MethodType(function.__func__, again) if is_method else again
    return copied


def _left_out(kind: type) -> frozenset[str]:
    """Return the ``not_in_snapshots`` of `kind` and its bases."""
    names: set[str] = set()
    for base in kind.__mro__:
        declared = vars(base).get("not_in_snapshots", ())
        names |= {declared} if isinstance(declared, str) else set(declared)
    return frozenset(names)


def _has_custom_state(kind: Any) -> bool:
    return kind.__getstate__ is not object.__getstate__


def _state_of(holder: Any) -> Any:
    kind = type(holder)
    # Gymnasium's EzPickle declares that the arguments of an environment are all of its state.
    if not isinstance(holder, gym.Env) and _has_custom_state(kind):
        return holder.__getstate__()
    state = object.__getstate__(holder)
    with_dict, with_slots = state if isinstance(state, tuple) else (state, None)
    attributes = {**(with_dict or {}), **(with_slots or {})}
    left_out = _left_out(kind)
    return {name: value for name, value in attributes.items() if name not in left_out}


def _set_state(holder: Any, state: Any) -> None:
    if hasattr(holder, "__setstate__") and not isinstance(holder, gym.Env):
        holder.__setstate__(state)
        return
    if isinstance(holder, gym.Env) or not _has_custom_state(type(holder)):
        for name in _state_of(holder).keys() - state.keys():
            object.__delattr__(holder, name)
    for name, value in state.items():
        object.__setattr__(holder, name, value)


def _check_same(snapshot: Snapshot, name: str, arguments: Mapping[str, str]) -> None:
    theirs = snapshot.arguments
    different = [key for key in {**theirs, **arguments} if theirs.get(key) != arguments.get(key)]
    if snapshot.environment == name and not different:
        return
    reasons = [
        f"{key} is {theirs.get(key, 'not given')} there and {arguments.get(key, 'not given')} here"
        for key in different
    ]
    raise SnapshotError(
        f"The snapshot is of {snapshot.environment} and cannot be restored in this {name}: "
        f"{'; '.join(reasons) or 'the ids differ'}. Make both environments alike."
    )


def _describe(value: Any) -> str:
    """Return a text that is the same for equal arguments, in any process."""
    try:
        text = json.dumps(value, default=_describe_object, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError):  # keys of several types, or a cycle
        text = type(value).__qualname__
    if len(text) > _MAX_ARGUMENT_CHARS:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        text = f"{text[:_MAX_ARGUMENT_CHARS]}… (sha256 {digest})"
    return text


def _describe_object(value: Any) -> Any:
    if isinstance(value, Tool):
        return value.schema
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
