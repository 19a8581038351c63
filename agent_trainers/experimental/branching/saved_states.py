"""States of environments, kept so that episodes can go on from them.

By the contract a state follows from environment, task, seed and actions, so these are what it is
found by; with them what it shows, for environments that keep no such contract.
"""

import hashlib
import json
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from agent_envs.core.async_bridge import resolve
from agent_envs.core.messages import Message
from agent_envs.errors import SnapshotError
from agent_envs.wrappers.awaited import Awaited
from agent_envs.wrappers.potential_shaping import PotentialShaping
from agent_trainers.rollout.answers import read_step
from agent_trainers.trajectory import Trajectory, Transition

MAX_STATE_BYTES: Final = 2**28
"""So much is kept at most; what was used longest ago goes first, and is reached by replay then."""
_WRAPPER_STATE: Final[Mapping[type, tuple[str, ...]]] = {
    OrderEnforcing: ("_has_reset",),
    TimeLimit: ("_elapsed_steps",),
    PassiveEnvChecker: (),
    Awaited: (),
    PotentialShaping: (),
}
"""What steps change in a wrapper. A snapshot is of the environment alone, so where another wrapper
is around it, a state is reached by replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Where an environment was, and what it showed there."""

    environment: bytes
    """The snapshot, and the counts of its wrappers; pickled."""
    info: dict[str, Any]
    """What `reset` or `step` returned there."""


class StateStore:
    """Saved states by what led to them; those used longest ago are dropped for new ones.

    Threads may share it.
    """

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        """Keep at most `max_bytes` of snapshots."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._states: OrderedDict[str, SavedState] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        """Return whether the state is kept."""
        return key in self._states

    def put(self, key: str, state: SavedState) -> None:
        """Keep a state."""
        with self._lock:
            if (replaced := self._states.pop(key, None)) is not None:
                self._num_bytes -= len(replaced.environment)
            self._states[key] = state
            self._num_bytes += len(state.environment)
            while self._num_bytes > self._max_bytes:
                _, dropped = self._states.popitem(last=False)
                self._num_bytes -= len(dropped.environment)

    def get(self, key: str) -> SavedState | None:
        """Return a state that is kept; None where there is none."""
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
            return self._states.get(key)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._states.clear()
            self._num_bytes = 0


def state_key(
    env: str,
    task: int | None,
    seed: int | None,
    actions: Sequence[str],
    messages: Sequence[Message],
) -> str:
    """Return what a state is found by: where and how it is reached, and what it shows."""
    text = _text([env, task, seed, list(actions), list(messages)])
    return hashlib.sha256(text.encode()).hexdigest()


def key_before(trajectory: Trajectory, step: int) -> str:
    """Return the key of the state before a step."""
    actions = [transition.action for transition in trajectory.transitions[:step]]
    messages = trajectory.transitions[step].messages
    return state_key(trajectory.env, trajectory.task, trajectory.seed, actions, messages)


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


def replay(
    env: gym.Env[Any, Any],
    info: dict[str, Any],
    recorded: Sequence[Transition],
    goal: Sequence[Message],
    *,
    task: int | None,
    timeout: float | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Take recorded steps again; yield each state's number and what is shown there.

    Args:
        env: An environment that has just been reset.
        info: What `reset` said.
        recorded: The steps.
        goal: What is shown after the last.
        task: The index of the task, to be named.
        timeout: After so many seconds what has to be awaited is cancelled.

    Raises:
        SnapshotError: If something else comes of it than was recorded; says what, at which step.
    """
    for t, transition in enumerate(recorded):
        _expect_same(env, task, t, "shows", info["messages"], transition.messages)
        yield t, info
        answer = read_step(resolve(env.step(transition.action), timeout))
        _expect_same(env, task, t, "gives the reward", answer.reward, transition.reward)
        is_over = answer.terminated or answer.truncated
        _expect_same(env, task, t, "says whether it is over", is_over, False)
        info = answer.info
    _expect_same(env, task, len(recorded), "shows", info["messages"], goal)
    yield len(recorded), info


def _expect_same(
    env: gym.Env[Any, Any], task: int | None, step: int, what: str, found: Any, recorded: Any
) -> None:
    """Refuse a replay that comes to something else than was recorded."""
    if _text(found) == _text(recorded):
        return
    no_snapshot = "" if can_be_saved(env) else " and offers no snapshot() and restore()"
    raise SnapshotError(
        f"{type(env.unwrapped).__name__} cannot be branched: with the same task ({task}), seed and "
        f"actions it {what} something else at step {step}{no_snapshot}. It shows or gives "
        f"{_text(found)[-300:]}; recorded was {_text(recorded)[-300:]}. Make it as it was made "
        "then, and deterministic, or let it offer snapshots and let the rollout keep them "
        "(keeps_states=True)."
    )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _wrappers(env: gym.Env[Any, Any]) -> list[gym.Wrapper[Any, Any, Any, Any]]:
    wrappers = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(env)
        env = env.env
    return wrappers
