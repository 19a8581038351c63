"""Replay of recorded episodes, with the text that results leave out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_envs.core.replay import replay
from agent_leaderboard.agents.agent import tool_env
from agent_leaderboard.play.environments import environment_seal, recorded_environment
from agent_leaderboard.play.tasks import task_entry
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Protocol
from agent_leaderboard.records.results import EpisodeResult, TaskEntry, episode_seed
from agent_leaderboard.records.sealing import episode_place


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One turn."""

    action: str
    observation: str
    parsed: dict[str, Any]
    """``info["action"]``: tool and arguments, the answer, or the error."""
    reward: float
    reward_terms: dict[str, float]

    @property
    def error(self) -> str | None:
        """Error code of the turn."""
        code: str | None = self.parsed.get("error")
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """A replayed episode."""

    entry: TaskEntry
    """The task as the environment gives it."""
    question: str
    answers: tuple[str, ...]
    """Gold answers."""
    messages: list[dict[str, Any]]
    """The first state: system prompt and question."""
    steps: list[ReplayedStep]
    metrics: dict[str, float]
    terminated: bool
    truncated: bool


class Replayer:
    """Replays episodes of one agent in one environment."""

    def __init__(
        self,
        environment: EnvironmentRecord,
        agent: AgentRecord,
        protocol: Protocol,
        data: Path | None,
    ) -> None:
        """Make the environment, with the agent's tool format.

        Raises:
            AgentEnvsError: If that is impossible or not allowed.
        """
        self._records = environment, agent
        self._protocol = protocol
        self._seal = environment_seal(environment, data)
        self._env = recorded_environment(environment, agent.tool_format, data)()

    def open(self, result: EpisodeResult, entry: TaskEntry) -> list[list[str]]:
        """Return the decrypted actions of an episode, then those of each other attempt.

        Raises:
            DataError: If they were sealed with other data, or for another place.
        """
        seed = episode_seed(self._protocol, result.task, result.sample)
        place = episode_place(*self._records, task=entry.sha256, sample=result.sample, seed=seed)
        return self._seal.open([result.actions, *result.attempts], place)

    def replay(self, result: EpisodeResult, actions: Sequence[str]) -> ReplayedEpisode:
        """Replay the actions of an episode.

        Raises:
            AgentEnvsError: If there is no such task, or actions follow the end.
        """
        seed = episode_seed(self._protocol, result.task, result.sample)
        results = replay(self._env, seed, result.task, actions)
        last = next(results)
        question, first = last.observation, [dict(message) for message in last.info["messages"]]
        steps: list[ReplayedStep] = []
        for action, last in zip(actions, results, strict=True):
            steps.append(
                ReplayedStep(
                    action=action,
                    observation=last.observation,
                    parsed=last.info["action"],
                    reward=float(last.reward),
                    reward_terms={k: float(v) for k, v in last.info["reward_terms"].items()},
                )
            )
        task = tool_env(self._env).task
        return ReplayedEpisode(
            entry=task_entry(result.task, task, self._seal),
            question=question,
            answers=task.answers,
            messages=first,
            steps=steps,
            metrics={k: float(v) for k, v in last.info.get("metrics", {}).items()},
            terminated=last.terminated,
            truncated=last.truncated,
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
