"""States as observations and actions as numbers, for libraries that ignore `info` or write no text.

The observation of a `ToolEnv` is its last reply; the state is ``info["messages"]``. With
`ConversationObservation` the observation is the state, as text, and with `TokenObservation` around
that an array of token ids. `MenuActions` makes the index of a text the action. With all three both
sides are numbers, as Stable-Baselines3 and CleanRL need them.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import RecordConstructorArgs

from agent_envs.core.messages import Message
from agent_envs.core.spaces import UnicodeText
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError

Menu = Callable[[dict[str, Any]], Sequence[str]]

NO_CHOICE: Final = ""
"""The action of a number without a text: a mistake, to which the environment replies."""


def render_messages(messages: Sequence[Message]) -> str:
    r"""Write messages as JSON, one a line: ``{"role": "user", "content": "..."}``.

    No content can be confused with another message: JSON escapes line breaks.
    """
    return "\n".join(json.dumps(message, ensure_ascii=False) for message in messages)


class _StateWrapper(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    @abstractmethod
    def _observe(self, observation: Any, info: dict[str, Any]) -> Any:
        """Return the observation of a state; `info` may be changed."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._observe(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._observe(observation, info), reward, terminated, truncated, info


class ConversationObservation(_StateWrapper):
    """Makes ``info["messages"]``, the state, the observation."""

    def __init__(self, env: gym.Env[str, str]) -> None:
        """Wrap `env`, whose info holds ``messages``."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.observation_space = UnicodeText()

    def _observe(self, observation: Any, info: dict[str, Any]) -> str:
        return render_messages(info["messages"])


class TokenObservation(_StateWrapper):
    """Encodes text observations as an array of token ids of fixed length.

    Shorter ones are padded at the end; of longer ones the last tokens are kept, and
    ``info["num_cut_tokens"]`` counts the others. Choose `max_length` for the longest episode, or a
    ``context`` that stays below it.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        encode: Callable[[str], Sequence[int]],
        *,
        max_length: int,
        num_tokens: int | None = None,
        pad_id: int = 0,
    ) -> None:
        """Wrap `env`.

        Args:
            env: An environment whose observations are text.
            encode: Converts a text to token ids; or a tokenizer of ``transformers``, which then
                adds no special tokens and splits those in the text.
            max_length: Length of an observation, in tokens.
            num_tokens: Number of token ids; that of the tokenizer if not given.
            pad_id: Padding token.
        """
        RecordConstructorArgs.__init__(
            self, encode=encode, max_length=max_length, num_tokens=num_tokens, pad_id=pad_id
        )
        super().__init__(env)
        tokenizer: Any = encode
        self._encode, self._is_tokenizer = tokenizer, hasattr(encode, "split_special_tokens")
        if num_tokens is None and not self._is_tokenizer:
            raise ConfigurationError("num_tokens is missing; a function encode= needs it.")
        size = len(tokenizer) if num_tokens is None else num_tokens
        self._max_length, self._pad_id = max_length, pad_id
        self.observation_space = gym.spaces.Box(0, size - 1, (max_length,), np.int64)

    def _observe(self, observation: Any, info: dict[str, Any]) -> npt.NDArray[np.int64]:
        if self._is_tokenizer:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            ids = self._encode(observation, **options)["input_ids"]
        else:
            ids = list(self._encode(observation))
        tokens = np.full(self._max_length, self._pad_id, np.int64)
        kept = np.asarray(ids, np.int64)[-self._max_length :]
        tokens[: len(kept)] = kept
        if num_cut := len(ids) - len(kept):
            info["num_cut_tokens"] = num_cut
        return tokens


class MenuActions(_StateWrapper):
    """Makes the index of a text in a menu the action.

    ``info["menu"]`` holds the texts and ``info["action_mask"]``, shape (size,), int8, the valid
    indices; `action_masks` returns the mask as booleans, for sb3-contrib's MaskablePPO. An invalid
    index is an empty action.
    """

    def __init__(self, env: gym.Env[Any, str], menu: Sequence[str] | Menu, *, size: int) -> None:
        """Wrap `env`.

        Args:
            env: An environment whose actions are text.
            menu: The texts, or a function of the state's `info` that returns them.
            size: The number of actions; texts beyond it are left out.
        """
        RecordConstructorArgs.__init__(self, menu=menu, size=size)
        super().__init__(env)
        self._menu, self._size = menu, size
        self._choices: list[str] = []
        self._observed_episode: Any = None
        self.action_space = gym.spaces.Discrete(size)

    def step(self, action: np.int64) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take the turn with index `action`."""
        if not isinstance(action, int | np.integer) or not 0 <= action < self._size:
            raise ConfigurationError(f"An action is 0 to {self._size - 1}, not {action!r}.")
        self._follow_restored_state()
        text = self._choices[int(action)] if int(action) < len(self._choices) else NO_CHOICE
        return super().step(text)

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return the valid indices of this state, shape (size,)."""
        self._follow_restored_state()
        return self._mask()

    def _follow_restored_state(self) -> None:
        """Choose the texts again if the environment was restored since they were chosen."""
        base, known = self.unwrapped, self._observed_episode
        if known is not None and isinstance(base, ToolEnv) and self._episode() != known:
            self._observe(None, base.state)

    def _episode(self) -> Any:
        base = self.unwrapped
        if not isinstance(base, ToolEnv):
            return None
        return base.task_index, base.num_turns, *map(tuple, base.episode_texts)

    def _mask(self) -> npt.NDArray[np.bool_]:
        return np.arange(self._size) < len(self._choices)

    def _observe(self, observation: Any, info: dict[str, Any]) -> Any:
        choices = self._menu(info) if callable(self._menu) else self._menu
        self._choices = list(choices)[: self._size]
        self._observed_episode = self._episode()
        info |= {"menu": list(self._choices), "action_mask": self._mask().astype(np.int8)}
        return observation
