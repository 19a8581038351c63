"""Rollouts: many episodes at once against one policy.

While some episodes wait for their tools, others get their actions. An environment that fails or
hangs ends its own episode, with the error recorded, and is replaced.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from agent_envs.core.async_bridge import CallSession, Outcome, outcome_of
from agent_envs.errors import AgentEnvsError, ServerError
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage
from agent_trainers.rollout.branches import (
    Branches,
    RecordedState,
    Rngs,
    plan_branches,
)
from agent_trainers.rollout.environments import (
    EnvPool,
    MakeEnv,
    is_immediate,
    lend_tokenizer,
)
from agent_trainers.rollout.episode import Episode, EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

MAX_BRANCHES_AT_ONCE: Final = 64
"""Branches that run at once; a call may request thousands."""
GATHER_SECONDS: Final = 0.02
"""How long a batch waits for more states."""
IDLE_SECONDS: Final = 0.05
"""How long to wait for environments before checking deadlines and other processes."""
_BROKEN: Final = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT)

OnEnd = Callable[[Trajectory], object]


class Collector(Protocol):
    """Runs episodes, in environments (`Rollout`) or in programs."""

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Run one episode per spec; return the trajectories in order, failed ones included."""

    def close(self) -> None:
        """Release resources kept between calls."""


