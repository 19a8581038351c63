"""Replay of recorded actions: the one way back to a state that no snapshot holds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from agent_envs.core.async_bridge import resolve
from agent_envs.errors import ReplayError


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Results of `reset` (the first one) or of one `step`."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def is_over(self) -> bool:
        """Whether the episode ended with this step."""
        return bool(self.terminated or self.truncated)


def replay(
    env: gym.Env[Any, Any],
    seed: int | None,
    task: int | None,
    actions: Sequence[Any],
    *,
    observations: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    messages: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    timeout: float | None = None,
) -> Iterator[ReplayedStep]:
    """Reset `env` and take recorded actions again; yield the reset, then each step, lazily.

    The A `actions` lead from ``reset(seed, task)`` to recorded results, which are compared if they
    are given: A + 1 `observations` and ``info["messages"]``, from the reset on, and A `rewards`.
    `timeout` is that of an async reset or step, in seconds.

    Raises:
        ReplayError: If a result differs from the recorded one, or the episode ends before the last
            action.
    """
    name = type(env.unwrapped).__name__
    options = None if task is None else {"task": task}
    observation, info = resolve(env.reset(seed=seed, options=options), timeout)
    step = ReplayedStep(observation, 0.0, False, False, info)
    for number in range(len(actions) + 1):
        place = f"{name}, task {task}, after {number} of {len(actions)} actions"
        if number > 0:
            if step.is_over:
                raise ReplayError(f"{place}: the episode is over before action {number}.")
            step = ReplayedStep(*resolve(env.step(actions[number - 1]), timeout))
        if observations is not None:
            _check_same(place, "observation", step.observation, observations[number])
        if rewards is not None and number > 0:
            _check_same(place, "reward", step.reward, rewards[number - 1])
        if messages is not None:
            _check_same(place, "messages", step.info.get("messages"), messages[number])
        yield step


def _check_same(place: str, what: str, replayed: Any, recorded: Any) -> None:
    found, expected = (json.dumps(v, sort_keys=True, default=repr) for v in (replayed, recorded))
    if found != expected:
        raise ReplayError(
            f"{place}: the replayed {what} is {found[-300:]}, the recorded one {expected[-300:]}. "
            "Make the environment as it was made then; if it is not deterministic, it needs "
            "snapshot() and restore()."
        )
