"""Collect many episodes at once against one policy, none of which waits for another.

While some episodes wait for their tools, others get their actions. An environment that fails or
hangs ends its own episode, with the error recorded, and is replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from agent_trainers.experimental.branching.branches import (
    BranchEpisode,
    Branches,
    RecordedState,
    Rngs,
    Walk,
    find_unreachable,
    plan_branches,
    plan_walks,
)
from agent_trainers.experimental.branching.saved_states import StateStore, can_be_saved, key_before
from agent_trainers.policies.generation import Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.streams import GenerationStream, WaveStream
from agent_trainers.rollout.collection import Collection
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import Episode, EpisodeSpec, TextEnv, template_tools
from agent_trainers.trajectory import StopReason, Trajectory

MAX_BRANCHES_AT_ONCE: Final = 64
"""So many branches are under way at once; a call may ask for thousands."""

__all__ = ["Collector", "EpisodeSpec", "Rollout", "TextEnv", "template_tools"]


class Collector(Protocol):
    """Plays episodes: in environments (`Rollout`), or by running programs."""

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play one episode per spec; return the trajectories in order, also those that failed."""

    def close(self) -> None:
        """Give back what is kept for the next call."""


class Rollout:
    """Plays episodes; keeps its environments for the next call."""

    def __init__(
        self,
        make_env: Callable[[], TextEnv] | Mapping[str, Callable[[], TextEnv]],
        policy: Policy,
        *,
        step_timeout: float = 300.0,
        episode_timeout: float | None = None,
        group_quorum: float = 1.0,
        is_any_active: Callable[[bool], bool] | None = None,
        keeps_states: bool = False,
    ) -> None:
        """Play `policy` in environments made by `make_env`.

        Args:
            make_env: Makes one environment; called as often as episodes run at once. Or, by name,
                what makes each of several, of which `EpisodeSpec.env` chooses.
            policy: Who acts.
            step_timeout: Seconds that a reset or a step may take. A last resort against an
                environment that hangs; tools have timeouts of their own.
            episode_timeout: Seconds that an episode may take from its reset on; None for no limit.
            group_quorum: Share of each group's episodes, in (0, 1], that has to end without a
                failure: as soon as all groups have it, the rest is left out.
            is_any_active: Told whether this process has something to do, says whether any process
                has. For a policy whose generation is collective; None where it is not.
            keeps_states: Whether snapshots of environments are kept as episodes are played, so that
                `branch` needs no replay; those of the last `collect`, and of branches since then,
                `MAX_STATE_BYTES` at most.
        """
        self._policy = policy
        self._step_timeout = step_timeout
        self._episode_timeout = episode_timeout
        self._group_quorum = group_quorum
        self._is_any_active = is_any_active or bool
        self.keeps_states = keeps_states
        self._envs, self._branch_envs = EnvPool(make_env), EnvPool(make_env)
        self._states = StateStore()

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play one episode per spec; return the trajectories in order, also those that failed.

        `on_end` is told of each as it ends, in no particular order.
        """
        self._states.clear()
        episodes = [
            Episode(i, spec, keeps_states=self.keeps_states) for i, spec in enumerate(specs)
        ]
        self._play(episodes, self._envs, self._policy.open_stream(), on_end, self._group_quorum)
        return [episode.trajectory() for episode in episodes]

    def branch(
        self, trajectory: Trajectory, step: int, k: int, *, rng: np.random.Generator
    ) -> Branches:
        """Go back to the state before `step` of a recorded episode and play `k` other endings.

        See `branch_many`.
        """
        return self.branch_many([(trajectory, step)], k, rng=rng)

    def branch_many(
        self, states: Sequence[RecordedState], k: int | Sequence[int], *, rng: Rngs
    ) -> Branches:
        """Go on from recorded states, all at once, with the policy of this rollout.

        The states are those of episodes in environments made as this rollout makes them: of its
        own, of another policy's, of a file. They are reached from snapshots, in environments that
        only branches are played in; the run that is looked at stays as it was, bit for bit. Where
        an environment offers no snapshot, the recorded actions are taken again for each branch.

        Args:
            states: Episodes and steps; the state before the step is where branches begin.
            k: How many branches each state gets, or how many all get.
            rng: What branches draw from, one generator for each state, or one for all.

        Raises:
            ConfigurationError: If a state cannot be branched, as its trajectory does not say how it
                began.
            SnapshotError: If no state can be reached, since the environment comes to others.
        """
        branches = self.try_branches(states, k, rng=rng)
        played = zip(states, branches.continuations, strict=True)
        asked = {trajectory.env for (trajectory, _), same in played if same}
        if asked and asked == branches.unreachable.keys():
            raise next(iter(branches.unreachable.values()))
        return branches

    def try_branches(
        self, states: Sequence[RecordedState], k: int | Sequence[int], *, rng: Rngs
    ) -> Branches:
        """Go on from recorded states as `branch_many` does, and say which cannot be reached.

        Raises:
            ConfigurationError: As `branch_many`.
        """
        planned = plan_branches(
            states,
            k,
            rng=rng,
            store=self._states,
            policy=self._policy,
            keeps_states=self.keeps_states,
        )
        branches = [branch for same in planned for branch in same]
        walks = self._plan_walks(branches)
        self._play(walks, self._branch_envs, WaveStream(lambda _: []), is_local=True)
        self._play(branches, self._branch_envs, self._policy.open_stream())
        return Branches(
            continuations=[[branch.trajectory() for branch in same] for same in planned],
            environment_steps=sum(len(b.transitions) - b.start for b in branches),
            replayed_steps=sum(episode.replayed_steps for episode in [*walks, *branches]),
            usage=sum((branch.usage for branch in branches), Usage()),
            unreachable=find_unreachable(branches),
        )

    def replays(self, trajectory: Trajectory) -> bool:
        """Return whether branches of an episode have to take its steps before them again.

        Its first state after the one it begins in tells: of those kept it is dropped first.
        """
        step = trajectory.start + 1
        is_there = step < len(trajectory.transitions)
        return is_there and key_before(trajectory, step) not in self._states

    def close(self) -> None:
        """Close the environments, and forget their states."""
        self._envs.close()
        self._branch_envs.close()
        self._states.clear()

    def _plan_walks(self, branches: Sequence[BranchEpisode]) -> list[Walk]:
        walks = plan_walks(branches)
        can_be_saved_in = {}
        for name in {walk.spec.env for walk in walks}:
            env = self._branch_envs.take(name)
            self._branch_envs.give_back(env, name)
            can_be_saved_in[name] = can_be_saved(env)
        return [walk for walk in walks if can_be_saved_in[walk.spec.env]]

    def _play(
        self,
        episodes: Sequence[Episode],
        envs: EnvPool,
        stream: GenerationStream,
        on_end: Callable[[Trajectory], None] | None = None,
        group_quorum: float = 1.0,
        *,
        is_local: bool = False,
    ) -> None:
        """Play episodes to their end; `is_local` if the policy of all processes is not asked."""
        max_active = MAX_BRANCHES_AT_ONCE if envs is self._branch_envs else len(episodes)
        collection = Collection(
            episodes,
            envs,
            self._policy,
            stream,
            self._states,
            step_timeout=self._step_timeout,
            episode_timeout=self._episode_timeout,
            group_quorum=group_quorum,
            max_active=max_active,
            on_end=on_end,
        )
        try:
            collection.play(bool if is_local else self._is_any_active)
        finally:
            stream.close()
        for episode in episodes:
            self._note_final_state(episode)

    def _note_final_state(self, episode: Episode) -> None:
        """Note the state in which an episode was cut off."""
        if not episode.transitions or not episode.transitions[-1].truncated:
            return
        ids = None
        if episode.stop_reason is StopReason.TURN_LIMIT:
            ids = self._policy.encode(episode.request())
        last = episode.transitions[-1]
        episode.final_prompt_ids = ids or [*last.prompt_ids, *last.completion_ids]
