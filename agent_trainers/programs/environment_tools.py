"""Our environments for programs: their tools, tasks and rewards."""

import threading
from typing import Any, Self

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.async_bridge import resolve
from agent_envs.formats.actions import ParsedAction
from agent_trainers.programs.program import Outcome


class EnvironmentTools:
    """One episode of an environment as tools that any thread can call.

    Every call is a step of the environment, and so is the answer: its turn limit counts both.
    """

    def __init__(self, env_id: str, *, task: int, seed: int = 0, **kwargs: Any) -> None:
        """Make the environment `env_id` with `kwargs` and reset it to a task index."""
        self._env: Any = gym.make(env_id, **kwargs)
        self._inner: Any = self._env.unwrapped
        self._lock = threading.Lock()
        self.question, info = self._env.reset(seed=seed, options={"task": task})
        self.messages: list[dict[str, Any]] = list(info["messages"])
        """The system prompt and the question."""
        self.schemas: list[dict[str, Any]] = list(info["tools"])
        """The tools' schemas in the OpenAI format."""
        self.actions: list[str] = []
        """The actions so far, in the environment's tool format."""
        self._reward = 0.0
        self._metrics: dict[str, float] = {}
        self._is_over = self._is_truncated = False

    def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool; return its result, or the message for a wrong call."""
        return self._step(self._inner.write_call(name, **arguments))

    def reference_actions(self) -> list[str]:
        """Return actions that solve the task, where the environment knows them."""
        return list(self._inner.reference_actions())

    def read(self, turn: str) -> ParsedAction:
        """Parse a turn as the environment does: a call, an answer, or a mistake."""
        action: ParsedAction = self._inner.action_format.parse(turn, self._inner.tools)
        return action

    def outcome(self, answer: str | None) -> Outcome:
        """Give an answer, unless it is None, and return the outcome of the episode."""
        if answer is not None:
            self._step(self._inner.write_answer(answer))
        metrics = self._metrics or dict(self._inner.metrics())
        self.close()
        actions = tuple(self.actions)
        cut = self._is_truncated
        return Outcome(reward=self._reward, metrics=metrics, actions=actions, truncated=cut)

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, action: str) -> str:
        with self._lock:
            if self._is_over:
                return "The episode is over."
            self.actions.append(action)
            observation, reward, terminated, truncated, info = resolve(self._env.step(action))
            self._reward += float(reward)
            self._is_over = terminated or truncated
            self._is_truncated = truncated and not terminated
            if self._is_over:
                self._metrics = dict(info.get("metrics", {}))
            return str(observation)
