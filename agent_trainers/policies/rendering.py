"""From messages to tokens with a chat template, without ever re-encoding what was sampled.

A state that extends the step before begins with that step's very tokens, prompt and completion;
only what the environment added is rendered and encoded. Any other state is rendered afresh; so is
one in which the template writes earlier turns otherwise than the model did, as those of thinking
models do that drop the thoughts of turns before the last question: the model sees what a server
would show it that renders the whole conversation each time, spaces and line breaks aside. Text is
never encoded as control tokens (`ControlTokens`): those are the template's, and the model's own.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_trainers.policies.control_tokens import ControlTokens, OwnMarkup, clean
from agent_trainers.policies.encoding_cache import EncodingCache
from agent_trainers.trajectory import Transition

_CACHE_BYTES: Final = 2**25
_MARK: Final = "\udc02"
"""Stands for a turn where only what is around it is of interest; a lone surrogate, which no message
holds."""
_CALL_ID: Final = "call00000"  # some templates ask for nine letters or digits
_QUESTION: Final[Message] = {"role": "user", "content": "Hello"}
_THOUGHT: Final = ("<think>", "</think>")
_TAG: Final = re.compile(r"</?[\w-]+>|\[/?[A-Z_]+\]")
"""What may stand for the beginning or the end of a thought or a call."""
_OWN_WORDS: Final = ("content", "reasoning_content", "thinking")
"""Members of an assistant's message where it may open calls and thoughts itself."""

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
        self.control_tokens = ControlTokens(tokenizer)
        self._kwargs = dict(chat_template_kwargs or {})
        # The members of a group begin with the same state, and often get the same replies.
        self._encode_state = EncodingCache(self._encode_state_anew, _CACHE_BYTES)
        self._encode_suffix = EncodingCache(self._encode_suffix_anew, _CACHE_BYTES)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Schemas, previous: Transition | None
    ) -> list[int]:
        """Return the tokens of a state, ready for the model to go on after step `previous`."""
        if previous is not None and (reply := _reply(messages, previous)) is not None:
            suffix = self._encode_suffix(_key(reply, tools), previous.completion_ids[-1])
            if suffix is not None and self._stays(messages, tools, previous):
                return [*previous.prompt_ids, *previous.completion_ids, *suffix]
        return list(self._encode_state(_key(messages, tools)))

    def render(self, messages: Sequence[Message], tools: Schemas) -> str:
        """Return a state as text, the opening of the model's turn included."""
        return clean(self._apply_template(messages, tools))

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Count the tokens of a state rendered afresh."""
        return len(self._encode_state_anew(_key(messages, tools)))

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
        return self.render([_QUESTION], tools) != self.render([_QUESTION], None)

    def turn_ids(self, text: str) -> list[int]:
        """Return the tokens of a turn as the model would write it, the end of the turn included."""
        return [*self.note_ids(text), self._end_of_turn]

    def message_ids(self, messages: Sequence[Message], tools: Schemas) -> list[int]:
        """Return the tokens of the last message, a turn of the model, calls apart from its text.

        Raises:
            ConfigurationError: If the template does not write it after what came before.
        """
        guarded, schemas = self._guard(messages), self.control_tokens.guard(tools)
        turns = [self._last_turn(messages, tools), self._last_turn(guarded, schemas)]
        text, marked = (
            turn[: next((e for i, _, e in self.control_tokens.find(turn) if i == self._end_of_turn),
                        len(turn))]
            for turn in turns
        )  # fmt: skip
        return self.control_tokens.encode(text, marked)

    def note_ids(self, text: str) -> list[int]:
        """Return the tokens of a text that stands in a message and may quote the model's turns."""
        marked = self.control_tokens.guard(text, self._own_markup)
        return self.control_tokens.encode(clean(text), marked)

    def end_of_state(self, prompt_ids: Sequence[int]) -> int | None:
        """Return where the last message before the model's turn ends in a state's tokens.

        None where it does not end as a user's message does.

        Raises:
            ConfigurationError: If the template ends a user's message with plain text.
        """
        end = self._end_of_message
        return max((i for i, id in enumerate(prompt_ids) if id == end), default=None)

    def _last_turn(self, messages: Sequence[Message], tools: Schemas) -> str:
        before = self._apply_template(messages[:-1], tools)
        whole = self._apply_template(messages, tools, add_generation_prompt=False)
        if not whole.startswith(before):
            raise ConfigurationError(
                f"The chat template of {self.tokenizer.name_or_path!r} does not write a turn where "
                "the model would begin it. Write the call into the message's content instead."
            )
        return whole[len(before) :]

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return sampled tokens as text, without special tokens."""
        text = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _encode_state_anew(self, key: str) -> list[int]:
        messages, tools = json.loads(key)
        text = self._apply_template(messages, tools)
        guarded = self._guard(messages), self.control_tokens.guard(tools)
        is_plain = guarded == (messages, tools)
        return self.control_tokens.encode(
            text, text if is_plain else self._apply_template(*guarded)
        )

    def _encode_suffix_anew(self, key: str, last_id: int) -> list[int] | None:
        """Return what the template puts between the model's last token and its next turn.

        None where the template's own text does not tell the place.
        """
        reply, tools = json.loads(key)
        guarded = self._guard(reply), self.control_tokens.guard(tools)
        marked = self._suffix(*guarded, last_id)
        text = marked if guarded == (reply, tools) else self._suffix(reply, tools, last_id)
        if text is None or marked is None:
            return None
        # Encoded with the token before it: some tokenizers treat the beginning of a text apart.
        ids = self.control_tokens.encode(text, marked)
        return ids[1:] if ids[:1] == [last_id] else None

    def _suffix(self, reply: Sequence[Message], tools: Schemas, last_id: int) -> str | None:
        """Render what follows a turn of the model, from its last token on."""
        dummy: list[Message] = [
            {"role": "user", "content": _MARK},
            {"role": "assistant", "content": f"{_MARK}{_MARK}"},
        ]
        text = self._apply_template([*dummy, *reply], tools)
        _, mark, rest = text.partition(f"{_MARK}{_MARK}")
        id, start, _ = next(self.control_tokens.find(rest), (None, 0, 0))
        is_last = mark and id == last_id and not rest[:start].strip()
        return rest[start:] if is_last else None

    def _stays(self, messages: Sequence[Message], tools: Schemas, previous: Transition) -> bool:
        """Return whether the template writes all that was said as it stands in the tokens."""
        if self._keeps_turns:
            return True
        turn = self.tokenizer.decode(list(previous.completion_ids[:-1]))
        assert isinstance(turn, str)
        return self._is_written(messages, tools, len(previous.messages), turn)

    def _is_written(
        self, messages: Sequence[Message], tools: Schemas, place: int, turn: str
    ) -> bool:
        """Return whether a conversation is written as it came about, spaces aside.

        First the state before `place`, then `turn`, then what follows any turn of the model.
        """
        after = self._suffix(messages[place + 1 :], tools, self._end_of_turn) or ""
        before = self._apply_template(messages[:place], tools)
        whole = self._apply_template(messages, tools)
        return "".join((before + turn + after).split()) == "".join(whole.split())

    @functools.cached_property
    def _keeps_turns(self) -> bool:
        """Whether the template writes every turn as it was written, whatever is in it.

        Asked with each tag that its source names, for a template that looks into a turn names what
        it looks for; before a user's message, and before a tool's.
        """
        tags = dict.fromkeys([*_TAG.findall(str(self.tokenizer.chat_template)), *_THOUGHT])
        turns = ["Yes", "Hm".join(("", *_THOUGHT, "")), *(f"Hm{tag}Yes" for tag in tags)]
        replies: list[Message] = [
            {"role": "user", "content": "Go on"},
            {"role": "tool", "name": "f", "content": "Go on"},
        ]
        for turn, reply in itertools.product(turns, replies):
            said: Message = {"role": "assistant", "content": turn}
            messages = [_QUESTION, said, reply, said, reply]
            try:
                if not self._is_written(messages, None, 3, turn):
                    return False
            except Exception:  # noqa: BLE001, S112 - foreign code: such a conversation is none
                continue
        return True

    def _apply_template(
        self, messages: Sequence[Message], tools: Schemas, *, add_generation_prompt: bool = True
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )
        assert isinstance(text, str)
        return text

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Guard what messages say; the model's own turns may hold its own markup."""
        guard = self.control_tokens.guard
        return [
            cast(
                Message,
                {
                    name: guard(value, self._own_markup)
                    if message["role"] == "assistant" and name in _OWN_WORDS
                    else guard(value)
                    for name, value in message.items()
                },
            )
            for message in messages
        ]

    @functools.cached_property
    def _end_of_turn(self) -> int:
        """The token with which the template ends a turn of the model."""
        told: list[Message] = [
            {"role": "user", "content": _MARK},
            {"role": "assistant", "content": f"{_MARK}{_MARK}"},
        ]
        text = self._apply_template(told, None, add_generation_prompt=False)
        _, _, rest = text.partition(f"{_MARK}{_MARK}")
        id, start, _ = next(self.control_tokens.find(rest), (None, 0, 0))
        if id is None or rest[:start].strip():
            id = self.tokenizer.eos_token_id
        assert isinstance(id, int)
        return id

    @functools.cached_property
    def _end_of_message(self) -> int:
        """The token with which the template ends a user's message before the model's turn."""
        question: list[Message] = [{"role": "user", "content": _MARK}]
        _, _, rest = self._apply_template(question, None).partition(_MARK)
        id, start, _ = next(self.control_tokens.find(rest), (None, 0, 0))
        if id is None or rest[:start].strip():
            raise ConfigurationError(
                f"The chat template of {self.tokenizer.name_or_path!r} ends a user's message with "
                "plain text, so there is no telling where a skill belongs. Use a template that "
                "ends it with a control token, as <|im_end|>, or leave SkillDistillation out."
            )
        return id

    @functools.cached_property
    def _own_markup(self) -> OwnMarkup:
        """What a model writes itself in a turn, as ``<tool_call>``.

        ``<tool_response>`` is none: the template puts it around what others say.
        """
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
        told: Any = [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": _MARK},
        ]
        tags, opened = self.control_tokens.tags, ""
        try:
            prompt = self._apply_template([_QUESTION], None).rstrip()
            opened = next((tag[1:-1] for tag in tags if prompt.endswith(tag)), "")
            text = self._apply_template(told, None, add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - foreign code: it may know of no tools
            return OwnMarkup(tags, opened)
        before, mark, after = text.partition(_MARK)
        written = [before[start:end] for _, start, end in self.control_tokens.find(before)][-1:]
        found = next(self.control_tokens.find(after), None)
        if mark and found is not None:
            written.append(after[found[1] : found[2]])
        return OwnMarkup(tags - set(written), opened)


def _key(messages: Sequence[Message], tools: Schemas) -> str:
    key = json.dumps([list(messages), list(tools) if tools else None], ensure_ascii=False)
    return clean(key)  # of lone surrogates, which a tool may return all the same


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
