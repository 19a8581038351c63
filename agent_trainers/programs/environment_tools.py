"""Our environments for programs: their tools, tasks and rewards."""

import threading
from typing import Any

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.formats.actions import ParsedAction
from agent_trainers.programs.program import Outcome


class EnvironmentTools:
    """One episode of an environment as tools that any thread can call.

    Every call is a step of the environment, and so is the answer: its turn limit counts both.
    """

    def __init__(self, env_id: str, *, task: int, seed: int = 0, **kwargs: Any) -> None:
        """Make the environment `env_id` with `kwargs` and reset it to a task index."""
        self._episode = OwnEpisode(env_id, kwargs)
        self._env: Any = self._episode.env.unwrapped
        self._lock = threading.Lock()
        self.question = self._episode.reset(seed=seed, task=task)
        self.messages: list[dict[str, Any]] = list(self._episode.info["messages"])
        """The system prompt and the question."""
        self.schemas: list[dict[str, Any]] = list(self._episode.info["tools"])
        """The tools' schemas in the OpenAI format."""

    def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool; return its result, or the message for a wrong call."""
        return self._step(self._env.write_call(name, **arguments))

    def reference_actions(self) -> list[str]:
        """Return actions that solve the task, where the environment knows them."""
        return list(self._env.reference_actions())

    def read(self, turn: str) -> ParsedAction:
        """Parse a turn as the environment does: a call, an answer, or a mistake."""
        return self._episode.format.parse(turn, self._env.tools)

    def outcome(self, answer: str | None) -> Outcome:
        """Give an answer, unless it is None, and return the outcome of the episode."""
        if answer is not None:
            self._step(self._env.write_answer(answer))
        episode = self._episode
        metrics = episode.info["metrics"] if episode.is_over else dict(self._env.metrics())
        self.close()
        return Outcome(
            reward=episode.episode_return,
            metrics=metrics,
            truncated=episode.truncated and not episode.terminated,
        )

    def close(self) -> None:
        self._episode.close()

    def _step(self, action: str) -> str:
        with self._lock:
            if self._episode.is_over:
                return "The episode is over."
            return self._episode.step(action)
