"""Collect many episodes at once against one policy, none of which waits for another.

While some episodes wait for their tools, others get their actions. An environment that fails or
hangs ends its own episode, with the error recorded, and is replaced.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import gymnasium as gym

from agent_envs.core.deadline import CallSession, Outcome, outcome_of
from agent_envs.errors import AgentEnvsError, ServerError
from agent_envs.wrappers.awaited import awaited
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.streams import GenerationStream
from agent_trainers.rollout.episode import (
    Episode,
    EpisodeSpec,
    TextEnv,
    UnmadeEnv,
    is_immediate,
    template_tools,
)
from agent_trainers.trajectory import StopReason, Trajectory

GATHER_SECONDS: Final = 0.02
"""How long a batch waits for more states that may be about to come."""
IDLE_SECONDS: Final = 0.05
"""How long to wait for environments before looking after deadlines, and other processes."""

_log = logging.getLogger(__name__)

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
        """
        self._make_env = make_env
        self._policy = policy
        self._step_timeout = step_timeout
        self._episode_timeout = episode_timeout
        self._group_quorum = group_quorum
        self._is_any_active = is_any_active or bool
        self._idle_envs: defaultdict[str, list[TextEnv]] = defaultdict(list)

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play one episode per spec; return the trajectories in order, also those that failed.

        `on_end` is told of each as it ends, in no particular order.
        """
        episodes = [Episode(i, spec, self._take_env(spec.env)) for i, spec in enumerate(specs)]
        stream = self._policy.open_stream()
        try:
            _Collection(self, episodes, stream, on_end).play(self._is_any_active)
        finally:
            stream.close()
        for episode in episodes:
            self._note_final_state(episode)
        # An environment that failed or hangs may be in any state: the next episode gets a new one.
        for episode in episodes:
            if episode.stop_reason not in _BROKEN:
                self._idle_envs[episode.spec.env].append(episode.env)
        return [episode.trajectory() for episode in episodes]

    def close(self) -> None:
        """Close the environments."""
        for env in [env for envs in self._idle_envs.values() for env in envs]:
            try:
                env.close()
            except (Exception, SystemExit):  # noqa: BLE001 - foreign code; its episodes are over
                _log.warning("An environment failed to close.", exc_info=True)
        self._idle_envs.clear()

    def _take_env(self, name: str) -> TextEnv:
        if idle := self._idle_envs[name]:
            return idle.pop()
        make_env = self._make_env if callable(self._make_env) else self._make_env[name]
        try:
            env = make_env()
            if not isinstance(env, gym.Env):
                raise TypeError(
                    f"make_env returned a {type(env).__name__}; it must return a Gymnasium "
                    "environment."
                )
            return awaited(env)
        except ServerError as error:
            return UnmadeEnv(error)  # servers of environments come back
        except AgentEnvsError:
            raise  # wrong settings or data: no episode would ever work
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; it is recorded
            return UnmadeEnv(error)

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
        stream: GenerationStream,
        on_end: Callable[[Trajectory], None] | None,
    ) -> None:
        self._policy = rollout._policy
        self._step_timeout = rollout._step_timeout
        self._episode_timeout = rollout._episode_timeout
        self._session = CallSession()
        self._episodes = episodes
        self._stream = stream
        self._on_end = on_end
        self._active = dict(enumerate(episodes))
        self._generating: set[int] = set()
        sizes = Counter(episode.spec.group_id for episode in episodes)
        # How many episodes of each group still have to end well
        self._missing = {g: math.ceil(n * rollout._group_quorum) for g, n in sizes.items()}

    def play(self, is_any_active: Callable[[bool], bool]) -> None:
        """Play all episodes to their end."""
        for key, episode in enumerate(self._episodes):
            self._call(key, episode.reset)
        while is_any_active(bool(self._active)):
            is_busy = is_any_active(self._stream.has_requests)
            self._drain(is_busy=is_busy)
            if is_busy:
                self._generate()
            self._close_late_ones()

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
        if not is_immediate(self._episodes[key].env):
            timeout = self._step_timeout
            self._session.submit(key, lambda: function(timeout), timeout)
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
                self._lend_tokenizer(episode)
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
        trajectory = self._episodes[key].trajectory()
        self._missing[trajectory.group_id] -= trajectory.is_scorable
        if self._on_end is not None:
            self._on_end(trajectory)

    def _lend_tokenizer(self, episode: Episode) -> None:
        """Let the context policy count in the policy's own tokens."""
        env = episode.env.unwrapped
        if hasattr(env, "set_token_counter"):
            tools = template_tools(episode.info)
            env.set_token_counter(lambda messages: self._policy.count_tokens(messages, tools))
