"""Replay of recorded episodes, with the text that results leave out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_envs.core.replay import ReplayedStep, replay
from agent_leaderboard.agents.agent import tool_env
from agent_leaderboard.play.environments import environment_seal, recorded_environment
from agent_leaderboard.play.tasks import task_entry
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import EpisodeResult, TaskEntry, episode_seed
from agent_leaderboard.records.sealing import episode_place


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """A replayed episode."""

    entry: TaskEntry
    """The task as the environment gives it."""
    question: str
    answers: tuple[str, ...]
    """Gold answers."""
    actions: Sequence[str]
    steps: Sequence[ReplayedStep]
    """The step of each action."""
    last: ReplayedStep
    """The last step, or the reset."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the episode."""
        metrics: dict[str, Any] = self.last.info.get("metrics", {})
        return {name: float(value) for name, value in metrics.items()}


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
        self._seal = environment_seal(environment, data)
        self._env = recorded_environment(environment, agent.tool_format, data)()

    def open(self, result: EpisodeResult, entry: TaskEntry) -> list[list[str]]:
        """Return the decrypted actions of an episode, then those of each other attempt."""
        seed = episode_seed(self._protocol, result.task, result.sample)
        place = episode_place(*self._records, task=entry.sha256, sample=result.sample, seed=seed)
        return self._seal.open([result.actions, *result.attempts], place)

    def replay(self, result: EpisodeResult, actions: Sequence[str]) -> ReplayedEpisode:
        """Replay the actions of an episode."""
        seed = episode_seed(self._protocol, result.task, result.sample)
        first, *steps = replay(self._env, seed, result.task, actions)
        task = tool_env(self._env).task
        return ReplayedEpisode(
            entry=task_entry(result.task, task, self._seal),
            question=first.observation,
            answers=task.answers,
            actions=actions,
            steps=steps,
            last=steps[-1] if steps else first,
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
