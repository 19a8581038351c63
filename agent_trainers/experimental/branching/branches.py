"""Branches: from a recorded state on, other episodes than the one that was recorded.

The state is reached in another environment than the run's own: from a snapshot, or, where an
environment offers none, by taking the recorded actions again from the recorded seed. Each branch is
an episode with the recorded steps before its first own one, so it can be replayed, branched and
saved as any other.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.experimental.branching.saved_states import (
    SavedState,
    StateStore,
    key_before,
    replay,
    restore_environment,
    save_environment,
)
from agent_trainers.policies.generation import Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.answers import read_reset
from agent_trainers.rollout.episode import Episode, EpisodeSpec, lend_tokenizer
from agent_trainers.trajectory import StopReason, Trajectory

RecordedState = tuple[Trajectory, int]
"""An episode, and a step of it: the state before that step."""
Rngs = np.random.Generator | Sequence[np.random.Generator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """What was played from recorded states, and what it cost."""

    continuations: list[list[Trajectory]]
    """For each state, in order, its branches, also those that failed. Each begins with the recorded
    steps; ``start`` says where its own begin."""
    environment_steps: int
    """Steps taken by branches themselves."""
    replayed_steps: int
    """Recorded steps taken again, to reach the states."""
    usage: Usage
    """What the branches asked of the model."""
    unreachable: Mapping[str, SnapshotError]
    """Environments none of whose states could be reached, by name, and why."""

    @property
    def num_steps(self) -> int:
        """All steps that were taken in environments."""
        return self.environment_steps + self.replayed_steps

    def returns(self, gamma: float = 1.0) -> list[list[float]]:
        """Return what each branch that could be scored earned from its state on, discounted."""
        return [
            [
                sum(reward * gamma**i for i, reward in enumerate(branch.rewards[branch.start :]))
                for branch in branches
                if branch.is_scorable
            ]
            for branches in self.continuations
        ]


@dataclass(slots=True)
class BranchEpisode(Episode):
    """An episode that goes on from a recorded state."""

    recorded: Trajectory = field(kw_only=True)
    """The episode it branches off."""
    states: StateStore = field(kw_only=True)
    """Where saved states are found."""
    policy: Policy = field(kw_only=True)
    """Whose tokens the environment counts in."""
    wanted: Collection[int] = ()
    """Steps before which the state is saved on the way."""
    replayed_steps: int = 0
    """How many recorded actions were taken again."""
    refusal: SnapshotError | None = None
    """Why the state cannot be reached."""

    def __post_init__(self) -> None:
        """Take over the steps before the state."""
        self.transitions = list(self.recorded.transitions[: self.start])
        self.num_first_calls = 1 + self.start

    def reset(self, timeout: float | None = None) -> Any:
        """Go back to the recorded state; called where it may take its time.

        Raises:
            SnapshotError: If the environment does not come to that state again.
        """
        try:
            return self._restore() or self._replay(timeout)
        finally:
            self.saved = None  # the state is kept already, or reached as soon again

    def fail(self, error: BaseException, reason: StopReason | None = None) -> None:
        """End because of an error; it is kept."""
        if isinstance(error, SnapshotError):
            self.refusal = error
        Episode.fail(self, error, reason)

    def trajectory(self) -> Trajectory:
        """Return what was played, after what was recorded."""
        own = Episode.trajectory(self)
        seconds = self.recorded.step_seconds[: self.start]
        seconds = [*seconds, *self.step_seconds[1 : 1 + len(self.transitions) - self.start]]
        return dataclasses.replace(own, step_seconds=seconds, task_id=self.recorded.task_id)

    def _restore(self) -> tuple[str, dict[str, Any]] | None:
        """Set the environment back; return None where it takes the long way."""
        state = self.states.get(key_before(self.recorded, self.start))
        if state is None:
            return None
        try:
            restore_environment(self.env, state.environment)
        except Exception:  # noqa: BLE001 - made otherwise than what was saved, or foreign code
            return None
        return "", state.info

    def _replay(self, timeout: float | None) -> tuple[str, dict[str, Any]]:
        """Take the recorded actions again; return what the last of them came to."""
        info = read_reset(Episode.reset(self, timeout))
        lend_tokenizer(self.policy, self.env, info)
        before = self.recorded.transitions[: self.start]
        goal = self.recorded.transitions[self.start].messages
        states = replay(self.env, info, before, goal, task=self.spec.task, timeout=timeout)
        for step, info in states:
            self.replayed_steps = step
            if step in self.wanted:
                self._keep(step, info)
        return "", info

    def _keep(self, step: int, info: dict[str, Any]) -> None:
        saved = save_environment(self.env)
        key = key_before(self.recorded, step)
        self.states.put(key, SavedState(environment=saved, info=info))


@dataclass(slots=True)
class Walk(BranchEpisode):
    """Takes recorded actions again only to save the states on the way."""

    def begin(self, answer: Any) -> None:
        """Be at the goal."""
        BranchEpisode.begin(self, answer)
        self.stop(StopReason.ANSWERED)


def plan_branches(
    states: Sequence[RecordedState],
    k: int | Sequence[int],
    *,
    rng: Rngs,
    store: StateStore,
    policy: Policy,
    keeps_states: bool,
) -> list[list[BranchEpisode]]:
    """Return the branches of each state, which are to be played.

    With `keeps_states` the states they come to are saved in `store`, where they are looked for.

    Raises:
        ConfigurationError: If a state cannot be branched; says which, and why.
    """
    ks = [k] * len(states) if isinstance(k, int) else list(k)
    rngs = rng.spawn(len(states)) if isinstance(rng, np.random.Generator) else list(rng)
    if not len(ks) == len(rngs) == len(states) or min(ks, default=0) < 0:
        raise ConfigurationError(
            f"{len(states)} states need as many counts of branches, none negative, and as many "
            f"generators, or one of each; not {len(ks)} and {len(rngs)}."
        )
    planned: list[list[BranchEpisode]] = []
    number = 0
    for (trajectory, step), count, own in zip(states, ks, rngs, strict=True):
        _check_state(trajectory, step)
        branches = []
        for draws in own.spawn(count):
            spec = _spec(trajectory, draws)
            branch = BranchEpisode(
                number, spec, start=step, recorded=trajectory, states=store, policy=policy
            )
            branch.keeps_states = keeps_states
            branches.append(branch)
            number += 1
        planned.append(branches)
    return planned


def plan_walks(branches: Sequence[BranchEpisode]) -> list[Walk]:
    """Return what saves states that several branches go on from, and that are not saved yet."""
    wanted: dict[int, list[BranchEpisode]] = {}
    for branch in branches:
        is_there = key_before(branch.recorded, branch.start) in branch.states
        if branch.start > 0 and not is_there:
            wanted.setdefault(id(branch.recorded), []).append(branch)
    return [
        Walk(
            number,
            _spec(first.recorded, first.spec.rng),
            start=max(branch.start for branch in same),
            recorded=first.recorded,
            states=first.states,
            policy=first.policy,
            wanted=frozenset(branch.start for branch in same),
        )
        for number, same in enumerate(same for same in wanted.values() if len(same) > 1)
        for first in same[:1]
    ]


def find_unreachable(branches: Sequence[BranchEpisode]) -> dict[str, SnapshotError]:
    """Return the environments none of whose states could be reached, and why."""
    refusals: dict[str, list[SnapshotError | None]] = {}
    for branch in branches:
        refusals.setdefault(branch.spec.env, []).append(branch.refusal)
    return {
        name: found[0]
        for name, found in refusals.items()
        if found[0] is not None and None not in found
    }


def _spec(trajectory: Trajectory, rng: np.random.Generator) -> EpisodeSpec:
    seed = trajectory.seed
    assert seed is not None  # checked before
    return EpisodeSpec(
        task=trajectory.task, seed=seed, group_id=trajectory.group_id, rng=rng, env=trajectory.env
    )


def _check_state(trajectory: Trajectory, step: int) -> None:
    name = f"The trajectory of task {trajectory.task_id!r} in group {trajectory.group_id!r}"
    if not 0 <= step < len(trajectory.transitions):
        raise ConfigurationError(
            f"{name} has no state before step {step}: its steps are 0 to "
            f"{len(trajectory.transitions) - 1}, and after the last it is over."
        )
    if trajectory.seed is None:
        raise ConfigurationError(
            f"{name} cannot be branched: it does not say with which seed it began, so no "
            "environment can be brought to its states. Episodes that Rollout plays say it; those "
            "of programs, demonstrations and older files do not."
        )
