"""Which step lost an episode? Every state is gone back to, and somebody goes on from there.

Who goes on is the *oracle*, which has the task's reference actions
(`agent_trainers.experimental.diagnose.oracle`), or a policy. The chance that
the outcome flips, state by state, says where the episode was lost: a step is named if the chance
before it was at least half of that at the beginning, and after it stays below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_envs.errors import DataError
from agent_envs.scoring import drop_interval, wilson_interval
from agent_trainers.policies.generation import Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import TextEnv
from agent_trainers.trajectory import StopReason, Trajectory

MAX_TASKS_SEARCHED: Final = 20_000
"""Of an environment, where a file does not say which task an episode is of."""
NEVER_SOLVED: Final = (
    "no continuation succeeds, not even from the first state: whoever goes on cannot solve this "
    "task, so no step can be said to have lost it"
)
NO_STEPS: Final = "no step was taken, so none can have lost it"
BROKE_OFF: Final = "going on from its states broke off: {reason}"
_ENDINGS: Final = (StopReason.ANSWERED, StopReason.TURN_LIMIT)


class StateChance(NamedTuple):
    """How often the outcome flips if somebody goes on from a state."""

    num_tried: int
    """Continuations that could be scored."""
    num_flipped: int
    """How many of them succeeded."""
    chance: float
    """The chance of success."""
    low: float
    """Lower end of its 95 % interval; that of the oracle is exact."""
    high: float
    """Upper end."""
    actions: tuple[str, ...] = ()
    """What led to success from here, if anything did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where an episode was lost."""

    trajectory: Trajectory
    """The episode."""
    states: Sequence[StateChance] = ()
    """The state before each step, shape (S,)."""
    lost_step: int | None = None
    """The step that lost it, from 0; None where none can be named, and `note` says why."""
    drop: tuple[float, float, float] | None = None
    """By how much that step lowered the chance, and the 95 % interval of it."""
    note: str = ""
    """What there is to say besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnoses:
    """Where episodes were lost, and what it took to find out."""

    episodes: list[Diagnosis]
    """One for each episode, in order."""
    environment_steps: int
    """Steps that were taken, those that only led to a state included."""
    usage: Usage = field(default_factory=Usage)
    """What was asked of the policy that went on; nothing where the oracle did."""


def diagnose_by_policy(
    make_env: Callable[[], TextEnv],
    policy: Policy,
    trajectories: Sequence[Trajectory],
    *,
    k: int,
    rng: np.random.Generator,
) -> Diagnoses:
    """Let a policy go on `k` times from every state of episodes that failed.

    The chances of an episode have Wilson's intervals. For naming a step they are smoothed to what
    never rises (isotonic regression), so that the noise of single states names none.

    Raises:
        SnapshotError: If no state can be reached again.
    """
    states = [(episode, t) for episode in trajectories for t in range(len(episode.transitions))]
    rollout = Rollout(make_env, policy)
    try:
        branches = rollout.branch_many(states, k, rng=rng)
    finally:
        rollout.close()
    played = iter(branches.continuations)
    return Diagnoses(
        episodes=[
            _by_policy(episode, [next(played) for _ in episode.transitions])
            for episode in trajectories
        ],
        environment_steps=branches.num_steps,
        usage=branches.usage,
    )


def name_lost_step(chances: Sequence[float], weights: Sequence[int]) -> int | None:
    """Return the step after which success is rare, from 0; None if it never was possible.

    The last step before which the chance is still at least half of that at the beginning, of
    chances smoothed to never rise. After the last step it is 0: the episode has failed.

    Args:
        chances: That the outcome flips, from the state before each step, shape (S,).
        weights: How many continuations each is of, shape (S,).
    """
    smooth = _never_rising(chances, weights)
    if not smooth or smooth[0] <= 0.0:
        return None
    return max(t for t, chance in enumerate(smooth) if chance >= smooth[0] / 2)


def find_start(env: TextEnv, trajectory: Trajectory) -> Trajectory:
    """Return an episode with its task's number and seed, where the file does not say them.

    Looks for the task by its id, and compares the first state.

    Raises:
        DataError: If the environment has no such task.
    """
    if trajectory.seed is not None or not trajectory.transitions:
        return trajectory
    first = list(trajectory.transitions[0].messages)
    likely = (trajectory.group_id, trajectory.task_id.rpartition("-")[2])
    num_tasks = getattr(env.unwrapped, "num_tasks", None) or 0
    numbers = [int(text) for text in likely if text.isascii() and text.isdigit()]
    for number in (*numbers, *range(min(num_tasks, MAX_TASKS_SEARCHED))):
        try:
            _, info = resolve(env.reset(seed=number, options={"task": number}))
        except Exception:  # noqa: BLE001, S112 - no task's number, or of a task that breaks
            continue
        if str(info.get("task_id")) == trajectory.task_id and list(info["messages"]) == first:
            return replace(trajectory, task=number, seed=number)
    raise DataError(
        f"task {trajectory.task_id!r}: the file does not say with which seed it was played, and "
        "the environment has no task of that id that begins in the same way. Is it the "
        "environment, with the arguments, in which the episodes were played?"
    )


def _by_policy(trajectory: Trajectory, played: Sequence[Sequence[Trajectory]]) -> Diagnosis:
    states = []
    for branches in played:
        scored = [branch for branch in branches if branch.is_scorable]
        if not scored:
            reason = last_line(branches[0]) if branches else "nothing was played"
            return give_up(trajectory, reason)
        flipped = [branch for branch in scored if is_won(branch)]
        chance = len(flipped) / len(scored)
        shown = own_actions(flipped[0]) if flipped else ()
        interval = wilson_interval(chance, len(scored))
        states.append(StateChance(len(scored), len(flipped), chance, *interval, shown))
    return conclude(trajectory, states)


def conclude(trajectory: Trajectory, states: Sequence[StateChance]) -> Diagnosis:
    """Name the step that lost an episode by the chances from its states."""
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
    """Return what is said of an episode from whose states nobody could go on."""
    return Diagnosis(trajectory=trajectory, note=BROKE_OFF.format(reason=reason))


def is_won(branch: Trajectory) -> bool:
    """Return whether a continuation came to an end of its own, and succeeded."""
    return branch.success and branch.stop_reason in _ENDINGS


def own_actions(branch: Trajectory) -> tuple[str, ...]:
    """Return what was done from the state on in which a branch begins."""
    return tuple(transition.action for transition in branch.transitions[branch.start :])


def last_line(branch: Trajectory) -> str:
    """Return why a branch broke off."""
    return (branch.error or str(branch.stop_reason)).strip().splitlines()[-1]


def _never_rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the least-squares fit that never rises (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, float(weight), 1))
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (a, v, n), (b, w, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * v + b * w) / (v + w), v + w, n + m))
    return [mean for mean, _, count in blocks for _ in range(count)]
