"""Branches: new continuations of a recorded episode from one of its states.

A branch runs in its own environment, which is brought to the state by a replay of the recorded
actions. Its trajectory begins with the recorded steps, so it can be replayed, branched and saved
like any other.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_envs.errors import ConfigurationError, ReplayError, SnapshotError
from agent_trainers.policies.policy import Policy, Usage
from agent_trainers.rollout.environments import lend_tokenizer, read_reset
from agent_trainers.rollout.episode import Episode, EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

RecordedState = tuple[Trajectory, int]
"""An episode and a step: the state before that step."""
Rngs = np.random.Generator | Sequence[np.random.Generator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Branches from recorded states, and their cost."""

    continuations: list[list[Trajectory]]
    """Branches of each state, in order, failed ones included; ``start`` is their first own step."""
    usage: Usage
    """Model calls and tokens of the branches."""

    @property
    def environment_steps(self) -> int:
        """Steps of the branches themselves."""
        return sum(len(b.transitions) - b.start for same in self.continuations for b in same)

    def returns(self, gamma: float = 1.0) -> list[list[float]]:
        """Return the discounted return of each scorable branch from its state."""
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
    """An episode that continues from a recorded state."""

    recorded: Trajectory = field(kw_only=True)
    """The episode it branches off."""
    policy: Policy = field(kw_only=True)
    """Policy whose tokens the environment counts in."""
    refusal: SnapshotError | None = None
    """Why the state cannot be reached."""

    def __post_init__(self) -> None:
        """Copy the steps before the state."""
        self.transitions = list(self.recorded.transitions[: self.start])

    def reset(self, timeout: float | None = None) -> Any:
        """Bring the environment to the recorded state by its actions.

        Raises:
            SnapshotError: If it reaches another state.
        """
        for number, step in enumerate(self.recorded.replay(self.env, self.start, timeout)):
            if number == 0:
                lend_tokenizer(self.policy, self.env, read_reset((step.observation, step.info)))
            if step.is_over:
                raise ReplayError(
                    f"{type(self.env.unwrapped).__name__}, task {self.spec.task}: the episode is "
                    f"over after {number} actions, the recorded one is not."
                )
        return step.observation, step.info

    def fail(self, error: BaseException, reason: StopReason | None = None) -> None:
        """End with an error, and remember whether the state was unreachable."""
        if isinstance(error, SnapshotError):
            self.refusal = error
        Episode.fail(self, error, reason)

    def trajectory(self) -> Trajectory:
        """Return the recorded steps followed by the new ones."""
        own = Episode.trajectory(self)
        seconds = self.recorded.step_seconds[: self.start]
        seconds = [*seconds, *self.step_seconds[1 : 1 + len(self.transitions) - self.start]]
        return dataclasses.replace(own, step_seconds=seconds, task_id=self.recorded.task_id)


def plan_branches(
    states: Sequence[RecordedState], k: int | Sequence[int], *, rng: Rngs, policy: Policy
) -> list[list[BranchEpisode]]:
    """Return the branches of each state.

    Raises:
        ConfigurationError: If a state cannot be branched; names it and the reason.
    """
    ks = [k] * len(states) if isinstance(k, int) else k
    rngs = rng.spawn(len(states)) if isinstance(rng, np.random.Generator) else rng
    number = itertools.count()
    planned = []
    for (recorded, step), count, own in zip(states, ks, rngs, strict=True):
        problem, num_steps = None, len(recorded.transitions)
        if not 0 <= step < num_steps:
            problem = f"has no state before step {step}: its steps are 0 to {num_steps - 1}"
        elif recorded.seed is None:
            problem = "cannot be branched: it has no seed to replay it from, as that of a program"
        if problem is not None or recorded.seed is None:
            raise ConfigurationError(
                f"The trajectory of task {recorded.task_id!r} in group {recorded.group_id!r} "
                f"{problem}."
            )
        start = EpisodeSpec(
            task=recorded.task, seed=recorded.seed, group_id=recorded.group_id,
            rng=own, env=recorded.env,
        )  # fmt: skip
        planned.append(
            [
                BranchEpisode(next(number), dataclasses.replace(start, rng=draws), start=step,
                               recorded=recorded, policy=policy)
                for draws in own.spawn(count)
            ]
        )  # fmt: skip
    return planned
