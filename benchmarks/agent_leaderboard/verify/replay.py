"""Play a recorded episode again: what was asked and said, and what it earns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import build_agent, tool_env
from agent_leaderboard.play.episodes import digest, environment_maker, withholds_actions
from agent_leaderboard.play.task_lists import task_labels, task_sha256
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord
from agent_leaderboard.records.results import ResultLine
from agent_trainers.rollout.collector import EpisodeSpec


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
        self._agent = agent
        self._is_withheld = withholds_actions(environment, agent)
        self._make_env = environment_maker(environment, agent.tool_format, data)
        self._env = self._make_env()

    def replay(self, line: ResultLine) -> ReplayedEpisode:
        """Play an episode again; where its actions are withheld, the agent is asked again.

        Raises:
            ConfigurationError: If there is no such task, actions go on after the end, or the agent
                acts otherwise than the recorded digests say.
        """
        if not self._is_withheld:
            return self.replay_actions(line.task, line.seed, line.actions)
        rng = np.random.default_rng(line.seed)
        spec = EpisodeSpec(task=line.task, seed=line.seed, group_id="", rng=rng)
        agent = build_agent(self._agent.kind, self._agent.settings)
        (episode,) = agent.play(self._make_env, [spec])
        if list(map(digest, episode.actions)) != line.actions:
            raise ConfigurationError(f"The agent {line.agent!r} acts otherwise than was recorded.")
        return self.replay_actions(line.task, line.seed, episode.actions)

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
            task_sha256=task_sha256(known),
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
