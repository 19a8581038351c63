"""Save where an environment is, and go on from there: `snapshot`, `restore`, pickles and copies.

What a snapshot holds is whatever `reset` and `step` may have changed: every attribute of the
environment, and what its tools hold (`agent_envs.core.tool_state`). What the constructor makes, and
no step changes, is left out where a class names it in ``not_in_snapshots``: data sets, search
engines, sandboxes, connections. So a snapshot is small, and an environment that was made in the
same way has the rest.

A pickle holds the constructor's arguments and the state: unpickling calls the constructor again.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import pickle
from collections.abc import Mapping, Sized
from pathlib import PurePath
from typing import Any, ClassVar, Final, Self

import gymnasium as gym

from agent_envs.core.tool import Tool
from agent_envs.core.tool_state import copy_tools, dump_state, find_culprit, load_state
from agent_envs.errors import SnapshotError

_MAX_ARGUMENT_CHARS: Final = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where an environment was: opaque, small, and can be pickled.

    Like a pickle, it can run code when it is restored: restore none from a stranger.
    """

    environment: str
    """Which environment it is of."""
    arguments: Mapping[str, str] = dataclasses.field(repr=False)
    """How that was made: a text for each argument."""
    state: bytes = dataclasses.field(repr=False)
    """What `reset` and `step` may change, pickled."""


class RestorableEnv(gym.Env[str, str]):
    """An environment whose state can be saved, and that can be pickled and copied."""

    not_in_snapshots: ClassVar[frozenset[str]] = frozenset(
        {"_made_with", "_description", "action_space", "observation_space", "render_mode", "spec"}
    )
    """Attributes that the constructor makes and no step changes, and those that `on_restore` brings
    back; a subclass names its own only. The class of an object whose methods are tools may have it
    as well."""
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the constructor's arguments, with which pickles and copies are made."""
        env = super().__new__(cls)
        env._made_with = (args, kwargs)
        return env

    def snapshot(self) -> Snapshot:
        """Save the state of the environment and of its tools, to go on from it with `restore`.

        Raises:
            SnapshotError: If something cannot be saved; names the attribute or the tool.
        """
        name, arguments = self._description
        return Snapshot(environment=name, arguments=arguments, state=self._dump())

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from where `snapshot` was taken, whatever has been played here.

        Args:
            snapshot: Of an environment that was made with the same arguments, in any process.

        Raises:
            SnapshotError: If it is of another environment, or of other arguments.
        """
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"restore() takes a Snapshot, not {type(snapshot).__name__}.")
        _check_same(snapshot, *self._description)
        self._load(snapshot.state, is_restored=True)

    def _callables_with_state(self) -> Mapping[str, Any]:
        """Return the tools and functions whose state is part of the environment's, by name."""
        return {}

    def _resume(self, *, is_restored: bool) -> None:
        """Bring back what a snapshot leaves out; not `is_restored` in a pickle or a copy."""

    def _dump(self) -> bytes:
        return dump_state(self, self._callables_with_state())

    def _load(self, state: bytes, *, is_restored: bool) -> None:
        callables = self._callables_with_state()
        missing = load_state(self, callables, state)
        self._resume(is_restored=is_restored)
        again = self._callables_with_state()
        if [*map(id, again.values())] != [*map(id, callables.values())]:
            missing = load_state(self, again, state)  # an episode with tools of its own
        if missing:
            raise SnapshotError(
                f"{type(self).__name__}: the snapshot holds the state of what is not here: "
                f"{', '.join(sorted(missing))}. Offer the tools of an episode in on_restore()."
            )

    @functools.cached_property
    def _description(self) -> tuple[str, dict[str, str]]:
        """Name the environment and its arguments, to compare them with those of a snapshot."""
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        args, kwargs = self._made_with
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        given.pop("render_mode", None)  # shows the same episode
        texts = {name: _describe(value) for name, value in given.items()}
        return kind if self.spec is None else self.spec.id, {"class": kind} | texts

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Pickle the constructor's arguments, and the state.

        Raises:
            SnapshotError: If one of them cannot be pickled; names it.
        """
        args, kwargs = self._made_with
        made = {
            "arguments": {str(i): value for i, value in enumerate(args)} | kwargs,
            "spaces": (self.action_space, self.observation_space),
            "spec": self.spec,
        }
        try:
            pickled = pickle.dumps(made)
        except Exception as error:
            place, value = find_culprit(made["arguments"], pickle.dumps)
            raise SnapshotError(
                f"{type(self).__name__} cannot be pickled, because of its argument {place}, of "
                f"type {type(value).__name__}: {error}. Pass what another process can import: "
                "functions and tools of a module's top level, names, paths."
            ) from error
        return _make_again, (type(self), len(args), pickled, self._dump())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the state; what no step changes is shared.

        Raises:
            SnapshotError: If something cannot be saved, as in `snapshot`.
        """
        state, (args, kwargs) = self._dump(), self._made_with
        if kwargs.get("tools"):
            kwargs = kwargs | {"tools": copy_tools(kwargs["tools"])}
        env = memo[id(self)] = type(self)(*args, **kwargs)
        env.spec = self.spec
        env.action_space = copy.deepcopy(self.action_space, memo)
        env.observation_space = copy.deepcopy(self.observation_space, memo)
        env._load(state, is_restored=False)
        return env


def _make_again(
    kind: type[RestorableEnv], num_positional: int, pickled: bytes, state: bytes
) -> RestorableEnv:
    """Unpickle an environment."""
    made = pickle.loads(pickled)  # noqa: S301 - a part of the pickle that is being loaded
    given = list(made["arguments"].items())
    args = [value for _, value in given[:num_positional]]
    env = kind(*args, **dict(given[num_positional:]))
    env.spec, (env.action_space, env.observation_space) = made["spec"], made["spaces"]
    env._load(state, is_restored=False)
    return env


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
        f"{'; '.join(reasons) or 'the ids differ'}. Make the environment as that one was made."
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
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"class": type(value).__qualname__} | fields
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    named = value if hasattr(value, "__qualname__") else type(value)
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"{named.__module__}:{named.__qualname__}{size}"
