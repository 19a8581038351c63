"""Snapshots of environments, by which branches return to states without a replay.

A state is identified by environment, task, seed and actions, and by its messages in case an
environment is not deterministic.
"""

import hashlib
import json
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from agent_envs.core.messages import Message
from agent_envs.wrappers.awaited import Awaited
from agent_envs.wrappers.potential_shaping import PotentialShaping
from agent_trainers.rollout.episode import Episode, EpisodeSpec
from agent_trainers.trajectory import Trajectory

MAX_STATE_BYTES: Final = 2**28
"""Default bound of a store; dropped states are reached by replay."""
_WRAPPER_STATE: Final[Mapping[type, tuple[str, ...]]] = {
    OrderEnforcing: ("_has_reset",),
    TimeLimit: ("_elapsed_steps",),
    PassiveEnvChecker: (),
    Awaited: (),
    PotentialShaping: (),
}
"""Attributes of a wrapper that steps change. A state under any other wrapper is reached by replay:
a snapshot holds the inner environment alone."""


class StateStore:
    """Snapshots by the actions that led to them; drops those used longest ago. Thread-safe.

    Implements `agent_trainers.rollout.episode.StateCache`.
    """

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        """Keep at most `max_bytes` of snapshots."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._states: OrderedDict[str, tuple[bytes, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def save(
        self,
        env: gym.Env[Any, Any],
        spec: EpisodeSpec,
        actions: Sequence[str],
        info: dict[str, Any],
    ) -> None:
        """Save the state that `actions` led to, if a snapshot can hold it."""
        if not can_be_saved(env):
            return
        key, saved = _key(spec, actions, info["messages"]), save_environment(env)
        with self._lock:
            if (replaced := self._states.pop(key, None)) is not None:
                self._num_bytes -= len(replaced[0])
            self._states[key] = saved, info
            self._num_bytes += len(saved)
            while self._num_bytes > self._max_bytes:
                _, dropped = self._states.popitem(last=False)
                self._num_bytes -= len(dropped[0])

    def restore(
        self, env: gym.Env[Any, Any], trajectory: Trajectory, step: int
    ) -> dict[str, Any] | None:
        """Restore the state before `step` and return its info; None if it is not saved."""
        key = key_before(trajectory, step)
        with self._lock:
            if key not in self._states:
                return None
            self._states.move_to_end(key)
            saved, info = self._states[key]
        restore_environment(env, saved)
        return info

    def replays(self, trajectory: Trajectory) -> bool:
        """Return whether branches of an episode have to replay its steps.

        Its second state decides: it is dropped before all later ones.
        """
        step = trajectory.start + 1
        is_there = step < len(trajectory.transitions)
        return is_there and key_before(trajectory, step) not in self._states

    def clear(self) -> None:
        """Drop all states."""
        with self._lock:
            self._states.clear()
            self._num_bytes = 0


class LastState:
    """Snapshot of the newest state of one episode; a `StateCache` that restores nothing itself."""

    def __init__(self) -> None:
        """Start without a snapshot."""
        self.saved: bytes | None = None

    def save(
        self,
        env: gym.Env[Any, Any],
        spec: EpisodeSpec,
        actions: Sequence[str],
        info: dict[str, Any],
    ) -> None:
        """Save the state."""
        self.saved = None
        if can_be_saved(env):
            self.saved = save_environment(env)

    def restore(
        self, env: gym.Env[Any, Any], trajectory: Trajectory, step: int
    ) -> dict[str, Any] | None:
        """Return None."""

    def clear(self) -> None:
        """Drop the snapshot."""
        self.saved = None


def saved_state(episode: Episode) -> bytes | None:
    """Return the snapshot of an episode's `LastState`; None without one."""
    return episode.states.saved if isinstance(episode.states, LastState) else None


def key_before(trajectory: Trajectory, step: int) -> str:
    """Return the key of the state before a step."""
    actions = [transition.action for transition in trajectory.transitions[:step]]
    return _key(trajectory, actions, trajectory.transitions[step].messages)


def _key(start: Any, actions: Sequence[str], messages: Sequence[Message]) -> str:
    """Return the key of a state: its start, the actions that led there and its messages."""
    parts = [start.env, start.task, start.seed, list(actions), list(messages)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def can_be_saved(env: gym.Env[Any, Any]) -> bool:
    """Return whether a snapshot of an environment is all of it."""
    methods = (getattr(env.unwrapped, name, None) for name in ("snapshot", "restore"))
    return all(map(callable, methods)) and all(type(w) in _WRAPPER_STATE for w in _wrappers(env))


def save_environment(env: gym.Env[Any, Any]) -> bytes:
    """Save where an environment is; one for which `can_be_saved`."""
    counts = [
        {name: getattr(wrapper, name) for name in _WRAPPER_STATE[type(wrapper)]}
        for wrapper in _wrappers(env)
    ]
    return pickle.dumps((env.unwrapped.snapshot(), counts))  # type: ignore[attr-defined]


def restore_environment(env: gym.Env[Any, Any], saved: bytes) -> None:
    """Go on from where `save_environment` was called, in an environment made in the same way."""
    snapshot, counts = pickle.loads(saved)  # noqa: S301 - saved by this process
    env.unwrapped.restore(snapshot)  # type: ignore[attr-defined]
    for wrapper, values in zip(_wrappers(env), counts, strict=True):
        for name, value in values.items():
            setattr(wrapper, name, value)


def _wrappers(env: gym.Env[Any, Any]) -> list[gym.Wrapper[Any, Any, Any, Any]]:
    wrappers = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(env)
        env = env.env
    return wrappers
