"""One episode of an environment of ours, as the adapters to other libraries run it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from agent_envs.core.tool_env import ENDLESS, ToolEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.control_strings import break_control_strings
from agent_envs.formats.openai_format import (
    ApiMessage,
    FunctionCall,
    action_text,
    native_messages,
    native_tools,
    text_messages,
)
from agent_envs.wrappers.awaited import awaited


class OwnEpisode:
    """An environment of ours and its current episode.

    `observation`, `reward`, `terminated`, `truncated` and `info` are those of the last turn;
    `episode_return`, `reward_terms` and `num_turns` are totals since the reset.
    """

    def __init__(
        self, id: str, kwargs: Mapping[str, Any], *, only_text_in: str | None = None
    ) -> None:
        """Make the environment, as ``gymnasium.make(id, **kwargs)`` does.

        `only_text_in` names a library whose loop only appends text to text.
        """
        self.id = id
        self.env: gym.Env[str, str] = awaited(gym.make(id, **kwargs))
        if not isinstance(self.env.unwrapped, ToolEnv):
            raise ConfigurationError(f"{id} is not an environment with tools (a ToolEnv).")
        self.format = self.env.unwrapped.action_format
        if only_text_in is not None:
            check_appends(id, self.env, only_text_in)
            if self.format.is_structured:
                raise ConfigurationError(
                    f"tool_format={self.format.name!r} needs structured calls, but {only_text_in} "
                    f"passes text only. Leave it out of {id}'s arguments: the prompt then says how "
                    "to call."
                )
        self.is_over = True

    def reset(self, *, seed: int | None = None, task: int | None = None) -> str:
        """Begin an episode; return the question."""
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
        """Take one model turn; return the observation."""
        if self.is_over:
            raise gym.error.ResetNeeded("The episode is over; reset before the next step.")
        self.observation, reward, self.terminated, self.truncated, self.info = self.env.step(action)
        self.reward = float(reward)
        self.episode_return += self.reward
        for name, value in self.info["reward_terms"].items():
            self.reward_terms[name] = self.reward_terms.get(name, 0.0) + value
        self.num_turns += 1
        self.is_over = self.terminated or self.truncated
        return self.observation

    def take_turn(self, content: str, calls: Sequence[FunctionCall] = ()) -> dict[str, Any]:
        """Take a chat model's turn: its text and structured calls; return its `summary`."""
        self.step(action_text(content, calls, self.format))
        return {"observation": self.observation, "reward": self.reward, **self.summary}

    def close(self) -> None:
        """Close the environment."""
        self.is_over = True
        self.env.close()

    @property
    def messages(self) -> list[ApiMessage]:
        """The state as chat messages; the first one describes tools that `tools` leaves out."""
        messages = self.info["messages"]
        if self.format.is_structured:
            return native_messages(messages)
        return text_messages(messages, self.info["tools"] if self.format.is_native else None)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools to send with `messages`, in the OpenAI format."""
        return native_tools(self.info["tools"]) if self.format.is_structured else []

    @property
    def replies(self) -> list[ApiMessage]:
        """The messages after the last turn; none where the task is over."""
        messages = self.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return messages[last + 1 :]

    @property
    def text(self) -> str:
        """The observation without control tokens, for libraries that apply a chat template."""
        return break_control_strings(self.observation, by="user" if self.num_turns else None)

    @property
    def opening(self) -> str:
        """The first messages as one text, for libraries without messages."""
        return "\n\n".join(message["content"] for message in self.messages)

    @property
    def totals(self) -> dict[str, float]:
        """The metrics, and the sum of each reward term as ``rewards/<term>``."""
        terms = {f"rewards/{name}": value for name, value in self.reward_terms.items()}
        return {**self.info.get("metrics", {}), **terms}

    @property
    def summary(self) -> dict[str, Any]:
        """The last turn as plain data that JSON can hold."""
        names = ("task_id", "action", "tool_result", "reward_terms", "metrics")
        known = {name: self.info[name] for name in names if name in self.info}
        return {**known, "terminated": self.terminated, "truncated": self.truncated}


def check_appends(id: str, env: gym.Env[Any, Any], library: str) -> None:
    """Refuse an environment whose states a loop that only appends cannot represent."""
    spec = env.unwrapped.spec  # that of a wrapper would be a copy of all arguments
    context = spec.kwargs.get("context", "full") if spec is not None else "full"
    if (context.get("name") if isinstance(context, Mapping) else context) != "full":
        raise ConfigurationError(
            f"context={context!r} has no effect in {library}'s loop, whose contexts only grow. "
            "Leave it out, or use StepGRPOTrainer."
        )
    if getattr(env.unwrapped, "num_questions", 1) > 1:
        raise ConfigurationError(
            f"{id} asks several questions in separate conversations, but the conversation in "
            f"{library}'s loop only grows. Pass questions=1, or use StepGRPOTrainer."
        )
    if not getattr(env.unwrapped, "only_appends", True):
        raise ConfigurationError(
            f"{id} has several conversations in turns, but the conversation in {library}'s loop "
            "only grows. Use StepGRPOTrainer."
        )


def draw_tasks(
    id: str, env: gym.Env[Any, Any], num_tasks: int | None, seed: int
) -> Iterator[tuple[int, int]]:
    """Yield task indices, each with a seed for its episodes.

    They are the first `num_tasks`, or all if None; of an endless family, ones drawn by `seed`.
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
