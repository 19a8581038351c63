"""Comparison of recorded episodes with their replay."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import PlayedEpisode, acts_by_rules
from agent_leaderboard.play.environments import recorded_environment
from agent_leaderboard.play.episodes import FAULTS, Chunk, run_episodes
from agent_leaderboard.play.replay import ReplayedEpisode, Replayer
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import EpisodeResult, TaskEntry
from agent_leaderboard.verify.claims import check_tokens
from agent_leaderboard.verify.run_check import differences, place
from agent_trainers.trajectory import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """Episodes of one agent in one environment to be replayed."""

    environment: EnvironmentRecord
    agent: AgentRecord
    protocol: Protocol
    episodes: Sequence[tuple[EpisodeResult, TaskEntry]]
    data: Path | None

    @property
    def name(self) -> str:
        """Environment and agent."""
        return f"{self.environment.slug}/{self.agent.slug}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a job."""

    problems: Sequence[str]
    num_successes: int
    """Episodes that succeed by replay."""


def check_episodes(job: ReplayJob) -> Replayed:
    """Replay episodes.

    Those that differ are replayed once more on their own: a program may reach its time limit on a
    busy machine, and a forgery stays one.
    """
    try:
        problems, successes = _check(job)
        if doubtful := [job.episodes[i] for i, texts in problems.items() if texts]:
            problems, again = _check(dataclasses.replace(job, episodes=doubtful))
            successes |= again
    except Exception as error:  # noqa: BLE001 - any environment
        name = "" if isinstance(error, AgentEnvsError) else f"{type(error).__name__}: "
        return Replayed(problems=[f"{job.name}: replay failed: {name}{error}"], num_successes=0)
    texts = [text for own in problems.values() for text in own]
    return Replayed(problems=texts, num_successes=len(successes))


def _check(job: ReplayJob) -> tuple[dict[int, list[str]], set[tuple[int, int]]]:
    """Return the problems of each episode, by its index, and the episodes that succeed."""
    reruns = _rerun(job)
    replayer = Replayer(job.environment, job.agent, job.protocol, job.data)
    problems: dict[int, list[str]] = {}
    successes = set()
    for index, (result, entry) in enumerate(job.episodes):
        rerun = None if reruns is None else reruns[index]
        try:
            texts, is_success = _check_episode(replayer, job.agent, result, entry, rerun)
        except Exception as error:  # noqa: BLE001 - untrusted actions in any environment
            texts, is_success = [f"field 'actions': replay failed: {error}"], False
        problems[index] = [f"{place(result)}, {text}" for text in texts]
        if is_success:
            successes.add((result.task, result.sample))
    replayer.close()
    return problems, successes


def _rerun(job: ReplayJob) -> list[PlayedEpisode] | None:
    """Run an agent without a model again; None for other agents."""
    if not acts_by_rules(job.agent.kind):
        return None
    chunk = Chunk(
        environment=job.environment,
        agent=job.agent,
        make_env=recorded_environment(job.environment, job.agent.tool_format, job.data),
        agent_settings=job.agent.settings,
        protocol=job.protocol,
        episodes=[(entry, result.sample) for result, entry in job.episodes],
        data=job.data,
    )
    return [episode for episode, _ in run_episodes(chunk)]


def _check_episode(
    replayer: Replayer,
    agent: AgentRecord,
    result: EpisodeResult,
    entry: TaskEntry,
    rerun: PlayedEpisode | None,
) -> tuple[list[str], bool]:
    actions, *attempts = replayer.open(result, entry)
    texts = [] if rerun is None else list(_check_rerun(result, actions, rerun))
    again = replayer.replay(result, actions)
    texts += _compare(result, entry, again)
    written = "\n".join(action for attempt in (actions, *attempts) for action in attempt)
    texts += check_tokens(result, agent, written, again.question)
    return texts, again.metrics.get("success", 0.0) > 0.0 and result.is_scored


def _check_rerun(
    result: EpisodeResult, actions: Sequence[str], rerun: PlayedEpisode
) -> Iterator[str]:
    """Yield how an agent acts otherwise when it runs again; that includes false failures."""
    if result.error is not None and rerun.trajectory.stop_reason not in FAULTS:
        yield f"field 'error': is {_shown(result.error)}, but the agent runs without a failure"
    elif result.error is None and list(rerun.actions) != list(actions):
        shown = _shown(rerun.actions)
        yield f"field 'actions': are not those of the agent {result.agent!r}: {shown}"


def _compare(result: EpisodeResult, entry: TaskEntry, again: ReplayedEpisode) -> Iterator[str]:
    """Yield each field that differs from replay."""
    truth: Mapping[str, Any] = {
        "rewards": [step.reward for step in again.steps],
        "reward_terms": [step.reward_terms for step in again.steps],
        "errors": [step.error for step in again.steps],
        "metrics": again.metrics,
        "return_": float(sum(step.reward for step in again.steps)),
        "success": again.metrics.get("success", 0.0) > 0.0,
    }
    yield from differences(result, truth, "replay gives", _shown)
    if again.entry != entry:
        yield "field 'task': replay gives another task"
    allowed = _possible_stop_reasons(again)
    if result.stop_reason not in allowed:
        names = " or ".join(sorted(allowed))
        yield f"field 'stop_reason': is '{result.stop_reason}', replay gives {names}"


def _possible_stop_reasons(again: ReplayedEpisode) -> set[StopReason]:
    if again.terminated:
        return {StopReason.ANSWERED}
    if again.truncated:
        return {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    return {StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW, *FAULTS}  # ended by the policy


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
