"""Environments of other libraries as environments of ours: text in, text out."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agent_envs.core.messages import Message
from agent_envs.core.own_random import OwnRandom
from agent_envs.core.snapshots import RestorableEnv
from agent_envs.core.spaces import UnicodeText
from agent_envs.core.tasks import ENDLESS, choose_task
from agent_envs.core.tool_env import check_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of an action in an environment of another library."""

    text: str
    """The observation."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    action: str | None = None
    """The action as the library records it, where that differs from the written one."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class ForeignEnv(RestorableEnv):
    """Base of the environments that wrap those of other libraries; `info` is as for a `ToolEnv`.

    Their prompts describe their tools, so ``info["tools"]`` is empty.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    draws_globally: ClassVar[bool] = False
    """Whether the library draws from the process's global generators."""
    num_tasks: int | None = None
    """Number of tasks; None where a task is a seed."""

    def __init__(self, name: str) -> None:
        """Set up what all episodes share; `name` is the prefix of the task ids."""
        self._name = name
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._random = OwnRandom()
        self._messages: list[Message] = []
        self._return, self._num_turns = 0.0, 0
        self._is_over = True

    @abstractmethod
    def begin(self, task: int) -> Sequence[Message]:
        """Begin the episode of a task; return its first messages, the last of the user.

        Where a task is a seed, it is passed to the library's reset.
        """

    @abstractmethod
    def act(self, action: str) -> Reply:
        """Take one model turn."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        options = options or {}
        if self.num_tasks is None and seed is not None and options.get("task") is None:
            options = options | {"task": seed % ENDLESS}
        self._task = choose_task(options, self)
        with self._own_random(self._task):
            self._messages = list(self.begin(self._task))
        self._return, self._num_turns, self._is_over = 0.0, 0, False
        return self._messages[-1]["content"], self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn."""
        check_turn(action, is_over=self._is_over)
        with self._own_random():
            reply = self.act(action)
        reward = float(reply.reward)
        self._return += reward
        self._num_turns += 1
        self._is_over = reply.terminated or reply.truncated
        is_silent_end = self._is_over and not reply.text
        recorded = action if reply.action is None else reply.action
        self._messages.append(Message(role="assistant", content=recorded))
        if not is_silent_end:
            self._messages.append(Message(role="user", content=reply.text))
        info = self._info() | {
            "action": {"kind": "message", "text": action},
            "reward_terms": {"reward": reward},
            "metrics": {
                "return": self._return, "num_turns": float(self._num_turns), **reply.metrics
            },
        }  # fmt: skip
        return reply.text, reward, reply.terminated, reply.truncated, info

    def _own_random(self, seed: int | None = None) -> AbstractContextManager[None]:
        return self._random.installed(seed) if self.draws_globally else nullcontext()

    def _info(self) -> dict[str, Any]:
        messages = [message.copy() for message in self._messages]
        return {"messages": messages, "tools": [], "task_id": f"{self._name}-{self._task}"}
