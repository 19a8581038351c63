"""From messages to tokens with a chat template, without ever re-encoding what was sampled.

A state that extends the step before begins with that step's very tokens, prompt and completion;
only what the environment added is rendered and encoded. Any other state is rendered afresh.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_trainers.trajectory import Transition

_CACHE_SIZE: Final = 1024
_MARK: Final = "zqx"
"""Stands for an earlier turn where only what follows that turn is of interest."""

Schemas = Sequence[dict[str, Any]] | None


class ChatRenderer:
    """Renders states for one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Use the chat template of `tokenizer`, with options such as ``enable_thinking``.

        Raises:
            ConfigurationError: If the tokenizer has no chat template.
        """
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Use an "
                "instruction-tuned model, or set tokenizer.chat_template."
            )
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        # The members of a group begin with the same state, and often get the same replies.
        self._encode_state = functools.lru_cache(_CACHE_SIZE)(self._encode_state_anew)
        self._encode_suffix = functools.lru_cache(_CACHE_SIZE)(self._encode_suffix_anew)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Schemas, previous: Transition | None
    ) -> list[int]:
        """Return the tokens of a state, ready for the model to go on after step `previous`."""
        if previous is not None and (reply := _reply(messages, previous)) is not None:
            suffix = self._encode_suffix(_key(reply, tools), previous.completion_ids[-1])
            if suffix is not None:
                return [*previous.prompt_ids, *previous.completion_ids, *suffix]
        return list(self._encode_state(_key(messages, tools)))

    def render(self, messages: Sequence[Message], tools: Schemas) -> str:
        """Return a state as text, the opening of the model's turn included."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **self._kwargs,
        )
        assert isinstance(text, str)
        return text

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Count the tokens of a state rendered afresh."""
        return len(self._encode(self.render(messages, tools)))

    def check_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Make sure that the template shows the model its tools.

        Raises:
            ConfigurationError: If it renders the same with and without them.
        """
        if tools and not self.shows_tools(tools):
            raise ConfigurationError(
                f"The chat template of {self.tokenizer.name_or_path!r} ignores tools, so the model "
                "would never learn which it has. Use a template with tool support, or "
                'tool_format="tags", which describes the tools in the system prompt.'
            )

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Say whether the template renders otherwise with tools than without."""
        question: list[Message] = [{"role": "user", "content": _MARK}]
        return self.render(question, tools) != self.render(question, None)

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return sampled tokens as text, without special tokens."""
        text = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _encode_state_anew(self, key: str) -> list[int]:
        return self._encode(self.render(*json.loads(key)))

    def _encode_suffix_anew(self, key: str, last_id: int) -> list[int] | None:
        """Return what the template puts between the model's last token and its next turn.

        None where the template's own text does not tell the place.
        """
        reply, tools = json.loads(key)
        dummy: list[Message] = [
            {"role": "user", "content": _MARK},
            {"role": "assistant", "content": f"{_MARK}{_MARK}"},
        ]
        _, mark, rest = self.render([*dummy, *reply], tools).partition(f"{_MARK}{_MARK}")
        if not mark:
            return None
        end_of_turn = self.tokenizer.decode([last_id])
        assert isinstance(end_of_turn, str)
        _, found, suffix = rest.partition(end_of_turn)
        return self._encode(suffix) if found else None

    def _encode(self, text: str) -> list[int]:
        # Lone surrogates cannot be encoded; a tool may return them all the same.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self.tokenizer(clean, add_special_tokens=False)["input_ids"]
        return ids


def _key(messages: Sequence[Message], tools: Schemas) -> str:
    return json.dumps([list(messages), list(tools) if tools else None])


def _reply(messages: Sequence[Message], previous: Transition) -> Sequence[Message] | None:
    """Return what was said since `previous`, or None where `messages` does not extend it."""
    length = len(previous.messages)
    if not previous.completion_ids or len(messages) <= length + 1:
        return None
    turn = messages[length]
    if turn["role"] != "assistant" or turn["content"] != previous.action:
        return None
    if list(messages[:length]) != list(previous.messages):
        return None
    return messages[length + 1 :]
