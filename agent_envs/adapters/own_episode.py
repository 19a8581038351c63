"""Episodes of one of our environments, as the environments of other libraries play them.

What all adapters of this direction share: how an environment is made and reset, what its state is
as the messages of a chat, what was said since the last turn, what a reply means as an action, and
what an episode earned in all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from agent_envs.core.tool_env import ENDLESS, ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.chat_messages import (
    ApiMessage,
    action_text,
    native_messages,
    native_tools,
    text_messages,
)
from agent_envs.formats.control_strings import break_control_strings
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.wrappers.awaited import awaited


class OwnEpisode:
    """An environment of ours and the episode under way in it.

    `observation`, `reward`, `terminated`, `truncated` and `info` are those of the last turn;
    `episode_return`, `reward_terms` and `num_turns` count from the reset on.
    """

    def __init__(
        self, id: str, kwargs: Mapping[str, Any], *, only_text_in: str | None = None
    ) -> None:
        """Make the environment, as ``gymnasium.make(id, **kwargs)`` does.

        Args:
            id: Its Gymnasium id.
            kwargs: Its other arguments.
            only_text_in: The library, where its loop appends text to text and hands on no more.

        Raises:
            ConfigurationError: If it has no tools, or its states cannot be those of such a loop.
        """
        self.id = id
        self.env: gym.Env[str, str] = awaited(gym.make(id, **kwargs))
        if not isinstance(self.env.unwrapped, ToolEnv):
            raise ConfigurationError(f"{id} is no environment with tools (a ToolEnv).")
        self._format = self.env.unwrapped.action_format
        if only_text_in is not None:
            check_appends(id, self.env, only_text_in)
            self._check_is_text(only_text_in)
        self.is_over = True

    def reset(self, *, seed: int | None = None, task: int | None = None) -> str:
        """Begin an episode; return the question.

        Args:
            seed: Seed of the environment, which draws the task if `task` is None.
            task: The task's index.
        """
        options = None if task is None else {"task": int(task)}
        self.observation, self.info = self.env.reset(
            seed=None if seed is None else int(seed), options=options
        )
        self.reward = self.episode_return = 0.0
        weights = self.env.unwrapped.reward_weights  # type: ignore[attr-defined]
        self.reward_terms: dict[str, float] = dict.fromkeys(weights, 0.0)
        self.num_turns = 0
        self.terminated = self.truncated = self.is_over = False
        return self.observation

    def step(self, action: str) -> str:
        """Take one model turn; return what the environment says to it.

        Raises:
            ResetNeeded: If the episode is over or none has begun.
        """
        if self.is_over:
            raise gym.error.ResetNeeded("The episode is over; begin one before the next step.")
        self.observation, reward, self.terminated, self.truncated, self.info = self.env.step(action)
        self.reward = float(reward)
        self.episode_return += self.reward
        for name, value in self.info["reward_terms"].items():
            self.reward_terms[name] = self.reward_terms.get(name, 0.0) + value
        self.num_turns += 1
        self.is_over = self.terminated or self.truncated
        return self.observation

    def close(self) -> None:
        """Close the environment."""
        self.is_over = True
        self.env.close()

    @property
    def messages(self) -> list[ApiMessage]:
        """The state as the messages of a chat; the first describes tools that are not sent."""
        messages = self.info["messages"]
        if self._format.is_structured:
            return native_messages(messages)
        return text_messages(messages, self.info["tools"] if self._format.is_native else None)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools to send with `messages`, in the OpenAI format; none where those say it all."""
        return native_tools(self.info["tools"]) if self._format.is_structured else []

    @property
    def replies(self) -> list[ApiMessage]:
        """What the environment said to the last turn, as messages: none where the task is over."""
        messages = self.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return messages[last + 1 :]

    @property
    def text(self) -> str:
        """The observation for whoever encodes it with a chat template: no control token in it."""
        return break_control_strings(self.observation)

    @property
    def opening(self) -> str:
        """The first messages as one text, for libraries that have no others: prompt, question."""
        return "\n\n".join(message["content"] for message in self.messages)

    @property
    def summary(self) -> dict[str, Any]:
        """What the last turn was, in plain data that JSON can hold."""
        names = ("task_id", "action", "tool_result", "reward_terms", "metrics")
        told = {name: self.info[name] for name in names if name in self.info}
        return {**told, "terminated": self.terminated, "truncated": self.truncated}

    def action(self, content: str, calls: Sequence[FunctionCall] = ()) -> str:
        """Return the reply of a chat as an action: what was said, and its structured calls."""
        return action_text(content, calls, self._format)

    def _check_is_text(self, library: str) -> None:
        if self._format.is_structured:
            raise ConfigurationError(
                f"tool_format={self._format.name!r} needs structured calls, but {library} hands on "
                f"text. Leave it out of {self.id}'s arguments: the prompt then says how to call."
            )


def check_appends(id: str, env: gym.Env[Any, Any], library: str) -> None:
    """Refuse an environment whose states are not those of a loop that appends all that is said.

    Raises:
        ConfigurationError: If its context forgets, or it asks several questions.
    """
    spec = env.unwrapped.spec  # that of a wrapper would be a copy of all arguments
    context = spec.kwargs.get("context", "full") if spec is not None else "full"
    if (context.get("name") if isinstance(context, Mapping) else context) != "full":
        raise ConfigurationError(
            f"context={context!r} does nothing in {library}'s loop, whose contexts only grow. "
            "Leave it out, or use StepGRPOTrainer."
        )
    if getattr(env.unwrapped, "num_questions", 1) > 1:
        raise ConfigurationError(
            f"{id} asks several questions, each in a conversation of its own, but the conversation "
            f"in {library}'s loop only grows. Pass questions=1, or use StepGRPOTrainer."
        )


def draw_tasks(
    id: str, env: gym.Env[Any, Any], num_tasks: int | None, seed: int
) -> Iterator[tuple[int, int]]:
    """Yield the index of each task to play and a seed for its episodes.

    Args:
        id: The environment's, for errors.
        env: The environment.
        num_tasks: How many: the first of the environment, all of them if None; of an endless family
            that many, drawn by `seed`.
        seed: Seed of what is drawn here.

    Raises:
        ConfigurationError: If `num_tasks` is not to be had.
    """
    limit: int | None = env.unwrapped.num_tasks  # type: ignore[attr-defined]
    num_tasks = limit if num_tasks is None else num_tasks
    if num_tasks is None or not 1 <= num_tasks <= (limit or ENDLESS):
        raise ConfigurationError(
            f"num_tasks must be 1 to {limit or ENDLESS} for {id}, not {num_tasks}."
        )
    rng = np.random.default_rng(seed)
    tasks = range(num_tasks) if limit else rng.integers(ENDLESS, size=num_tasks).tolist()
    yield from zip(tasks, rng.integers(2**31, size=num_tasks).tolist(), strict=True)
