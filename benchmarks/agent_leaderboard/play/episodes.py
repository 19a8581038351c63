"""Running chunks of episodes, and replaying recorded ones.

A run resumes at the beginning of a chunk, so that the same episodes are in the same batches and a
model agent writes the same actions.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.core.replay import ReplayedStep, replay
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import Agent, MakeEnv, PlayedEpisode, build_agent, tool_env
from agent_leaderboard.play.environments import environment_seal, recorded_environment
from agent_leaderboard.play.prepare import task_entry
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import EpisodeResult, TaskEntry, episode_seed
from agent_leaderboard.records.sealing import Seal, episode_place
from agent_trainers.policies import Usage
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

OUTAGE_EPISODES: Final = 6
"""Consecutive infrastructure failures that count as an outage; more than `check` runs."""
FAULTS: Final = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT, StopReason.POLICY_ERROR)
"""Stop reasons of infrastructure failures."""
_EXCEPTION: Final = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+([\w.]+)(?=:|$)", re.MULTILINE
)
"""The exception's name in a traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Episodes of one agent in one environment that run together."""

    environment: EnvironmentRecord
    agent: AgentRecord
    make_env: MakeEnv
    """Makes the environment in the agent's tool format."""
    settings: Mapping[str, Any]
    """Settings of the agent, with the model and what belongs to this machine."""
    protocol: Protocol
    episodes: Sequence[tuple[TaskEntry, int]]
    """Task and sample of each."""
    data: Path | None
    spent: Sequence[Usage] = ()
    """Usage of each before the run was resumed; empty if there is none."""

    @property
    def cell(self) -> tuple[str, str]:
        """Slugs of environment and agent."""
        return self.environment.slug, self.agent.slug


def run_chunk(chunk: Chunk) -> list[EpisodeResult]:
    """Run the episodes of a chunk, with retries after infrastructure failures."""
    agent = _agent(chunk.agent.kind, json.dumps(chunk.settings, sort_keys=True))
    done: dict[int, PlayedEpisode] = {}
    spent = list(chunk.spent) or [Usage()] * len(chunk.episodes)  # in all tries
    waiting = list(range(len(chunk.episodes)))
    for _ in range(1 + chunk.protocol.max_retries):
        episodes = agent.play(chunk.make_env, [_spec(chunk, index) for index in waiting])
        for index, episode in zip(waiting, episodes, strict=True):
            spent[index] += episode.usage
            done[index] = replace(episode, usage=spent[index])
        reasons = {index: done[index].trajectory.stop_reason for index in waiting}
        waiting = [index for index in waiting if reasons[index] in FAULTS]
        # The model's server, which retries each turn itself, is down.
        is_outage = len(waiting) == len(done) >= OUTAGE_EPISODES
        if not waiting or (is_outage and set(reasons.values()) == {StopReason.POLICY_ERROR}):
            break
    return [_result(chunk, *episode, done[i]) for i, episode in enumerate(chunk.episodes)]


@functools.lru_cache(maxsize=1)  # one model at a time
def _agent(kind: str, settings: str) -> Agent:
    return build_agent(kind, json.loads(settings))


def _spec(chunk: Chunk, index: int) -> EpisodeSpec:
    entry, sample = chunk.episodes[index]
    seed = episode_seed(chunk.protocol, entry.task, sample)
    rng = np.random.default_rng(seed)  # a retry begins with the same generator
    return EpisodeSpec(task=entry.task, seed=seed, group_id=str(entry.task), rng=rng)


def _result(chunk: Chunk, entry: TaskEntry, sample: int, episode: PlayedEpisode) -> EpisodeResult:
    usage = episode.usage
    environment, agent, trajectory = chunk.environment, chunk.agent, episode.trajectory
    steps, seal = trajectory.transitions, environment_seal(environment, chunk.data)
    seed = episode_seed(chunk.protocol, entry.task, sample)
    place = episode_place(environment, agent, task=entry.sha256, sample=sample, seed=seed)
    attempts = (trajectory, *episode.attempts)
    texts = [[step.action for step in attempt.transitions] for attempt in attempts]
    actions, *others = seal.close(texts, place)
    prices, tokens = agent.prices, (usage.prompt_tokens, usage.completion_tokens)
    return EpisodeResult(
        environment=environment.slug,
        agent=agent.slug,
        task=entry.task,
        sample=sample,
        success=trajectory.success,
        return_=trajectory.return_,
        stop_reason=trajectory.stop_reason,
        error=_error(trajectory, seal) if trajectory.stop_reason in FAULTS else None,
        calls=usage.calls,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        money=None if prices is None else prices.cost(*tokens),
        seconds=round(sum(sum(attempt.timings.values()) for attempt in attempts), 4),
        actions=actions,
        rewards=[float(step.reward) for step in steps],
        reward_terms=[as_floats(step.reward_terms) for step in steps],
        errors=[step.info.get("action", {}).get("error") for step in steps],
        metrics=as_floats(trajectory.metrics),
        attempts=others,
    )


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return values as they are recorded."""
    return {name: float(value) for name, value in values.items()}


def _error(trajectory: Trajectory, seal: Seal) -> str:
    """Return the last line of the traceback, which names no file of this machine.

    If text is sealed, only the exception's name: the message may quote the task.
    """
    text, reason = (trajectory.error or "").strip(), str(trajectory.stop_reason)
    if seal.key is not None:
        return next(reversed(_EXCEPTION.findall(text)), reason)
    last = text.splitlines()[-1] if text else reason
    return last.encode("utf-8", "backslashreplace").decode()


# Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """A replayed episode, with the text that results leave out."""

    entry: TaskEntry
    """The task as the environment gives it."""
    question: str
    answers: tuple[str, ...]
    """Gold answers."""
    attempts: Sequence[Sequence[str]]
    """Actions of the attempt that counts, then of each other attempt."""
    rounds: Sequence[Sequence[ReplayedStep]]
    """Reset and steps of the attempt that counts, then of each other attempt that was replayed."""
    tool_format: ToolFormat

    @property
    def steps(self) -> Sequence[ReplayedStep]:
        """The step of each action of the attempt that counts."""
        return self.rounds[0][1:]

    @property
    def last(self) -> ReplayedStep:
        """Its last step, or the reset."""
        return self.rounds[0][-1]


class Replayer:
    """Replays episodes of one agent in one environment."""

    def __init__(
        self,
        environment: EnvironmentRecord,
        agent: AgentRecord,
        protocol: Protocol,
        data: Path | None,
    ) -> None:
        """Make the environment, with the agent's tool format, if it is allowed."""
        self._records = environment, agent
        self._protocol = protocol
        self._env = recorded_environment(environment, agent.tool_format, data)()
        self._seal = environment_seal(environment, data)

    def replay(
        self, result: EpisodeResult, entry: TaskEntry, *, all_attempts: bool = False
    ) -> ReplayedEpisode:
        """Decrypt and replay the actions of an episode, or those of all its attempts."""
        seed = episode_seed(self._protocol, result.task, result.sample)
        place = episode_place(*self._records, task=entry.sha256, sample=result.sample, seed=seed)
        attempts = self._seal.open([result.actions, *result.attempts], place)
        replayed = attempts if all_attempts else attempts[:1]
        rounds = [list(replay(self._env, seed, result.task, actions)) for actions in replayed]
        env = tool_env(self._env)
        return ReplayedEpisode(
            entry=task_entry(result.task, env.task, self._seal),
            question=rounds[0][0].observation,
            answers=env.task.answers,
            attempts=attempts,
            rounds=rounds,
            tool_format=env.action_format,
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
