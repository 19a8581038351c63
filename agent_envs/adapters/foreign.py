"""Environments of other libraries as environments of ours: text in, text out.

`ForeignEnv` keeps what they lack: the conversation as ``info["messages"]``, reward terms, tasks
drawn by Gymnasium's seeds, and generators of their own for those that draw from the global ones.
"""

import random
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.core.snapshots import RestorableEnv
from agent_envs.core.spaces import UnicodeText, check_turn
from agent_envs.core.tasks import ENDLESS
from agent_envs.errors import ConfigurationError

_GLOBAL_RANDOM: Final = threading.RLock()
"""Held while the process's generators are those of one environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment of another library said to an action."""

    text: str
    """The observation."""
    reward: float = 0.0
    reward_terms: Mapping[str, float] | None = None
    """What the reward is made of; None where the library does not say."""
    terminated: bool = False
    truncated: bool = False
    said: str | None = None
    """The action as the library wants it remembered, where that is not as it was written."""
    is_state: bool = False
    """Whether the text is the whole state, instead of what follows in the conversation."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class ForeignEnv(RestorableEnv):
    """Base of the environments that play those of other libraries.

    `info` holds ``messages``, ``tools`` (none: their prompts say what they take), ``task_id``, and
    after a step ``action``, ``reward_terms`` and ``metrics``, as those of a `ToolEnv`. An action
    goes to the other side as it was written; what that says to it is the observation.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    draws_globally: ClassVar[bool] = False
    """Whether the library draws from the generators that all of a process share."""
    num_tasks: int | None = None
    """How many tasks there are; None where a task is a seed."""

    def __init__(self, name: str) -> None:
        """Set up what all episodes share; `name` is the beginning of their tasks' ids."""
        self._name = name
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._random = GlobalRandom()
        self._messages: list[Message] = []
        self._return, self._num_turns = 0.0, 0
        self._is_over = True

    @abstractmethod
    def begin(self, task: int) -> Sequence[Message]:
        """Begin the episode of a task; return its first messages, the last of the user.

        Where a task is a seed, it is the one for the other library's reset.
        """

    @abstractmethod
    def act(self, action: str) -> Reply:
        """Take one model turn."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Seed of `np_random`, which draws one of so many tasks; where a task is a seed, the
                seed itself.
            options: ``{"task": index}`` for one given task.

        Raises:
            ConfigurationError: If an option is unknown or the task does not exist.
        """
        super().reset(seed=seed)
        self._task = self._choose(seed, dict(options or {}))
        with self._own_random(self._task):
            self._messages = list(self.begin(self._task))
        self._return, self._num_turns, self._is_over = 0.0, 0, False
        return self._messages[-1]["content"], self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one model turn; `truncated` is as the other library says it.

        Raises:
            ResetNeeded: If the episode is over or none has begun.
            ActionTypeError: If `action` is not a string.
        """
        check_turn(action, is_over=self._is_over)
        with self._own_random():
            reply = self.act(action)
        reward = float(reply.reward)
        self._return += reward
        self._num_turns += 1
        self._is_over = reply.terminated or reply.truncated
        is_last_word = self._is_over and not reply.text
        replies = [] if is_last_word else [Message(role="user", content=reply.text)]
        if reply.is_state:
            self._messages = replies
        else:
            said = action if reply.said is None else reply.said
            self._messages += [Message(role="assistant", content=said), *replies]
        terms = {"reward": reward} if reply.reward_terms is None else dict(reply.reward_terms)
        metrics = {"return": self._return, "num_turns": float(self._num_turns), **reply.metrics}
        said_by_model = {"kind": "message", "text": action}
        told = {"action": said_by_model, "reward_terms": terms, "metrics": metrics}
        return reply.text, reward, reply.terminated, reply.truncated, self._info() | told

    def _own_random(self, seed: int | None = None) -> AbstractContextManager[None]:
        return self._random.installed(seed) if self.draws_globally else nullcontext()

    def _choose(self, seed: int | None, options: dict[str, Any]) -> int:
        task = options.pop("task", None)
        if options:
            raise ConfigurationError(f"Unknown options: {', '.join(options)}. There is: task.")
        limit = ENDLESS if self.num_tasks is None else self.num_tasks
        if task is None and self.num_tasks is None and seed is not None:
            return seed % limit
        if task is None:
            return int(self.np_random.integers(limit))
        if not isinstance(task, int | np.integer) or not 0 <= task < limit:
            raise ConfigurationError(f"Task {task!r} is not one of 0 to {limit - 1}.")
        return int(task)

    def _info(self) -> dict[str, Any]:
        messages = [message.copy() for message in self._messages]
        return {"messages": messages, "tools": [], "task_id": f"{self._name}-{self._task}"}


class GlobalRandom:
    """Generators of one environment, in the place of the global ones while it computes.

    Libraries that draw from `random` and ``numpy.random`` share them with all other environments of
    the process: an episode then depends on what the others do. Threads take turns.
    """

    def __init__(self) -> None:
        """Begin with unseeded generators."""
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def installed(self, seed: int | None = None) -> Iterator[None]:
        """Make them the global ones, seeded if `seed` is given; put the others back at the end."""
        with _GLOBAL_RANDOM:
            others = _state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)  # noqa: NPY002 - what the other library draws from
            elif self._state is not None:
                _set_state(self._state)
            try:
                yield
            finally:
                self._state = _state()
                _set_state(others)


def _state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - as above


def _set_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - as above
