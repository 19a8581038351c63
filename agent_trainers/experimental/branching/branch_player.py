"""Branches of a batch's episodes: which states go on more than once, and what became of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.experimental.branching.branch_estimators import allocate_branches
from agent_trainers.experimental.branching.branches import Branches, RecordedState
from agent_trainers.monitoring.episode_statistics import summarise
from agent_trainers.rollout.collector import Collector
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trainers.distributed import ProcessGroup
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trajectory import Trajectory

NUM_ROUNDS: Final = 2
"""The first round's branches show where returns vary, the second go there."""
_BRANCH_DRAWS: Final = 2
"""Sets the draws of branches apart from those of episodes, whose second number is 0 or 1."""


class BranchPlayer:
    """Plays a batch with branches; all processes play theirs at the same time."""

    def __init__(self, args: StepGRPOConfig, processes: ProcessGroup, rollout: Collector) -> None:
        """Play in `rollout`.

        Raises:
            ConfigurationError: If it cannot branch.
        """
        if not hasattr(rollout, "branch_many"):
            raise ConfigurationError(
                f"advantage_estimator={args.advantage_estimator!r} goes back to states of an "
                "environment, and what is played here has none to go back to. Train in an "
                "environment, or choose another estimator, such as grpo_step."
            )
        self._args, self._processes = args, processes
        self._from_branches = args.trains_branches
        self._rollout: Any = rollout
        self.replayed_steps = 0
        """Recorded steps that all processes took again to reach the last batch's states."""
        self._reached: set[str] = set()
        """Environments that were gone back to."""

    def play(
        self,
        specs: Sequence[EpisodeSpec],
        step: tuple[int, int],
        reward_factors: Mapping[str, float] | None,
    ) -> list[Trajectory]:
        """Play an episode for each spec, and branches of these; each is followed by its own.

        Branches begin where returns vary, of rewards as the estimator sees them: their terms times
        `reward_factors`. Which states are branched and what branches draw depends on the place in
        the run and on the batch of all processes, not on their number.
        """
        self._rollout.keeps_states = True
        families = [[trajectory] for trajectory in self._rollout.collect(specs)]
        self.replayed_steps = 0
        for number in range(NUM_ROUNDS):
            is_last = number == NUM_ROUNDS - 1
            self._rollout.keeps_states = self._from_branches and not is_last
            self._add_branches(families, step, number, reward_factors)
        return [trajectory for family in families for trajectory in family]

    def _add_branches(
        self,
        families: list[list[Trajectory]],
        step: tuple[int, int],
        number: int,
        reward_factors: Mapping[str, float] | None,
    ) -> None:
        """Play one round, and add it to the episodes that were branched.

        Raises:
            SnapshotError: If an environment cannot be gone back to.
        """
        own = [trajectory for family in families for trajectory in family]
        told = self._processes.all_gather_objects(
            [(summarise(each, reward_factors), self._rollout.replays(each)) for each in own]
        )
        everyone = [summary for summary, _ in told]
        first = self._processes.num_before(len(own))
        first_family = self._processes.num_before(len(families))
        spent = sum(episode.num_steps - episode.start for episode in everyone if episode.start)
        spent += self.replayed_steps
        played = sum(episode.num_steps for episode in everyone if not episode.start)
        counts = allocate_branches(
            everyone,
            self._args.branch_steps * played * (number + 1) / NUM_ROUNDS - spent,
            gamma=self._args.gamma,
            from_branches=self._from_branches,
            replays=[replays for _, replays in told],
        )[first : first + len(own)]
        states: list[RecordedState] = []
        rngs, ks, owners = [], [], []
        places = [(f, m) for f, family in enumerate(families) for m in range(len(family))]
        for trajectory, (f, m), per_step in zip(own, places, counts, strict=True):
            for t in np.flatnonzero(per_step).tolist():
                place = (self._args.seed, _BRANCH_DRAWS, *step, number, first_family + f, m, t)
                states.append((trajectory, t))
                rngs.append(np.random.default_rng(place))
                ks.append(per_step[t])
                owners.append(f)
        branches: Branches = self._rollout.try_branches(states, ks, rng=rngs)
        self.replayed_steps += sum(self._processes.all_gather(branches.replayed_steps))
        self._refuse_unreachable({trajectory.env for trajectory, _ in states}, branches)
        for f, continuations in zip(owners, branches.continuations, strict=True):
            families[f] += continuations

    def _refuse_unreachable(self, envs: Collection[str], branches: Branches) -> None:
        """Raise in all processes if an environment could never be gone back to in this run.

        One that could before may be out of reach for once, as when a server is.
        """
        refusals = branches.unreachable
        told = self._processes.all_gather_objects(
            [(name, str(refusals[name]) if name in refusals else "") for name in envs]
        )
        self._reached |= {name for name, refusal in told if not refusal}
        for name, refusal in told:
            if name not in self._reached:
                raise SnapshotError(
                    f"advantage_estimator={self._args.advantage_estimator!r} goes back to states, "
                    f"but {refusal} Or choose another estimator, such as grpo_step."
                )
