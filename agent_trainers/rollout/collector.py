"""Collect many episodes at once against one policy, none of which waits for another.

While some episodes wait for their tools, others get their actions. An environment that fails or
hangs ends its own episode, with the error recorded, and is replaced.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from agent_envs.core.deadline import CallSession, Outcome, outcome_of
from agent_trainers.policies.generation import Generation, GenerationRequest, Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.streams import GenerationStream, WaveStream
from agent_trainers.rollout.branches import (
    BranchEpisode,
    Branches,
    RecordedState,
    Rngs,
    Walk,
    find_unreachable,
    plan_branches,
    plan_walks,
)
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import (
    Episode,
    EpisodeSpec,
    TextEnv,
    is_immediate,
    lend_tokenizer,
    template_tools,
)
from agent_trainers.rollout.saved_states import (
    SavedState,
    StateStore,
    can_be_saved,
    key_before,
    state_key,
)
from agent_trainers.trajectory import StopReason, Trajectory

GATHER_SECONDS: Final = 0.02
"""How long a batch waits for more states that may be about to come."""
MAX_BRANCHES_AT_ONCE: Final = 64
"""So many branches are under way at once; a call may ask for thousands."""
IDLE_SECONDS: Final = 0.05
"""How long to wait for environments before looking after deadlines, and other processes."""

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
        if branches.unreachable and len(branches.unreachable) == len({t.env for t, _ in states}):
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
        collection = _Collection(self, episodes, envs, stream, on_end, group_quorum, max_active)
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


_BROKEN: Final = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT, StopReason.LEFT_OUT)


class _Collection:
    """The episodes of one call of `collect`."""

    def __init__(
        self,
        rollout: Rollout,
        episodes: Sequence[Episode],
        envs: EnvPool,
        stream: GenerationStream,
        on_end: Callable[[Trajectory], None] | None,
        group_quorum: float,
        max_active: int,
    ) -> None:
        self._policy = rollout._policy
        self._step_timeout = rollout._step_timeout
        self._episode_timeout = rollout._episode_timeout
        self._states = rollout._states
        self._session = CallSession()
        self._episodes, self._envs = episodes, envs
        self._stream = stream
        self._on_end = on_end
        self._waiting = deque(enumerate(episodes))
        self._active: dict[int, Episode] = {}
        self._max_active = max_active
        self._generating: set[int] = set()
        sizes = Counter(episode.spec.group_id for episode in episodes)
        # How many episodes of each group still have to end well
        self._missing = {g: math.ceil(n * group_quorum) for g, n in sizes.items()}

    def play(self, is_any_active: Callable[[bool], bool]) -> None:
        """Play all episodes to their end."""
        self._begin_episodes()
        while is_any_active(bool(self._active)):
            is_busy = is_any_active(self._stream.has_requests)
            self._drain(is_busy=is_busy)
            if is_busy:
                self._generate()
            self._close_late_ones()
            self._begin_episodes()

    def _begin_episodes(self) -> None:
        """Begin as many episodes as may be under way at once."""
        while self._waiting and len(self._active) < self._max_active:
            key, episode = self._waiting.popleft()
            episode.env, episode.started = self._envs.take(episode.spec.env), time.monotonic()
            self._active[key] = episode
            self._call(key, episode.reset)

    def _drain(self, *, is_busy: bool) -> None:
        """Take in what environments have said; wait for it where nothing else is to be done."""
        if not is_busy:
            self._take_in(self._session.wait(IDLE_SECONDS))
            return
        until = time.monotonic() + (GATHER_SECONDS if self._stream.gathers else 0.0)
        while self._session:
            self._take_in(self._session.wait(max(0.0, until - time.monotonic())))
            if time.monotonic() >= until:
                break

    def _generate(self) -> None:
        """Let the policy work for a while, and carry out what it decided."""
        started = time.perf_counter()
        ready = self._stream.advance()
        share = (time.perf_counter() - started) / max(1, len(self._generating))
        for key in self._generating:
            self._episodes[key].generate_seconds += share
        for key, generation in ready:
            self._act(key, generation)

    def _close_late_ones(self) -> None:
        """End the episodes that took too long, and the rest once every group has its quorum."""
        if self._episode_timeout is not None:
            now = time.monotonic()
            for key, episode in list(self._active.items()):
                if now - episode.started > self._episode_timeout:
                    text = f"the episode took longer than {self._episode_timeout:g} seconds"
                    episode.stop(StopReason.TIMEOUT, text)
                    self._end(key)
        if self._active and not any(missing > 0 for missing in self._missing.values()):
            for key, episode in list(self._active.items()):
                episode.stop(StopReason.LEFT_OUT, "the other groups had their quorum")
                self._end(key)

    def _call(self, key: int, function: Callable[..., Any]) -> None:
        """Run a reset or a step: at once if it only computes, else in another thread."""
        episode, timeout = self._episodes[key], self._step_timeout
        if not is_immediate(episode.env):
            num_calls = episode.num_first_calls if episode.generation is None else 1
            self._session.submit(key, lambda: function(timeout), timeout * num_calls)
            return
        # Ctrl-C is the user's; whatever else foreign code raises is recorded
        self._take_in([outcome_of(key, function, caught=(Exception, SystemExit))])

    def _take_in(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            episode = self._episodes[outcome.key]
            episode.step_seconds.append(outcome.seconds)
            request = self._note(episode, outcome)
            if request is None:
                self._end(outcome.key)
            else:
                self._stream.add(outcome.key, request)
                self._generating.add(outcome.key)

    def _note(self, episode: Episode, outcome: Outcome) -> GenerationRequest | None:
        """Note what an environment said; return what is asked next, None where it is over."""
        if outcome.error is not None:
            episode.fail(outcome.error)
            return None
        try:
            if episode.generation is None:
                episode.begin(outcome.value)
                lend_tokenizer(self._policy, episode.env, episode.info)
            else:
                episode.advance(outcome.value)
            if episode.stop_reason is not None:
                return None
            self._keep_state(episode)
            return episode.request()
        except Exception as error:  # noqa: BLE001 - what foreign code returned; it is recorded
            episode.fail(error, StopReason.ENVIRONMENT_ERROR)
            return None

    def _act(self, key: int, generation: Generation | BaseException) -> None:
        episode = self._episodes[key]
        self._generating.discard(key)
        if isinstance(generation, BaseException):
            episode.fail(generation, StopReason.POLICY_ERROR)
            self._end(key)
            return
        episode.usage += generation.spent
        if generation.finish_reason == "overflow":
            episode.overflow()
            self._end(key)
        else:
            episode.generation = generation
            self._call(key, episode.step)

    def _end(self, key: int) -> None:
        del self._active[key]
        self._generating.discard(key)
        self._session.abandon(key)
        self._stream.drop(key)
        episode = self._episodes[key]
        # An environment that failed or hangs may be in any state: the next episode gets a new one.
        if episode.stop_reason not in _BROKEN:
            self._envs.give_back(episode.env, episode.spec.env)
        trajectory = episode.trajectory()
        self._missing[trajectory.group_id] -= trajectory.is_scorable
        if self._on_end is not None:
            self._on_end(trajectory)

    def _keep_state(self, episode: Episode) -> None:
        """Keep the state that an episode is in, if it was saved."""
        if episode.saved is None:
            return
        actions = [transition.action for transition in episode.transitions]
        spec, messages = episode.spec, episode.info["messages"]
        key = state_key(spec.env, spec.task, spec.seed, actions, messages)
        self._states.put(key, SavedState(environment=episode.saved, info=episode.info))
