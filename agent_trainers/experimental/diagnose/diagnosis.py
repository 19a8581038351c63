"""Diagnosis of failed episodes: the step after which the task could hardly be solved any more.

From the state before each step, the oracle (`agent_trainers.experimental.diagnose.oracle`) or a
policy continues. The lost step is the last one before which the chance of success is at least
half of the initial chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_envs.errors import DataError
from agent_envs.scoring import drop_interval, wilson_interval
from agent_trainers.policies.policy import Policy, Usage
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.trajectory import StopReason, Trajectory

MAX_TASKS_SEARCHED: Final = 20_000
"""Largest task index compared with an episode whose file has no task index."""
NEVER_SOLVED: Final = (
    "no continuation succeeds, not even from the first state, so no step can be named"
)
NO_STEPS: Final = "the episode has no steps"
BROKE_OFF: Final = "continuing from its states failed: {reason}"
_ENDINGS: Final = (StopReason.ANSWERED, StopReason.TURN_LIMIT)


class StateChance(NamedTuple):
    """Outcomes of the continuations from a state."""

    num_tried: int
    """Scorable continuations."""
    num_flipped: int
    """Successful ones."""
    chance: float
    """Estimated chance of success."""
    low: float
    """Lower end of the 95 % interval; the oracle's chances are exact."""
    high: float
    """Upper end."""
    actions: tuple[str, ...] = ()
    """Actions of a successful continuation, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of one episode."""

    trajectory: Trajectory
    """The failed episode."""
    states: Sequence[StateChance] = ()
    """The state before each step, shape (S,)."""
    lost_step: int | None = None
    """The lost step, from 0; None if none can be named (see `note`)."""
    drop: tuple[float, float, float] | None = None
    """Drop of the chance at that step, with its 95 % interval."""
    note: str = ""
    """Reason why no step is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnoses:
    """Diagnoses and their cost."""

    episodes: list[Diagnosis]
    """One per episode, in order."""
    environment_steps: int
    """Steps taken, replayed ones included."""
    usage: Usage = field(default_factory=Usage)
    """Usage of the continuing policy; zero for the oracle."""


def diagnose_by_policy(
    make_env: Callable[[], TextEnv],
    policy: Policy,
    trajectories: Sequence[Trajectory],
    *,
    k: int,
    rng: np.random.Generator,
) -> Diagnoses:
    """Continue `k` times by a policy from every state of failed episodes.

    Chances have Wilson intervals. To name a step they are smoothed by isotonic regression, so that
    the noise of a single state names none.

    Raises:
        SnapshotError: If no state can be reached again.
    """
    states = [(episode, t) for episode in trajectories for t in range(len(episode.transitions))]
    rollout = Rollout(make_env, policy)
    try:
        branches = rollout.branch_many(states, k, rng=rng)
    finally:
        rollout.close()
    continuations = iter(branches.continuations)
    return Diagnoses(
        episodes=[
            _by_policy(episode, [next(continuations) for _ in episode.transitions])
            for episode in trajectories
        ],
        environment_steps=branches.num_steps,
        usage=branches.usage,
    )


def name_lost_step(chances: Sequence[float], weights: Sequence[int]) -> int | None:
    """Return the last step, from 0, before which the smoothed chance is half of the first or more.

    Args:
        chances: Chance of success from the state before each step, shape (S,).
        weights: Number of continuations of each, shape (S,).

    Returns:
        None if the first chance is 0.
    """
    smooth = _non_increasing(chances, weights)
    if not smooth or smooth[0] <= 0.0:
        return None
    return max(t for t, chance in enumerate(smooth) if chance >= smooth[0] / 2)


def find_start(env: TextEnv, trajectory: Trajectory) -> Trajectory:
    """Return an episode with task index and seed, found by task id and first state if missing.

    Raises:
        DataError: If the environment has no such task.
    """
    if trajectory.seed is not None or not trajectory.transitions:
        return trajectory
    first = list(trajectory.transitions[0].messages)
    candidates = (trajectory.group_id, trajectory.task_id.rpartition("-")[2])
    num_tasks = getattr(env.unwrapped, "num_tasks", None) or 0
    numbers = [int(text) for text in candidates if text.isascii() and text.isdigit()]
    for number in (*numbers, *range(min(num_tasks, MAX_TASKS_SEARCHED))):
        try:
            _, info = resolve(env.reset(seed=number, options={"task": number}))
        except Exception:  # noqa: BLE001, S112 - no such task, or one that raises
            continue
        if str(info.get("task_id")) == trajectory.task_id and list(info["messages"]) == first:
            return replace(trajectory, task=number, seed=number)
    raise DataError(
        f"task {trajectory.task_id!r}: the file has no seed, and the environment has no task with "
        "this id and first state. Pass the environment and arguments of the recorded episodes."
    )


def _by_policy(trajectory: Trajectory, continuations: Sequence[Sequence[Trajectory]]) -> Diagnosis:
    states = []
    for branches in continuations:
        scored = [branch for branch in branches if branch.is_scorable]
        if not scored:
            reason = last_line(branches[0]) if branches else "there was no continuation"
            return give_up(trajectory, reason)
        flipped = [branch for branch in scored if is_won(branch)]
        chance = len(flipped) / len(scored)
        shown = own_actions(flipped[0]) if flipped else ()
        interval = wilson_interval(chance, len(scored))
        states.append(StateChance(len(scored), len(flipped), chance, *interval, shown))
    return conclude(trajectory, states)


def conclude(trajectory: Trajectory, states: Sequence[StateChance]) -> Diagnosis:
    """Name the lost step by the chances of the states."""
    if not states:
        return Diagnosis(trajectory=trajectory, note=NO_STEPS)
    lost = name_lost_step([s.chance for s in states], [s.num_tried for s in states])
    if lost is None:
        return Diagnosis(trajectory=trajectory, states=states, note=NEVER_SOLVED)
    after = (states[lost + 1] if lost + 1 < len(states) else StateChance(0, 0, 0.0, 0.0, 0.0))[2:5]
    before = states[lost][2:5]
    drop = (before[0] - after[0], *drop_interval(before, after))
    return Diagnosis(trajectory=trajectory, states=states, lost_step=lost, drop=drop)


def give_up(trajectory: Trajectory, reason: str) -> Diagnosis:
    """Return the diagnosis of an episode whose states cannot be continued."""
    return Diagnosis(trajectory=trajectory, note=BROKE_OFF.format(reason=reason))


def is_won(branch: Trajectory) -> bool:
    """Return whether a continuation ended regularly with success."""
    return branch.success and branch.stop_reason in _ENDINGS


def own_actions(branch: Trajectory) -> tuple[str, ...]:
    """Return the actions of a branch from its first state on."""
    return tuple(transition.action for transition in branch.transitions[branch.start :])


def last_line(branch: Trajectory) -> str:
    """Return the last line of a branch's error, or its stop reason."""
    return (branch.error or str(branch.stop_reason)).strip().splitlines()[-1]


def _non_increasing(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the non-increasing least-squares fit (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, float(weight), 1))
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (a, v, n), (b, w, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * v + b * w) / (v + w), v + w, n + m))
    return [mean for mean, _, count in blocks for _ in range(count)]
