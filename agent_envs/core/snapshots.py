"""Snapshots of environments.

The state of an environment is what `reset` and `step` may change: its attributes. A class lists in
``not_in_snapshots`` those that the constructor makes and no step changes: data sets, search
engines, sandboxes, connections. State elsewhere, in objects whose methods are tools, or state that
cannot be pickled, is not copied: the snapshot holds the episode's start and actions, and `restore`
replays them.
"""

import io
import json
import pickle
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
    shared: tuple[Any, ...] = field(default=(), repr=False)
    """Immutable values of the state, such as folders, which all snapshots of a process share."""


@dataclass(slots=True)
class Record:
    """Start, actions and results of an episode, for its replay."""

    random_state: Mapping[str, Any]
    """State of the random generator at the reset."""
    task: int | None
    max_turns: int | None
    """Turn limit, on which rewards may depend."""
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
    a subclass adds its own."""
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
            if self._has_state_elsewhere():
                raise TypeError("a tool keeps its state outside of the environment")
            file = io.BytesIO()
            pickler = _Pickler(file)
            pickler.env, pickler.shared = self, []
            pickler.dump(self._saved_attributes())
            return Snapshot(
                environment=self._identity, state=file.getvalue(), shared=tuple(pickler.shared)
            )
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
            self._load_state(snapshot)
            self._resume(is_replayed=False)
            self._load_state(snapshot)  # on_restore() may have offered other tools
            return
        record: Record = pickle.loads(snapshot.state)  # noqa: S301 - see Snapshot
        self.np_random.bit_generator.state = record.random_state
        for _ in replay(
            self, None, record.task, record.actions,
            observations=record.observations, rewards=record.rewards,
        ):  # fmt: skip
            self.max_turns = record.max_turns
        self._resume(is_replayed=True)

    def _has_state_elsewhere(self) -> bool:
        """Return whether a tool may keep state that is not in attributes of the environment."""
        return False

    def _resume(self, *, is_replayed: bool) -> None:
        """Set what a snapshot, or a replay, leaves out."""

    def _saved_attributes(self) -> dict[str, Any]:
        kinds = type(self).__mro__
        left_out = frozenset().union(*(vars(k).get("not_in_snapshots", ()) for k in kinds))
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def _load_state(self, snapshot: Snapshot) -> None:
        unpickler = _Unpickler(io.BytesIO(snapshot.state))
        unpickler.env, unpickler.shared = self, snapshot.shared
        attributes = unpickler.load()
        for name in self._saved_attributes().keys() - attributes.keys():
            del vars(self)[name]
        vars(self).update(attributes)

    @property
    def _identity(self) -> str:
        """Id, class and arguments of the environment, the same in every process."""
        shown = {name: value for name, value in self._made_with.items() if name != "render_mode"}
        arguments = json.dumps(shown, default=_describe_object, sort_keys=True)
        id = self.spec.id if self.spec else "the class"
        return f"{id} ({_describe_object(type(self))}) {arguments}"


class _Pickler(pickle.Pickler):
    """Leaves out shared values, and the environment itself, to which attributes may refer."""

    env: RestorableEnv
    shared: list[Any]

    def persistent_id(self, obj: Any) -> int | None:
        if obj is self.env:
            return -1
        if not getattr(type(obj), "is_shared_by_snapshots", False):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    env: RestorableEnv
    shared: tuple[Any, ...]

    def persistent_load(self, pid: Any) -> Any:
        return self.env if pid < 0 else self.shared[pid]


def _describe_object(value: Any) -> Any:
    """Return what is the same for equal arguments, in any process."""
    if isinstance(value, Tool | PurePath):
        return value.schema if isinstance(value, Tool) else str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
