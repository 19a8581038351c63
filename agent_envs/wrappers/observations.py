"""The whole state as the observation, for libraries that ignore `info`.

The observation of a `ToolEnv` is its last reply; the state is ``info["messages"]``. With
`ConversationObservation` the observation is the state, as text, and with `TokenObservation` around
that an array of token ids.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import RecordConstructorArgs

from agent_envs.core.messages import Message
from agent_envs.core.spaces import UnicodeText
from agent_envs.errors import ConfigurationError

Render = Callable[[Sequence[Message]], str]
Tokens = npt.NDArray[np.int64]


def render_messages(messages: Sequence[Message]) -> str:
    r"""Write messages as JSON, one a line: ``{"role": "user", "content": "..."}``.

    No content can be confused with another message: JSON escapes line breaks.
    """
    return "\n".join(json.dumps(message, ensure_ascii=False) for message in messages)


class ConversationObservation(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Makes ``info["messages"]``, the state, the observation."""

    def __init__(self, env: gym.Env[str, str], render: Render = render_messages) -> None:
        """Wrap `env`.

        Args:
            env: An environment whose info holds ``messages``.
            render: Converts messages to one text.
        """
        RecordConstructorArgs.__init__(self, render=render)
        super().__init__(env)
        self.observation_space = UnicodeText()
        self._render = render

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; see `ToolEnv.reset`."""
        _, info = self.env.reset(seed=seed, options=options)
        return self._observe(info), info

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Take one model turn; see `ToolEnv.step`."""
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._observe(info), reward, terminated, truncated, info

    def _observe(self, info: dict[str, Any]) -> str:
        return self._render(info["messages"])


class TokenObservation(gym.Wrapper[Any, str, str, str], RecordConstructorArgs):
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

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tokens, dict[str, Any]]:
        """Start an episode; see `ToolEnv.reset`."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._tokens(observation, info), info

    def step(self, action: str) -> tuple[Tokens, Any, bool, bool, dict[str, Any]]:
        """Take one model turn; see `ToolEnv.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._tokens(observation, info), reward, terminated, truncated, info

    def _tokens(self, text: str, info: dict[str, Any]) -> Tokens:
        if self._is_tokenizer:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            ids = self._encode(text, **options)["input_ids"]
        else:
            ids = list(self._encode(text))
        tokens = np.full(self._max_length, self._pad_id, np.int64)
        kept = np.asarray(ids, np.int64)[-self._max_length :]
        tokens[: len(kept)] = kept
        if num_cut := len(ids) - len(kept):
            info["num_cut_tokens"] = num_cut
        return tokens