class Rollout:
    """Runs episodes, and keeps its environments for the next call."""

    def __init__(
        self,
        make_env: MakeEnv | Mapping[str, MakeEnv],
        policy: Policy,
        *,
        step_timeout: float = 300.0,
        episode_timeout: float | None = None,
        is_any_active: Callable[[bool], bool] | None = None,
    ) -> None:
        """Run `policy` in environments made by `make_env`.

        Args:
            make_env: Makes one environment; called once per concurrent episode. Or such functions
                by name, of which `EpisodeSpec.env` selects one.
            policy: The policy that acts.
            step_timeout: Seconds that a reset or a step may take. A last resort against an
                environment that hangs; tools have their own timeouts.
            episode_timeout: Seconds that an episode may take from its reset on; None for no limit.
            is_any_active: Maps whether this process has work left to whether any process has. For
                a policy whose generation is collective.
        """
        self._policy = policy
        self._step_timeout, self._episode_timeout = step_timeout, episode_timeout
        self._is_any_active = is_any_active or bool
        self._envs, self._branch_envs = EnvPool(make_env), EnvPool(make_env)

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Run one episode per spec; return the trajectories in order, failed ones included.

        `on_end` is called with each trajectory as its episode ends, in no particular order.
        """
        episodes = [Episode(i, spec) for i, spec in enumerate(specs)]
        self._run(episodes, self._envs, len(episodes), on_end)
        return [episode.trajectory() for episode in episodes]

    def branch(
        self, trajectory: Trajectory, step: int, k: int, *, rng: np.random.Generator
    ) -> Branches:
        """Return to the state before `step` of a recorded episode and run `k` continuations.

        See `branch_many`.
        """
        return self.branch_many([(trajectory, step)], k, rng=rng)

    def branch_many(
        self, states: Sequence[RecordedState], k: int | Sequence[int], *, rng: Rngs
    ) -> Branches:
        """Continue from recorded states, all at once, with the policy of this rollout.

        The episodes may come from this rollout, another policy or a file, in environments made
        like those of this rollout. Branches use their own environments, so nothing else changes.

        Args:
            states: Episodes and steps; branches begin in the state before the step.
            k: How many branches each state gets, one number or one for each state.
            rng: Randomness of the branches, one generator or one for each state.

        Raises:
            ConfigurationError: If a state cannot be branched, as its trajectory has no seed.
            SnapshotError: If no state can be reached, because the environment reaches others.
        """
        planned = plan_branches(states, k, rng=rng, policy=self._policy)
        branches = [branch for same in planned for branch in same]
        self._run(branches, self._branch_envs, MAX_BRANCHES_AT_ONCE)
        refusals = [branch.refusal for branch in branches if branch.refusal is not None]
        if refusals and len(refusals) == len(branches):
            raise refusals[0]
        return Branches(
            continuations=[[branch.trajectory() for branch in same] for same in planned],
            usage=sum((branch.usage for branch in branches), Usage()),
        )

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
        self._branch_envs.close()

    def _run(
        self,
        episodes: Sequence[Episode],
        envs: EnvPool,
        max_active: int,
        on_end: OnEnd | None = None,
    ) -> None:
        """Run episodes to their end, and record the state in which one was truncated."""
        timeouts = self._step_timeout, self._episode_timeout
        run = _EpisodeLoop(episodes, envs, self._policy, timeouts, max_active, on_end)
        run.run(self._is_any_active)
        for episode in episodes:
            if not episode.transitions or not episode.transitions[-1].truncated:
                continue
            ids = None
            if episode.stop_reason is StopReason.TURN_LIMIT:
                ids = self._policy.encode(episode.request())
            last = episode.transitions[-1]
            episode.final_prompt_ids = ids or [*last.prompt_ids, *last.completion_ids]


class _EpisodeLoop:
    """Event loop over the episodes of one call: resets, actions, steps and ends as they come."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        envs: EnvPool,
        policy: Policy,
        timeouts: tuple[float, float | None],
        max_active: int,
        on_end: OnEnd | None,
    ) -> None:
        self._episodes, self._envs, self._policy = episodes, envs, policy
        self._step_timeout, self._episode_timeout = timeouts
        self._max_active, self._on_end = max_active, on_end
        self._stream = policy.open_stream()
        self._session = CallSession()
        self._waiting = deque(enumerate(episodes))
        self._active: dict[int, Episode] = {}
        self._generating: set[int] = set()

    def run(self, is_any_active: Callable[[bool], bool]) -> None:
        """Run all episodes to their end."""
        try:
            self._start_episodes()
            while is_any_active(bool(self._active)):
                is_busy = is_any_active(self._stream.has_requests)
                self._drain(is_busy=is_busy)
                if is_busy:
                    self._generate()
                self._close_late_ones()
                self._start_episodes()
        finally:
            self._stream.close()

    def _start_episodes(self) -> None:
        while self._waiting and len(self._active) < self._max_active:
            key, episode = self._waiting.popleft()
            episode.started = time.monotonic()
            self._active[key] = episode
            try:
                episode.env = self._envs.take(episode.spec.env)
            except (Exception, SystemExit) as error:  # foreign code
                if isinstance(error, AgentEnvsError) and not isinstance(error, ServerError):
                    raise  # wrong settings or data: no episode would ever work
                episode.fail(error)
                self._end(key)
                continue
            self._call(key, episode.reset)

    def _drain(self, *, is_busy: bool) -> None:
        """Record results of environments; wait for them where there is nothing else to do."""
        if not is_busy:
            self._record_all(self._session.wait(IDLE_SECONDS))
            return
        until = time.monotonic() + (GATHER_SECONDS if self._stream.gathers else 0.0)
        while self._session:
            self._record_all(self._session.wait(max(0.0, until - time.monotonic())))
            if time.monotonic() >= until:
                break

    def _generate(self) -> None:
        """Let the policy generate for a while, and execute the actions that are ready."""
        started = time.perf_counter()
        ready = self._stream.advance()
        share = (time.perf_counter() - started) / max(1, len(self._generating))
        for key in self._generating:
            self._episodes[key].generate_seconds += share
        for key, generation in ready:
            self._act(key, generation)

    def _close_late_ones(self) -> None:
        """End the episodes that took too long."""
        if (timeout := self._episode_timeout) is not None:
            now = time.monotonic()
            for key, episode in list(self._active.items()):
                if now - episode.started > timeout:
                    text = f"the episode took longer than {timeout:g} seconds"
                    episode.stop(StopReason.TIMEOUT, text)
                    self._end(key)

    def _call(self, key: int, function: Callable[..., Any]) -> None:
        """Call a reset or a step: inline if it only computes, else in another thread."""
        episode, timeout = self._episodes[key], self._step_timeout
        if not is_immediate(episode.env):
            num_calls = episode.num_first_calls if episode.generation is None else 1
            self._session.submit(key, lambda: function(timeout), timeout * num_calls)
            return
        # KeyboardInterrupt is the user's; any other error of foreign code is recorded
        self._record_all([outcome_of(key, function, caught=(Exception, SystemExit))])

    def _record_all(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            episode = self._episodes[outcome.key]
            episode.step_seconds.append(outcome.seconds)
            request = self._record(episode, outcome)
            if request is None:
                self._end(outcome.key)
            else:
                self._stream.add(outcome.key, request)
                self._generating.add(outcome.key)

    def _record(self, episode: Episode, outcome: Outcome) -> GenerationRequest | None:
        """Record a result; return the next request, None where the episode is over."""
        if outcome.error is not None:
            episode.fail(outcome.error)
            return None
        try:
            if episode.generation is None:
                episode.begin(outcome.value)
                lend_tokenizer(self._policy, episode.env, episode.info)
            else:
                episode.advance(outcome.value)
            return episode.request() if episode.stop_reason is None else None
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
        if self._on_end is not None:
            self._on_end(episode.trajectory())
