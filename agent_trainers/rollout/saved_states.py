"""Snapshots of environments, by which branches return to states without a replay."""

import hashlib
import json
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from agent_envs.core.messages import Message
from agent_envs.wrappers.awaited import Awaited
from agent_envs.wrappers.potential_shaping import PotentialShaping
from agent_trainers.trajectory import Trajectory

if TYPE_CHECKING:
    from agent_trainers.rollout.episode import EpisodeSpec

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
    """Snapshots by state, for use from many threads; the oldest ones are dropped."""

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        """Keep at most `max_bytes` of snapshots."""
        self._max_bytes = max_bytes
        self._states: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def save(
        self,
        env: gym.Env[Any, Any],
        spec: "EpisodeSpec",
        actions: Sequence[str],
        info: dict[str, Any],
    ) -> None:
        """Save the state that `actions` led to, if a snapshot can hold it."""
        methods = (getattr(env.unwrapped, name, None) for name in ("snapshot", "restore"))
        wrappers = _wrappers(env)
        if not (all(map(callable, methods)) and all(type(w) in _WRAPPER_STATE for w in wrappers)):
            return
        values = [{n: getattr(w, n) for n in _WRAPPER_STATE[type(w)]} for w in wrappers]
        saved = pickle.dumps((env.unwrapped.snapshot(), values))  # type: ignore[attr-defined]
        key = _key(spec, actions, info["messages"])
        with self._lock:
            self._num_bytes += len(saved) - len(self._states.pop(key, (b"",))[0])
            self._states[key] = saved, info
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._states.pop(next(iter(self._states)))[0])

    def restore(
        self, env: gym.Env[Any, Any], trajectory: Trajectory, step: int
    ) -> dict[str, Any] | None:
        """Restore the state before `step` and return its info; None if it is not saved."""
        key = key_before(trajectory, step)
        with self._lock:
            if key not in self._states:
                return None
            saved, info = self._states[key]
        snapshot, values = pickle.loads(saved)  # noqa: S301 - saved by this process
        env.unwrapped.restore(snapshot)  # type: ignore[attr-defined]
        for wrapper, attributes in zip(_wrappers(env), values, strict=True):
            vars(wrapper).update(attributes)
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


def key_before(trajectory: Trajectory, step: int) -> str:
    """Return the key of the state before a step."""
    actions = [transition.action for transition in trajectory.transitions[:step]]
    return _key(trajectory, actions, trajectory.transitions[step].messages)


def _key(start: Any, actions: Sequence[str], messages: Sequence[Message]) -> str:
    """Return the key of a state; its messages count where an environment is not deterministic."""
    parts = [start.env, start.task, start.seed, list(actions), list(messages)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _wrappers(env: gym.Env[Any, Any]) -> list[gym.Wrapper[Any, Any, Any, Any]]:
    wrappers = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(env)
        env = env.env
    return wrappers
