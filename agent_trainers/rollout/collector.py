"""Rollouts: many episodes at once against one policy.

While some episodes wait for their tools, others get their actions. An environment that fails or
hangs ends its own episode, with the error recorded, and is replaced.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from agent_envs.core.async_bridge import CallSession, Outcome, outcome_of, submit
from agent_envs.errors import AgentEnvsError, RolloutError, ServerError
from agent_trainers.policies.policy import Policy, Usage
from agent_trainers.rollout.branches import Branches, RecordedState, Rngs, plan_branches
from agent_trainers.rollout.environments import (
    EnvPool,
    MakeEnv,
    is_immediate,
    lend_tokenizer,
    read_reset,
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

    def share_loop(self) -> None:
        """Let threads call `collect` at once; episodes start in the order of the calls."""

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
        self.policy = policy
        self.step_timeout, self.episode_timeout = step_timeout, episode_timeout
        self.is_any_active = is_any_active or bool
        self._envs, self._branch_envs = EnvPool(make_env), EnvPool(make_env)
        self._shared: _SharedLoop | None = None

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Run one episode per spec; return the trajectories in order, failed ones included.

        `on_end` is called with each trajectory as its episode ends, in no particular order.
        """
        if self._shared is None:
            episodes = [Episode(i, spec) for i, spec in enumerate(specs)]
            self._run(episodes, self._envs, len(episodes), on_end)
        else:
            episodes = self._shared.run(specs, on_end)
            self._record_ends(episodes)
        return [episode.trajectory() for episode in episodes]

    def share_loop(self) -> None:
        """Let threads call `collect` at once: one thread runs the episodes of all calls.

        They start in the order of the calls; as many run at once as the largest call has.
        """
        self._shared = _SharedLoop(self)

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
        planned = plan_branches(states, k, rng=rng, policy=self.policy)
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
        if self._shared is not None:
            self._shared.close()
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
        call_back = on_end or (lambda _: None)
        loop = _EpisodeLoop(self, envs, max_active, lambda e: call_back(e.trajectory()))
        loop.add(episodes)
        loop.run()
        self._record_ends(episodes)

    def _record_ends(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            if not episode.transitions or not episode.transitions[-1].truncated:
                continue
            ids = None
            if episode.stop_reason is StopReason.TURN_LIMIT:
                ids = self.policy.encode(episode.request())
            last = episode.transitions[-1]
            episode.final_prompt_ids = ids or [*last.prompt_ids, *last.completion_ids]


class _EpisodeLoop:
    """Event loop over episodes: resets, actions, steps and ends as they come."""

    def __init__(
        self,
        rollout: Rollout,
        envs: EnvPool,
        max_active: int,
        on_end: Callable[[Episode], object],
    ) -> None:
        self._rollout, self._envs = rollout, envs
        self.max_active, self._on_end = max_active, on_end
        self._stream = rollout.policy.open_stream()
        self._session = CallSession()
        self._waiting: deque[Episode] = deque()
        self._active: dict[int, Episode] = {}
        self._generating: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended."""
        return not (self._waiting or self._active)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add episodes, which start after those before."""
        self._waiting.extend(episodes)

    def run(self) -> None:
        """Run all episodes to their end."""
        try:
            self._start_episodes()
            while self._rollout.is_any_active(bool(self._active)):
                self.advance()
        finally:
            self.close()

    def advance(self) -> None:
        """Record results, generate for a while, and start further episodes."""
        is_busy = self._rollout.is_any_active(self._stream.has_requests)
        self._drain(is_busy=is_busy)
        if is_busy:
            self._generate()
        self._close_late_ones()
        self._start_episodes()

    def close(self) -> None:
        """Release the policy."""
        self._stream.close()

    def _start_episodes(self) -> None:
        while self._waiting and len(self._active) < self.max_active:
            episode = self._waiting.popleft()
            episode.started = time.monotonic()
            self._active[episode.number] = episode
            try:
                episode.env = self._envs.take(episode.spec.env)
            except (Exception, SystemExit) as error:  # foreign code
                if isinstance(error, AgentEnvsError) and not isinstance(error, ServerError):
                    raise  # wrong settings or data: no episode would ever work
                episode.fail(error)
                self._end(episode.number)
                continue
            self._call(episode, episode.reset)

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
            self._active[key].generate_seconds += share
        for key, generation in ready:
            episode = self._active[key]
            self._generating.discard(key)
            if isinstance(generation, BaseException):
                episode.fail(generation, StopReason.POLICY_ERROR)
            else:
                episode.generation = generation
                episode.usage += generation.spent
                if generation.finish_reason == "overflow":
                    episode.overflow()
            if episode.stop_reason is None:
                self._call(episode, episode.step)
            else:
                self._end(key)

    def _close_late_ones(self) -> None:
        if (timeout := self._rollout.episode_timeout) is None:
            return
        for key, episode in list(self._active.items()):
            if time.monotonic() - episode.started > timeout:
                text = f"the episode took longer than {timeout:g} seconds"
                episode.stop(StopReason.TIMEOUT, text)
                self._end(key)

    def _call(self, episode: Episode, function: Callable[..., Any]) -> None:
        """Call a reset or a step: inline if it only computes, else in another thread."""
        if is_immediate(episode.env):
            # KeyboardInterrupt is the user's; any other error of foreign code is recorded
            errors = (Exception, SystemExit)
            self._record_all([outcome_of(episode.number, function, caught=errors)])
            return
        timeout = self._rollout.step_timeout
        # the first call of a branch also replays the steps before it
        num_calls = 1 + episode.start if episode.generation is None else 1
        self._session.submit(episode.number, lambda: function(timeout), timeout * num_calls)

    def _record_all(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            episode = self._active[outcome.key]
            episode.step_seconds.append(outcome.seconds)
            request = None
            try:
                if outcome.error is not None:
                    episode.fail(outcome.error)
                elif episode.generation is None:
                    episode.info = read_reset(outcome.value)
                    lend_tokenizer(self._rollout.policy, episode.env, episode.info)
                else:
                    episode.advance(outcome.value)
                if episode.stop_reason is None:
                    request = episode.request()
            except Exception as error:  # noqa: BLE001 - what foreign code returned; it is recorded
                episode.fail(error, StopReason.ENVIRONMENT_ERROR)
            if request is None:
                self._end(outcome.key)
            else:
                self._stream.add(outcome.key, request)
                self._generating.add(outcome.key)

    def _end(self, key: int) -> None:
        episode = self._active.pop(key)
        self._generating.discard(key)
        self._session.abandon(key)
        self._stream.drop(key)
        # An environment that failed or hangs may be in any state: the next episode gets a new one.
        if episode.stop_reason not in _BROKEN:
            self._envs.give_back(episode.env, episode.spec.env)
        self._on_end(episode)


@dataclass(frozen=True, slots=True)
class _Call:
    episodes: list[Episode]
    on_end: OnEnd | None
    done: Future[None] = field(default_factory=Future)


class _SharedLoop:
    """The event loop of all calls of a rollout, in a thread that lasts until `close`."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._thread: Future[None] | None = None

    def run(self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None) -> list[Episode]:
        """Run one episode per spec to its end."""
        with self._lock:
            call = _Call([Episode(next(self._numbers), spec) for spec in specs], on_end)
            self._calls.put(call)
            if self._thread is None:
                self._thread = submit(self._work)
        call.done.result()
        return call.episodes

    def close(self) -> None:
        """End the thread; calls that are not finished raise a RolloutError."""
        with self._lock:
            if self._thread is not None:
                self._calls.put(None)
                self._thread.result()
                self._thread = None

    def _work(self) -> None:
        pending: dict[int, _Call] = {}  # by number of an episode that has not ended

        def end(episode: Episode) -> None:
            call = pending.pop(episode.number)
            if call.on_end is not None:
                call.on_end(episode.trajectory())
            if not any(each.number in pending for each in call.episodes):
                call.done.set_result(None)

        failure: BaseException | None = None
        try:
            self._serve(pending, end)
        except BaseException as error:  # noqa: BLE001 - raised again by the calls
            failure = error
        closed = RolloutError("The rollout was closed before its episodes ended.")
        for call in {id(call): call for call in pending.values()}.values():
            call.done.set_exception(failure or closed)
        while failure is not None and (late := self._calls.get()) is not None:  # until `close`
            late.done.set_exception(failure)

    def _serve(self, pending: dict[int, _Call], end: Callable[[Episode], None]) -> None:
        loop = _EpisodeLoop(self._rollout, self._rollout._envs, 0, end)
        try:
            while True:
                try:
                    call = self._calls.get(block=loop.is_over)
                except queue.Empty:
                    loop.advance()
                    continue
                if call is None:
                    return
                if not call.episodes:
                    call.done.set_result(None)
                pending |= {episode.number: call for episode in call.episodes}
                loop.max_active = max(loop.max_active, len(call.episodes))
                loop.add(call.episodes)
        finally:
            loop.close()
