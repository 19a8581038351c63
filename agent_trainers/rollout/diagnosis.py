"""Which step lost an episode? Every state is gone back to, and somebody goes on from there.

Who goes on is the *oracle*, which has the task's reference actions, or a policy. The chance that
the outcome flips, state by state, says where the episode was lost: a step is named if the chance
before it was at least half of that at the beginning, and after it stays below.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from agent_envs.core.deadline import call_with_deadline
from agent_envs.core.event_loop import resolve
from agent_envs.errors import ConfigurationError, DataError, SnapshotError
from agent_envs.scoring import drop_interval, wilson_interval
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import TextEnv, is_immediate
from agent_trainers.trajectory import StopReason, Trajectory

MAX_TASKS_SEARCHED: Final = 20_000
"""Of an environment, where a file does not say which task an episode is of."""
MAX_PLANS: Final = 32
"""That the oracle tries at a state: those that begin nearest to what was done in order so far."""
NEVER_SOLVED: Final = (
    "no continuation succeeds, not even from the first state: whoever goes on cannot solve this "
    "task, so no step can be said to have lost it"
)
NO_STEPS: Final = "no step was taken, so none can have lost it"
BROKE_OFF: Final = "going on from its states broke off: {reason}"
STEP_TIMEOUT: Final = 300.0
"""Seconds that a reset or a step may take."""
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


def diagnose_by_oracle(
    make_env: Callable[[], TextEnv], trajectories: Sequence[Trajectory]
) -> list[Diagnosis]:
    """Let the oracle go on from every state of episodes that failed.

    From a state the oracle tries every rest of the reference actions, those that are asked for at
    the state itself, where an environment works them out anew: if one of them succeeds, the state
    can still be won, and so can all before it, by the recorded steps. As an environment plays the
    same actions in the same way, the chance is 0 or 1, without an interval.

    Args:
        make_env: Makes an environment as the episodes were played in.
        trajectories: With `Trajectory.seed`; see `find_start`.

    An episode at which the environment raises or hangs is not diagnosed, and its note says why.

    Raises:
        ConfigurationError: If the environment has no ``reference_actions()``.
        SnapshotError: If no state of any episode can be reached again.
    """
    plans, failures = _plans_of_all(make_env, trajectories)
    policy = _FollowPlans()
    rollout = Rollout(make_env, policy)
    found = [_Found() for _ in trajectories]
    for attempt in range(max((len(p) for own in plans for p in own), default=0)):
        asked = [
            (i, t)
            for i, own in enumerate(plans)
            for t in range(found[i].first_open, len(own))
            if attempt < len(own[t]) and t not in found[i].out_of_reach
        ]
        if not asked:
            continue
        policy.follow([plans[i][t][attempt] for i, t in asked])
        states = [(trajectories[i], t) for i, t in asked]
        try:
            branches = rollout.branch_many(states, 1, rng=np.random.default_rng(0))
        except SnapshotError as error:  # it refuses all that are asked about
            if len({i for i, _ in asked} | failures.keys()) == len(trajectories):
                raise
            for i, t in asked:
                found[i].out_of_reach.add(t)
                found[i].broken[t] = str(error)
            continue
        for (i, t), (branch,) in zip(asked, branches.continuations, strict=True):
            found[i].note(t, branch)
    rollout.close()
    failures = {i: reason for i, each in enumerate(found) if (reason := each.reason)} | failures
    return [
        _failed(trajectory, failures[i]) if i in failures else _by_oracle(trajectory, each.won)
        for i, (trajectory, each) in enumerate(zip(trajectories, found, strict=True))
    ]


def diagnose_by_policy(
    make_env: Callable[[], TextEnv],
    policy: Policy,
    trajectories: Sequence[Trajectory],
    *,
    k: int,
    rng: np.random.Generator,
) -> list[Diagnosis]:
    """Let a policy go on `k` times from every state of episodes that failed.

    The chances of an episode have Wilson's intervals. For naming a step they are smoothed to what
    never rises (isotonic regression), so that the noise of single states names none.

    Raises:
        SnapshotError: If no state can be reached again.
    """
    states = [(episode, t) for episode in trajectories for t in range(len(episode.transitions))]
    rollout = Rollout(make_env, policy)
    try:
        played = iter(rollout.branch_many(states, k, rng=rng).continuations)
    finally:
        rollout.close()
    return [
        _by_policy(episode, [next(played) for _ in episode.transitions]) for episode in trajectories
    ]


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


@dataclass(slots=True)
class _Found:
    """What the oracle came to from the states of an episode."""

    won: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What it did to win, by the steps it did it from."""
    broken: dict[int, str] = field(default_factory=dict)
    """Why it could not go on to an end, by steps."""
    out_of_reach: set[int] = field(default_factory=set)
    """Steps before which the state is not to be tried again."""

    @property
    def first_open(self) -> int:
        """The first step not known to be before the loss: one that wins says so of all before."""
        return max(self.won, default=-1) + 1

    @property
    def reason(self) -> str | None:
        """Why nobody knows where the episode was lost; None if that is known."""
        unknown = [t for t in self.broken if t >= self.first_open]
        return self.broken[min(unknown)] if unknown else None

    def note(self, step: int, branch: Trajectory) -> None:
        """Note a continuation from the state before a step."""
        if branch.is_scorable:
            if _is_won(branch):
                self.won[step] = _own_actions(branch)
            return
        self.broken[step] = _last_line(branch)
        if branch.stop_reason is StopReason.TIMEOUT or SnapshotError.__name__ in self.broken[step]:
            self.out_of_reach.add(step)


