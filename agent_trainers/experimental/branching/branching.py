"""`Branching`: training batches with branches from some states of their episodes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.algorithms.advantages import find_estimator
from agent_trainers.experimental.branching.branch_estimators import allocate_branches
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.rollout.branches import RecordedState
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory

NUM_ROUNDS: Final = 2
"""Branches of the first round show where returns vary; those of the second go there."""
_BRANCH_DRAWS: Final = 2
"""Separates the random draws of branches from those of episodes, whose second number is 0 or 1."""


class Branching(Extension):
    """Collects training batches with branches; all processes collect theirs at the same time."""

    def __init__(self, budget: float = 1 / 3) -> None:
        """Allow `budget` environment steps of branches, without replays, per step of episodes.

        Raises:
            ConfigurationError: If `budget` is negative or not finite.
        """
        if not 0 <= budget < float("inf"):
            raise ConfigurationError(f"budget must be a number of at least 0, not {budget}.")
        self._budget = budget
        self._reaches_states = False

    def attach(self, trainer: Any) -> None:
        """Take part in the run of `trainer`."""
        args, name = trainer.args, trainer.args.advantage_estimator
        self._trains_branches = bool(getattr(find_estimator(name), "trains_branches", False))
        rollout = trainer.rollouts.collectors["train"]
        problem = None
        if not hasattr(rollout, "branch_many"):
            problem = "Branching restores states of an environment, which programs do not have."
        elif not getattr(find_estimator(name), "uses_branches", False):
            problem = f"Branching does nothing with advantage_estimator={name!r}."
        elif args.max_extra_groups:
            problem = f"{name!r} compares states, not groups: leave out max_extra_groups."
        if problem is not None:
            raise ConfigurationError(
                f"{problem} Or use another advantage_estimator: "
                "agent_trainers.experimental.branching:tree, or grpo_step without Branching."
            )
        super().attach(trainer)
        self._rollout = rollout

    def is_trained(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory is an episode, or a branch that is trained, too."""
        return trajectory.start == 0 or self._trains_branches

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> list[Trajectory]:
        """Collect an episode for each spec, each followed by its branches.

        They depend on the place in the run and the batch of all processes, not on their number.
        """
        families = [[trajectory] for trajectory in self._rollout.collect(specs)]
        for number in range(NUM_ROUNDS):
            self._add_branches(families, step, number, reward_factors)
        return [trajectory for family in families for trajectory in family]

    def _add_branches(
        self,
        families: list[list[Trajectory]],
        step: tuple[int, int],
        number: int,
        reward_factors: Mapping[str, float],
    ) -> None:
        """Run one round of branches and append them to the families of their episodes.

        Raises:
            SnapshotError: In all processes, if no state was reached in this run.
        """
        processes, args = self.trainer.processes, self.trainer.args
        own = [trajectory for family in families for trajectory in family]
        everyone = processes.all_gather_objects([summarise(each, reward_factors) for each in own])
        first, first_family = processes.num_before(len(own)), processes.num_before(len(families))
        spent = sum(episode.num_steps - episode.start for episode in everyone if episode.start)
        num_steps = sum(episode.num_steps for episode in everyone if not episode.start)
        counts = allocate_branches(
            everyone,
            self._budget * num_steps * (number + 1) / NUM_ROUNDS - spent,
            gamma=args.gamma,
            from_branches=self._trains_branches,
        )[first : first + len(own)]
        states: list[RecordedState] = []
        rngs, ks, owners = [], [], []
        places = [(f, m) for f, family in enumerate(families) for m in range(len(family))]
        for trajectory, (f, m), per_step in zip(own, places, counts, strict=True):
            for t in np.flatnonzero(per_step).tolist():
                place = (args.seed, _BRANCH_DRAWS, *step, number, first_family + f, m, t)
                states.append((trajectory, t))
                rngs.append(np.random.default_rng(place))
                ks.append(per_step[t])
                owners.append(families[f])
        found, refusal = None, ""
        try:
            found = self._rollout.branch_many(states, ks, rng=rngs)
        except SnapshotError as error:
            refusal = str(error)
        refusals = processes.all_gather_objects([refusal] if states else [])
        self._reaches_states |= "" in refusals
        if refusals and not self._reaches_states:
            raise SnapshotError(
                f"advantage_estimator={args.advantage_estimator!r} restores states, but: "
                f"{refusals[0]} Or use another estimator, such as grpo_step."
            )
        if found is not None:
            for family, continuations in zip(owners, found.continuations, strict=True):
                family += continuations
