"""The episodes of one call of a rollout: begun, asked about, stepped and ended, all at once."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from agent_envs.core.async_bridge import CallSession, Outcome, outcome_of
from agent_trainers.experimental.branching.saved_states import SavedState, StateStore, state_key
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.streams import GenerationStream
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import Episode, is_immediate, lend_tokenizer
from agent_trainers.trajectory import StopReason, Trajectory

GATHER_SECONDS: Final = 0.02
"""How long a batch waits for more states that may be about to come."""
IDLE_SECONDS: Final = 0.05
"""How long to wait for environments before looking after deadlines, and other processes."""
_BROKEN: Final = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT, StopReason.LEFT_OUT)


class Collection:
    """The episodes of one call of `collect`."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        envs: EnvPool,
        policy: Policy,
        stream: GenerationStream,
        states: StateStore,
        *,
        step_timeout: float,
        episode_timeout: float | None,
        group_quorum: float,
        max_active: int,
        on_end: Callable[[Trajectory], None] | None,
    ) -> None:
        """Play `episodes` in `envs`, with actions from `stream`, which is one of `policy`.

        What they save goes to `states`; `max_active` are under way at once. See `Rollout` for the
        rest.
        """
        self._policy = policy
        self._step_timeout, self._episode_timeout = step_timeout, episode_timeout
        self._states = states
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
