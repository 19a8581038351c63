"""Play a chunk of episodes and write them down as result lines.

A chunk is what runs at once. A run that was interrupted goes on at the beginning of a chunk, so
that the same episodes stand in the same batches, and an agent on a model writes the same.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np

from agent_leaderboard.agents.agent import Agent, PlayedEpisode, build_agent
from agent_leaderboard.play.config import EnvironmentConfig, fill_in
from agent_leaderboard.play.data_files import data_path
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import LineUsage, ResultLine, TaskEntry
from agent_leaderboard.records.sealing import Seal, data_seal, episode_place
from agent_trainers.policies import Usage
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

OUTAGE_EPISODES: Final = 6
"""So many faults in a row, and none scored between them, are an outage; more than `check` plays."""
_RAISED: Final = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+([\w.]+)(?=:|$)", re.MULTILINE
)
"""The exception's name in a traceback: the first line after those of the stack."""
FAULTS: Final = (StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT, StopReason.POLICY_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Episodes of one agent in one environment that are played together."""

    environment: EnvironmentRecord
    agent: AgentRecord
    agent_settings: Mapping[str, Any]
    """Settings as the agent gets them: with the model, and what belongs to this machine."""
    protocol: Protocol
    episodes: Sequence[tuple[TaskEntry, int]]
    """Task and sample of each."""
    data: Path | None
    """The data folder."""


@dataclass(frozen=True, slots=True)
class TimedLine:
    """An episode as it is written, and how long it took."""

    line: ResultLine
    seconds: float


def list_episodes(entries: Sequence[TaskEntry], protocol: Protocol) -> list[tuple[TaskEntry, int]]:
    """Return every episode of a task list, in the order in which results are written."""
    return [(entry, sample) for entry in entries for sample in range(protocol.samples_per_task)]


def episode_seed(protocol: Protocol, task: int, sample: int) -> int:
    """Return the seed of an episode: the same for every agent."""
    return int(np.random.SeedSequence([protocol.seed, task, sample]).generate_state(1)[0] >> 1)


def environment_maker(
    environment: EnvironmentRecord | EnvironmentConfig, tool_format: str | None, data: Path | None
) -> Callable[[], TextEnv]:
    """Return what makes an environment of a run, in an agent's tool format or its own.

    Raises:
        ConfigurationError: If the environment reads data and there is no data folder.
    """
    kwargs = fill_in(environment.kwargs, data)
    if tool_format is not None:
        kwargs["tool_format"] = tool_format
    return functools.partial(gym.make, environment.id, **kwargs)


def check_chunk(chunk: Chunk) -> None:
    """See that the agent can play the environment; no model is loaded for it.

    Raises:
        ConfigurationError: If it cannot, or a setting is wrong.
    """
    agent = build_agent(chunk.agent.kind, chunk.agent_settings)
    agent.check(environment_maker(chunk.environment, chunk.agent.tool_format, chunk.data))


def play_chunk(chunk: Chunk) -> list[TimedLine]:
    """Play the episodes; those that an infrastructure fault ended are played again."""
    return [
        TimedLine(_line(chunk, index, episode, usage), _seconds(episode))
        for index, (episode, usage) in enumerate(play_episodes(chunk))
    ]


def play_episodes(chunk: Chunk) -> list[tuple[PlayedEpisode, Usage]]:
    """Play the episodes of a chunk; return each, and what all of its tries cost."""
    make_env = environment_maker(chunk.environment, chunk.agent.tool_format, chunk.data)
    agent = _agent(chunk.agent.kind, json.dumps(chunk.agent_settings, sort_keys=True))
    played: dict[int, tuple[PlayedEpisode, Usage]] = {}
    waiting = list(range(len(chunk.episodes)))
    for _ in range(1 + chunk.protocol.max_retries):
        episodes = agent.play(make_env, [_spec(chunk, index) for index in waiting])
        for index, episode in zip(waiting, episodes, strict=True):
            spent = played[index][1] if index in played else Usage()
            played[index] = episode, spent + episode.usage
        waiting = [i for i in waiting if played[i][0].trajectory.stop_reason in FAULTS]
        if not waiting or _is_away([played[i][0] for i in waiting], len(played)):
            break
    return [played[index] for index in range(len(chunk.episodes))]


def _is_away(failed: Sequence[PlayedEpisode], num_episodes: int) -> bool:
    """Return whether the model's server is away, which has been asked again for each turn."""
    reasons = {episode.trajectory.stop_reason for episode in failed}
    is_outage = len(failed) == num_episodes >= OUTAGE_EPISODES
    return is_outage and reasons == {StopReason.POLICY_ERROR}


def environment_seal(environment: EnvironmentRecord, data: Path | None) -> Seal:
    """Return what seals what is written about an environment's tasks: nothing where it is public.

    Raises:
        DataError: If a data file of the run cannot be read.
    """
    if environment.is_text_public:
        return Seal()
    return _seal_of(tuple(data_path(file.name, data) for file in environment.data))


@functools.lru_cache
def _seal_of(paths: tuple[Path, ...]) -> Seal:
    return data_seal(paths)


@functools.lru_cache(maxsize=1)  # a model at a time
def _agent(kind: str, settings: str) -> Agent:
    return build_agent(kind, json.loads(settings))


def _spec(chunk: Chunk, index: int) -> EpisodeSpec:
    entry, sample = chunk.episodes[index]
    seed = episode_seed(chunk.protocol, entry.task, sample)
    return EpisodeSpec(
        task=entry.task,
        seed=seed,
        group_id=str(entry.task),
        rng=np.random.default_rng(seed),  # a new one for each try: it begins where the first did
    )


def _line(chunk: Chunk, index: int, episode: PlayedEpisode, usage: Usage) -> ResultLine:
    entry, sample = chunk.episodes[index]
    trajectory, prices = episode.trajectory, chunk.agent.prices
    steps, seal = trajectory.transitions, environment_seal(chunk.environment, chunk.data)
    seed = episode_seed(chunk.protocol, entry.task, sample)
    place = episode_place(
        chunk.environment, chunk.agent, task=entry.sha256, sample=sample, seed=seed
    )
    others = ([step.action for step in attempt.transitions] for attempt in episode.attempts)
    actions, *attempts = seal.close([episode.actions, *others], place)
    return ResultLine(
        environment=chunk.environment.slug,
        agent=chunk.agent.slug,
        task=entry.task,
        task_id=entry.task_id,
        task_sha256=entry.sha256,
        sample=sample,
        seed=seed,
        actions=actions,
        rewards=[float(step.reward) for step in steps],
        reward_terms=[_floats(step.reward_terms) for step in steps],
        errors=[step.info.get("action", {}).get("error") for step in steps],
        metrics=_floats(trajectory.metrics),
        return_=trajectory.return_,
        success=trajectory.success,
        stop_reason=trajectory.stop_reason,
        error=_fault(trajectory, seal) if trajectory.stop_reason in FAULTS else None,
        attempts=attempts,
        usage=LineUsage(
            calls=usage.calls,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            money=None
            if prices is None
            else prices.cost(usage.prompt_tokens, usage.completion_tokens),
        ),
        labels=dict(entry.labels),
    )


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _fault(trajectory: Trajectory, seal: Seal) -> str:
    """Return what failed: the last line of the traceback, which names no file of this machine.

    Where text is sealed the exception's name alone: its message, of any number of lines, may quote
    the task.
    """
    text, reason = (trajectory.error or "").strip(), str(trajectory.stop_reason)
    if seal.key is None:
        return text.splitlines()[-1] if text else reason
    named = _RAISED.findall(text)
    return named[-1] if named else reason


def _seconds(episode: PlayedEpisode) -> float:
    attempts = (episode.trajectory, *episode.attempts)
    return round(sum(sum(attempt.timings.values()) for attempt in attempts), 4)
