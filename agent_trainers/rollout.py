"""Collect many episodes at once against one policy.

Waves: all episodes that want an action get one from the policy together; then all environments
step side by side. A tool that is slow holds a wave up for its own timeout at most, and an
environment that fails ends its own episode, with the error recorded.
"""

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np

from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy
from agent_trainers.trajectory import StopReason, Trajectory, Transition
from agent_trainers.worker_pool import WorkerPool

TextEnv = gym.Env[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What to play."""

    task: int | None
    """The task's index; None lets the environment draw one by `seed`."""
    seed: int
    """Seed of the environment; the same for the members of a group."""
    group_id: str
    """Episodes with the same id are compared with each other."""
    rng: np.random.Generator
    """The policy's draws; another generator for each member of a group."""


@dataclass(slots=True)
class _Episode:
    """An episode under way."""

    spec: EpisodeSpec
    env: TextEnv
    info: dict[str, Any] = field(default_factory=dict)
    transitions: list[Transition] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None
    final_prompt_ids: list[int] = field(default_factory=list)
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0


class Rollout:
    """Plays episodes; keeps its environments for the next call."""

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        policy: Policy,
        *,
        step_timeout: float = 300.0,
        is_any_active: Callable[[bool], bool] = bool,
    ) -> None:
        """Play `policy` in environments made by `make_env`.

        Args:
            make_env: Makes one environment; called as often as episodes run at once.
            policy: Who acts.
            step_timeout: Seconds that resets or steps of a wave may take together. A last resort
                against an environment that hangs; tools have timeouts of their own.
            is_any_active: Told whether this process has episodes left, says whether any process
                has. The default looks at this process only; a policy whose generation is
                collective needs an answer that all processes share.
        """
        self._make_env = make_env
        self._policy = policy
        self._step_timeout = step_timeout
        self._is_any_active = is_any_active
        self._pool = WorkerPool()
        self._idle_envs: list[TextEnv] = []

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play one episode per spec.

        Args:
            specs: What to play.
            on_end: Told of each trajectory as it ends, in no particular order.

        Returns:
            One trajectory per spec, in order; those that failed hold their error.
        """
        episodes = [_Episode(spec, self._take_env()) for spec in specs]
        self._reset(episodes)
        reported: set[int] = set()
        while True:
            active = [episode for episode in episodes if episode.stop_reason is None]
            if on_end is not None:
                _report(episodes, reported, on_end)
            if not self._is_any_active(bool(active)):
                break
            self._play_wave(active)
        for episode in episodes:
            self._note_final_state(episode)
        self._keep_envs(episodes)
        return [_trajectory(episode) for episode in episodes]

    def close(self) -> None:
        """Close the environments."""
        for env in self._idle_envs:
            env.close()
        self._idle_envs.clear()

    def _take_env(self) -> TextEnv:
        return self._idle_envs.pop() if self._idle_envs else self._make_env()

    def _keep_envs(self, episodes: Sequence[_Episode]) -> None:
        # An environment that failed or hangs may be in any state: the next episode gets a new one.
        broken = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT)
        self._idle_envs += [e.env for e in episodes if e.stop_reason not in broken]

    def _reset(self, episodes: Sequence[_Episode]) -> None:
        def reset(episode: _Episode) -> Callable[[], Any]:
            task = episode.spec.task
            options = None if task is None else {"task": task}
            return lambda: episode.env.reset(seed=episode.spec.seed, options=options)

        outcomes = self._run(episodes, [reset(episode) for episode in episodes])
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if episode.stop_reason is None:
                _, episode.info = outcome
                self._lend_tokenizer(episode)

    def _lend_tokenizer(self, episode: _Episode) -> None:
        """Let the context policy count in the policy's own tokens."""
        env = episode.env.unwrapped
        if hasattr(env, "set_token_counter"):
            tools = template_tools(episode.info)
            env.set_token_counter(lambda messages: self._policy.count_tokens(messages, tools))

    def _play_wave(self, active: Sequence[_Episode]) -> None:
        started = time.perf_counter()
        generations = self._policy.generate([_request(episode) for episode in active])
        seconds = time.perf_counter() - started
        acting: list[tuple[_Episode, Generation]] = []
        for episode, generation in zip(active, generations, strict=True):
            episode.generate_seconds += seconds / len(active)
            if generation.finish_reason == "overflow":
                _overflow(episode)
            else:
                acting.append((episode, generation))
        calls = [_step_call(episode, generation) for episode, generation in acting]
        outcomes = self._run([episode for episode, _ in acting], calls)
        for (episode, generation), outcome in zip(acting, outcomes, strict=True):
            if episode.stop_reason is None:
                _advance(episode, generation, outcome)

    def _note_final_state(self, episode: _Episode) -> None:
        """Note the state in which an episode was cut off."""
        if not episode.transitions or not episode.transitions[-1].truncated:
            return
        ids = None
        if episode.stop_reason is StopReason.TURN_LIMIT:
            ids = self._policy.encode(_request(episode))
        last = episode.transitions[-1]
        episode.final_prompt_ids = ids or [*last.prompt_ids, *last.completion_ids]

    def _run(self, episodes: Sequence[_Episode], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one call per episode; note failures in the episodes."""
        outcomes = self._pool.run([_timed(call) for call in calls], self._step_timeout)
        results: list[Any] = []
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                is_timeout = isinstance(outcome, TimeoutError)
                reason = StopReason.TIMEOUT if is_timeout else StopReason.ENVIRONMENT_ERROR
                _fail(episode, reason, "".join(traceback.format_exception(outcome)))
                results.append(None)
            else:
                result, seconds = outcome
                episode.environment_seconds += seconds
                results.append(result)
        return results


def _timed(call: Callable[[], Any]) -> Callable[[], tuple[Any, float]]:
    def timed() -> tuple[Any, float]:
        started = time.perf_counter()
        result = call()
        return result, time.perf_counter() - started

    return timed


def _step_call(episode: _Episode, generation: Generation) -> Callable[[], Any]:
    return lambda: episode.env.step(generation.text)


def _request(episode: _Episode) -> GenerationRequest:
    return GenerationRequest(
        messages=episode.info["messages"],
        tools=template_tools(episode.info),
        previous=episode.transitions[-1] if episode.transitions else None,
        rng=episode.spec.rng,
    )


def template_tools(info: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template is to describe; None where the state does."""
    is_native = TOOL_FORMATS[info["tool_format"]].is_native if "tool_format" in info else True
    tools: list[dict[str, Any]] = info.get("tools") or []
    return tools if is_native else None


def _advance(episode: _Episode, generation: Generation, outcome: Any) -> None:
    _, reward, terminated, truncated, info = outcome
    if not math.isfinite(reward):
        _fail(episode, StopReason.ENVIRONMENT_ERROR, f"the reward is {reward}: {info}")
        return
    is_cut = generation.finish_reason == "length" and not terminated
    episode.transitions.append(
        Transition(
            messages=episode.info["messages"],
            prompt_ids=generation.prompt_ids,
            completion_ids=generation.completion_ids,
            logprobs=generation.logprobs,
            action=generation.text,
            reward=float(reward),
            reward_terms=info.get("reward_terms", {}),
            terminated=terminated,
            truncated=truncated or is_cut,
            info={k: v for k, v in info.items() if k not in ("messages", "tools")},
        )
    )
    episode.info = info
    if terminated:
        episode.stop_reason = StopReason.ANSWERED
    elif is_cut:  # a turn that was cut off leaves no state to go on from
        episode.stop_reason = StopReason.TOKEN_LIMIT
    elif truncated:
        episode.stop_reason = StopReason.TURN_LIMIT


def _overflow(episode: _Episode) -> None:
    """End an episode whose state does not fit the policy; what was played counts."""
    episode.stop_reason = StopReason.CONTEXT_OVERFLOW
    if episode.transitions:
        episode.transitions[-1] = replace(episode.transitions[-1], truncated=True)


def _fail(episode: _Episode, reason: StopReason, error: str) -> None:
    episode.stop_reason = reason
    episode.error = error


def _report(
    episodes: Sequence[_Episode], reported: set[int], on_end: Callable[[Trajectory], None]
) -> None:
    for i, episode in enumerate(episodes):
        if episode.stop_reason is not None and i not in reported:
            reported.add(i)
            on_end(_trajectory(episode))


def _trajectory(episode: _Episode) -> Trajectory:
    assert episode.stop_reason is not None
    return Trajectory(
        task_id=str(episode.info.get("task_id", episode.spec.task)),
        group_id=episode.spec.group_id,
        transitions=list(episode.transitions),
        metrics=dict(episode.info.get("metrics", {})),
        timings={
            "generate_seconds": episode.generate_seconds,
            "environment_seconds": episode.environment_seconds,
        },
        stop_reason=episode.stop_reason,
        error=episode.error,
        final_prompt_ids=list(episode.final_prompt_ids),
    )
