"""Snapshots of environments.

The state of an environment is what `reset` and `step` may change: its attributes, and those of the
objects whose methods are its tools. A class lists in ``not_in_snapshots`` the attributes that the
constructor makes and no step changes: data sets, search engines, sandboxes, connections. State that
cannot be pickled is not copied: its snapshot holds the episode's start and actions, and `restore`
replays them.
"""

import functools
import io
import json
import pickle
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Self

import gymnasium as gym

from agent_envs.core.replay import replay
from agent_envs.core.tool import Tool
from agent_envs.errors import SnapshotError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of an environment: opaque, small and picklable.

    Like a pickle, it can run code when it is restored: do not restore snapshots from strangers.
    """

    environment: str
    """Id and class of the environment, and its arguments."""
    state: bytes = field(repr=False)
    """The pickled state, or the pickled `Record` of the episode."""
    is_replayed: bool = False
    """Whether `restore` replays the recorded actions."""


@dataclass(slots=True)
class Record:
    """Start, actions and results of an episode, for its replay."""

    random_state: Mapping[str, Any]
    """State of the random generator at the reset."""
    task: int | None
    observations: list[str]
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class RestorableEnv(gym.Env[str, str]):
    """An environment with snapshots."""

    not_in_snapshots: ClassVar[frozenset[str]] = frozenset(
        {
            "_made_with", "action_space", "observation_space", "render_mode", "spec", "max_turns",
            "outer_limits",
        }
    )  # fmt: skip
    """Attributes that the constructor makes and no step changes, and those that `on_restore` sets;
    a subclass adds its own. The class of an object whose methods are tools may have it, too."""
    max_turns: int | None = None
    """The turn limit of Gymnasium around this environment; known after a `reset` or `step`."""
    _made_with: dict[str, Any]
    _episode_record: Record | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments of the constructor."""
        env = super().__new__(cls)
        env._made_with = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        return env

    def snapshot(self) -> Snapshot:
        """Return the state; a SnapshotError if it can be neither copied nor replayed."""
        try:
            return Snapshot(environment=self._identity, state=self._dump())
        except SnapshotError:
            raise
        except Exception as error:
            if self._episode_record is None:
                raise SnapshotError(
                    f"{type(self).__name__} cannot be saved ({error}). List in not_in_snapshots "
                    "of its class what no step changes, and keep the rest as plain data."
                ) from error
            record = pickle.dumps(self._episode_record)
            return Snapshot(environment=self._identity, state=record, is_replayed=True)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of an environment with the same arguments, in any process.

        Raises a SnapshotError for another one; `ReplayError` if a replay leads to another state.
        """
        if not isinstance(snapshot, Snapshot) or snapshot.environment != self._identity:
            raise SnapshotError(
                f"A snapshot of {getattr(snapshot, 'environment', snapshot)} cannot be restored in "
                f"{self._identity}. Make both environments alike."
            )
        if not snapshot.is_replayed:
            self._load_state(snapshot.state)
            self._resume()
            self._load_state(snapshot.state)  # on_restore() may have offered other tools
            return
        record: Record = pickle.loads(snapshot.state)  # noqa: S301 - see Snapshot
        self.np_random.bit_generator.state = record.random_state
        for _ in replay(
            self, None, record.task, record.actions,
            observations=record.observations, rewards=record.rewards,
        ):  # fmt: skip
            pass
        self._resume()

    def _tools_with_state(self) -> Mapping[str, Tool]:
        """Return the tools whose state belongs to the environment, by name."""
        return {}

    def _resume(self) -> None:
        """Set what a snapshot leaves out."""

    def _state_holders(self) -> dict[str, Any]:
        """Return the environment and the objects whose methods are tools, by name."""
        holders: dict[str, Any] = {"": self}
        for name, tool in self._tools_with_state().items():
            holder = getattr(tool.function, "__self__", tool.function)
            if not isinstance(
                holder, type | types.ModuleType | types.FunctionType | functools.partial
            ) and all(holder is not other for other in holders.values()):
                holders[name] = holder
        return holders

    def _dump(self) -> bytes:
        for name, tool in self._tools_with_state().items():
            if _has_hidden_state(tool):
                raise TypeError(f"the function of the stateful tool {name!r} has variables")
        holders = self._state_holders()
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.names = {id(holder): name for name, holder in holders.items()}
        pickler.dump({name: _state_of(holder) for name, holder in holders.items()})
        return file.getvalue()

    def _load_state(self, state: bytes) -> None:
        holders = self._state_holders()
        unpickler = _Unpickler(io.BytesIO(state))
        unpickler.things = holders
        for name, attributes in unpickler.load().items():
            if name in holders:
                _set_state(holders[name], attributes)

    @property
    def _identity(self) -> str:
        """Id, class and arguments of the environment, the same in every process."""
        shown = {name: value for name, value in self._made_with.items() if name != "render_mode"}
        arguments = json.dumps(shown, default=_describe_object, sort_keys=True)
        id = self.spec.id if self.spec else "the class"
        return f"{id} ({_describe_object(type(self))}) {arguments}"


class _Pickler(pickle.Pickler):
    """Replaces objects that are part of every such environment by their names."""

    names: Mapping[int, str]

    def persistent_id(self, obj: Any) -> str | None:
        return self.names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    things: Mapping[str, Any]

    def persistent_load(self, pid: str) -> Any:
        return self.things.get(pid)  # None for a tool that on_restore() has yet to offer


def _has_hidden_state(tool: Tool) -> bool:
    """Return whether a tool declares that it has state, and keeps it in variables of a function."""
    return tool.stateful and bool(getattr(tool.function, "__closure__", None))


def _left_out(kind: type) -> frozenset[str]:
    """Return the ``not_in_snapshots`` of `kind` and its bases."""
    return frozenset().union(*(vars(base).get("not_in_snapshots", ()) for base in kind.__mro__))


def _has_custom_state(holder: Any) -> bool:
    kind: Any = type(holder)
    # Gymnasium's EzPickle declares that the arguments of an environment are all of its state.
    return kind.__getstate__ is not object.__getstate__ and not isinstance(holder, gym.Env)


def _state_of(holder: Any) -> Any:
    if _has_custom_state(holder):
        return holder.__getstate__()
    left_out = _left_out(type(holder))
    return {name: value for name, value in vars(holder).items() if name not in left_out}


def _set_state(holder: Any, state: Any) -> None:
    if hasattr(holder, "__setstate__") and not isinstance(holder, gym.Env):
        holder.__setstate__(state)
        return
    if not _has_custom_state(holder):
        for name in _state_of(holder).keys() - state.keys():
            del vars(holder)[name]
    vars(holder).update(state)


def _describe_object(value: Any) -> Any:
    """Return what is the same for equal arguments, in any process."""
    if isinstance(value, Tool | PurePath):
        return value.schema if isinstance(value, Tool) else str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
