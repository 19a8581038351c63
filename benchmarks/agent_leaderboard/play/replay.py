"""Play a recorded episode again: what was asked and said, and what it earns."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import tool_env
from agent_leaderboard.play.episodes import environment_maker, environment_seal
from agent_leaderboard.play.task_lists import task_labels, task_sha256
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.records.sealing import episode_place


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One turn."""

    action: str
    observation: str
    """What the environment said to it."""
    understood: dict[str, Any]
    """``info["action"]``: tool and arguments, the answer, or what was wrong."""
    tool_result: str | None
    reward: float
    reward_terms: dict[str, float]

    @property
    def error(self) -> str | None:
        """The code of the mistake."""
        code: str | None = self.understood.get("error")
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """An episode as it was played, with the text that results leave out."""

    task_id: str
    task_sha256: str
    labels: dict[str, str | int]
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
    """Plays recorded episodes of one environment and one tool format."""

    def __init__(
        self, environment: EnvironmentRecord, agent: AgentRecord, data: Path | None
    ) -> None:
        """Make the environment; the agent's tool format says how its actions are read.

        Raises:
            AgentEnvsError: If the environment cannot be made, for want of data for example.
        """
        self.seal = environment_seal(environment, data)
        self._place = functools.partial(episode_place, environment, agent)
        self._env = environment_maker(environment, agent.tool_format, data)()

    def replay(self, line: ResultLine) -> ReplayedEpisode:
        """Play an episode again.

        Raises:
            DataError: If its actions are sealed with other data, or for another place.
            ConfigurationError: If there is no such task, or actions go on after the end.
        """
        actions, *_ = self.open(line)
        return self.replay_actions(line.task, line.seed, actions)

    def open(self, line: ResultLine) -> list[list[str]]:
        """Return what was written in an episode: its actions, then those of each other attempt.

        Raises:
            DataError: If it is sealed with other data, or for another place.
        """
        place = self._place(task=line.task_sha256, sample=line.sample, seed=line.seed)
        return self.seal.open([line.actions, *line.attempts], place)

    def replay_actions(self, task: int, seed: int, actions: Sequence[str]) -> ReplayedEpisode:
        """Play these actions.

        Raises:
            ConfigurationError: If there is no such task, or actions go on after the end.
        """
        question, info = self._env.reset(seed=seed, options={"task": task})
        first, known = info["messages"], tool_env(self._env).task
        steps: list[ReplayedStep] = []
        terminated = truncated = False
        for number, action in enumerate(actions, start=1):
            if terminated or truncated:
                raise ConfigurationError(f"the episode is over before action {number}")
            observation, reward, terminated, truncated, info = self._env.step(action)
            steps.append(
                ReplayedStep(
                    action=action,
                    observation=observation,
                    understood=info["action"],
                    tool_result=info["tool_result"],
                    reward=float(reward),
                    reward_terms={k: float(v) for k, v in info["reward_terms"].items()},
                )
            )
        return ReplayedEpisode(
            task_id=known.id,
            task_sha256=task_sha256(known, self.seal),
            labels=task_labels(known),
            question=question,
            answers=known.answers,
            messages=[dict(message) for message in first],
            steps=steps,
            metrics={k: float(v) for k, v in info.get("metrics", {}).items()},
            terminated=terminated,
            truncated=truncated,
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
