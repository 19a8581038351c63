"""What was said in a recorded episode, found by playing its actions again."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gymnasium as gym

from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import DataError
from benchmarks.leaderboard.episodes import EpisodeText, StepText
from benchmarks.leaderboard.playing import environment_maker
from benchmarks.leaderboard.run_folder import AgentRecord, EnvironmentRecord, ResultLine


class TextReplay:
    """Plays recorded episodes; keeps the environment of the last one."""

    def __init__(self, data: Path | None) -> None:
        """Play with the data sets below the folder `data`; None where none is needed."""
        self._data = data
        self._key: tuple[str, str | None] | None = None
        self._env: gym.Env[str, str] | None = None

    def __call__(
        self, environment: EnvironmentRecord, agent: AgentRecord, line: ResultLine
    ) -> EpisodeText:
        """Play an episode again.

        Raises:
            DataError: If it does not go as it was recorded: other data, another version.
        """
        env = self._open(environment, agent.tool_format)
        question, info = env.reset(seed=line.seed, options={"task": line.task})
        steps = []
        for number, (action, recorded) in enumerate(
            zip(line.actions, line.rewards, strict=True), start=1
        ):
            observation, reward, _, _, info = env.step(action)
            if reward != recorded:
                raise DataError(
                    f"step {number} earned {reward:g} here and {recorded:g} when it was recorded."
                )
            steps.append(StepText(action=_action(info), observation=observation))
        base = env.unwrapped
        answers = base.task.answers if isinstance(base, ToolEnv) else ()
        return EpisodeText(question=question, answers=answers, steps=steps)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the environment."""
        self._close()

    def _open(self, environment: EnvironmentRecord, tool_format: str | None) -> gym.Env[str, str]:
        if self._env is None or self._key != (environment.slug, tool_format):
            self._close()
            self._env = environment_maker(environment, tool_format, self._data)()
            self._key = environment.slug, tool_format
        return self._env

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = self._key = None


def _action(info: Mapping[str, Any]) -> dict[str, Any]:
    action = info.get("action") or {}
    return {key: action[key] for key in ("name", "arguments", "answer", "error") if key in action}