class _FollowPlans(Policy):
    """Takes given actions, those of each episode in order, and then ends it."""

    def follow(self, plans: Sequence[Sequence[str]]) -> None:
        """Take these actions in the next episodes, by their numbers."""
        self._left = [iter(plan) for plan in plans]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return the next action of each; an overflow ends an episode that has none left."""
        return [self._next(request.episode_id) for request in requests]

    def _next(self, number: int) -> Generation:
        action = next(self._left[number], None)
        if action is None:
            return Generation(text="", finish_reason="overflow")
        return Generation(text=action)


def _plans_of_all(
    make_env: Callable[[], TextEnv], trajectories: Sequence[Trajectory]
) -> tuple[list[list[list[list[str]]]], dict[int, str]]:
    """Return the plans of each episode, and which have none as the environment failed at them."""
    envs = EnvPool(make_env)
    plans: list[list[list[list[str]]]] = []
    failures: dict[int, str] = {}
    try:
        for i, trajectory in enumerate(trajectories):
            env = envs.take()
            timeout = STEP_TIMEOUT * (1 + len(trajectory.transitions))
            try:
                own = call_with_deadline(
                    functools.partial(_plans, env, trajectory),
                    None if is_immediate(env) else timeout,
                )
            except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; a note says it
                failures[i] = f"{type(error).__name__}: {error}"
                own = []
            else:
                envs.give_back(env)
            if own is None:
                raise ConfigurationError(
                    "The environment has no reference_actions(), so there is no oracle. Give it "
                    "that method, or let a model go on."
                )
            plans.append(own)
        return plans, failures
    finally:
        envs.close()


def _plans(env: TextEnv, trajectory: Trajectory) -> list[list[list[str]]] | None:
    """Return for the state before each step what the oracle tries there, the likeliest first.

    None where the environment has no oracle.
    """
    options = None if trajectory.task is None else {"task": trajectory.task}
    resolve(env.reset(seed=trajectory.seed, options=options))
    if getattr(env.unwrapped, "reference_actions", None) is None:
        return None
    plans, num_done = [], 0
    for transition in trajectory.transitions:
        try:
            reference = list(env.unwrapped.reference_actions())  # type: ignore[attr-defined]
        except NotImplementedError:  # this one task has none
            reference = []
        starts = sorted(range(len(reference)), key=lambda i: abs(i - num_done))
        plans.append([reference[i:] for i in starts[:MAX_PLANS]])
        num_done += num_done < len(reference) and reference[num_done] == transition.action
        _, _, terminated, truncated, _ = resolve(env.step(transition.action))
        if terminated or truncated:
            break
    # a replay that ends too early is refused when the states after are asked for
    plans += [[[]] for _ in trajectory.transitions[len(plans) :]]
    return plans


def _by_oracle(trajectory: Trajectory, won: dict[int, tuple[str, ...]]) -> Diagnosis:
    last = max(won, default=-1)
    recorded = [transition.action for transition in trajectory.transitions]
    states = []
    for t in range(len(recorded)):
        on_the_way = (*recorded[t:last], *won[last]) if t <= last else ()
        chance = float(t <= last)
        actions = won.get(t, on_the_way)
        states.append(StateChance(1, int(chance), chance, chance, chance, actions))
    return _named(trajectory, states)


def _by_policy(trajectory: Trajectory, played: Sequence[Sequence[Trajectory]]) -> Diagnosis:
    states = []
    for branches in played:
        scored = [branch for branch in branches if branch.is_scorable]
        if not scored:
            reason = _last_line(branches[0]) if branches else "nothing was played"
            return _failed(trajectory, reason)
        flipped = [branch for branch in scored if _is_won(branch)]
        chance = len(flipped) / len(scored)
        shown = _own_actions(flipped[0]) if flipped else ()
        interval = wilson_interval(chance, len(scored))
        states.append(StateChance(len(scored), len(flipped), chance, *interval, shown))
    return _named(trajectory, states)


def _named(trajectory: Trajectory, states: Sequence[StateChance]) -> Diagnosis:
    if not states:
        return Diagnosis(trajectory=trajectory, note=NO_STEPS)
    lost = name_lost_step([s.chance for s in states], [s.num_tried for s in states])
    if lost is None:
        return Diagnosis(trajectory=trajectory, states=states, note=NEVER_SOLVED)
    after = (states[lost + 1] if lost + 1 < len(states) else StateChance(0, 0, 0.0, 0.0, 0.0))[2:5]
    before = states[lost][2:5]
    drop = (before[0] - after[0], *drop_interval(before, after))
    return Diagnosis(trajectory=trajectory, states=states, lost_step=lost, drop=drop)


def _failed(trajectory: Trajectory, reason: str) -> Diagnosis:
    return Diagnosis(trajectory=trajectory, note=BROKE_OFF.format(reason=reason))


def _is_won(branch: Trajectory) -> bool:
    """Return whether a continuation came to an end of its own, and succeeded."""
    return branch.success and branch.stop_reason in _ENDINGS


def _own_actions(branch: Trajectory) -> tuple[str, ...]:
    return tuple(transition.action for transition in branch.transitions[branch.start :])


def _last_line(branch: Trajectory) -> str:
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
