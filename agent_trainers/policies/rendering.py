"""Rendering of messages to tokens with a chat template, without re-encoding sampled tokens.

A state that extends the previous step starts with that step's prompt and completion tokens; only
the environment's additions are rendered and encoded. Any other state is rendered completely, as is
one in which the template changes earlier turns, such as those of thinking models that drop earlier
thoughts: the model sees what a server would show it that renders the whole conversation each time,
whitespace aside. Text is never encoded as control tokens (`ControlTokens`), except for the
template's and the model's own.
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
from agent_envs.formats.control_strings import CALLS, as_read
from agent_envs.formats.openai_format import fold_roles
from agent_trainers.policies.control_tokens import ControlTokens, OwnMarkup, clean
from agent_trainers.policies.policy import Schemas
from agent_trainers.trajectory import Transition

_CACHED: Final = 256
"""Encoded texts: members of a group share the first state, and often get the same replies."""
_MARK: Final = "\udc02"
"""Placeholder of a turn, to find the text around it; a lone surrogate, so in no message."""
_DUMMY: Final[Sequence[Message]] = (
    {"role": "user", "content": _MARK},
    {"role": "assistant", "content": f"{_MARK}{_MARK}"},
)
_QUESTION: Final[Message] = {"role": "user", "content": "Hello"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "Yes"}
_WORD: Final = "Zq7x"
_SYMBOL: Final = re.compile(r"[^\w\s.,;!?'\"()-]")
_UNIT: Final = re.compile(r"<+[^<>\s]{1,80}>+|\[+[^\[\]\s]{1,80}\]+")
_THOUGHT: Final = ("<think>", "</think>")
_TAG: Final = re.compile(r"</?[\w-]+>|\[/?[A-Z_]+\]")
"""Possible start or end of a thought or a call."""


class ChatRenderer:
    """Renders states for one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Use the chat template of `tokenizer`, with options such as ``enable_thinking``."""
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Use an "
                "instruction-tuned model, or set tokenizer.chat_template."
            )
        self.tokenizer = tokenizer
        self.control_tokens = ControlTokens(tokenizer)
        self._kwargs = dict(chat_template_kwargs or {})
        self._missing_roles: frozenset[str] = frozenset()
        self._missing_roles = self._find_missing_roles()
        self._encode_state = functools.lru_cache(_CACHED)(self._encode_new_state)
        self._encode_suffix = functools.lru_cache(_CACHED)(self._encode_new_suffix)
        self._shows = functools.lru_cache(_CACHED)(self._shows_new)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Schemas, previous: Transition | None
    ) -> list[int]:
        """Return the tokens of a state that follows step `previous`, or starts an episode."""
        if previous is not None and (reply := _reply(messages, previous)) is not None:
            suffix = self._encode_suffix(_key(reply, tools), previous.completion_ids[-1])
            if suffix is not None and self._stays(messages, tools, previous):
                return [*previous.prompt_ids, *previous.completion_ids, *suffix]
        return list(self._encode_state(_key(messages, tools)))

    def render(self, messages: Sequence[Message], tools: Schemas) -> str:
        """Return a state as text, including the generation prompt."""
        return clean(self._apply_template(messages, tools))

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Count the tokens of a completely rendered state."""
        return len(self._encode_new_state(_key(messages, tools)))

    def check_tools(self, tools: Schemas) -> None:
        """Check that the template shows the model its tools."""
        if tools and not self.shows_tools(tools):
            raise ConfigurationError(
                f"The chat template of {self.tokenizer.name_or_path!r} ignores tools, so the model "
                "would not see them. Use a template with tool support, or "
                'tool_format="tags", which describes the tools in the system prompt.'
            )

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Return whether the template renders differently with tools than without."""
        return self._shows(_key([], tools))

    def turn_ids(self, text: str) -> list[int]:
        """Return the tokens of a turn of the model, including the end of the turn."""
        return [*self.note_ids(text), self._end_of_turn]

    def note_ids(self, text: str) -> list[int]:
        """Return the tokens of a text in a message that may quote the model's turns."""
        markers, _ = self._markers
        return self.control_tokens.encode(
            self.control_tokens.guard(text, self._own_markup, markers)
        )

    def end_of_state(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the index at which the user's message before the model's turn ends, if any."""
        end, _ = self._after(self._apply_template(_DUMMY[:1], None), _MARK)
        if end is None:
            raise ConfigurationError(
                f"The chat template of {self.tokenizer.name_or_path!r} ends a user's message with "
                "plain text, so the place of a skill is unknown. Leave SkillDistillation out."
            )
        return max((i for i, id in enumerate(prompt_ids) if id == end), default=None)

    def decode(self, completion_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(completion_ids), skip_special_tokens=True))

    def _shows_new(self, key: str) -> bool:
        tools = json.loads(key)[1]
        return self.render([_QUESTION], tools) != self.render([_QUESTION], None)

    def _encode_new_state(self, key: str) -> list[int]:
        messages, tools = json.loads(key)
        return self.control_tokens.encode(
            self._apply_template(self._guard(messages), self._guard_tools(tools))
        )

    def _encode_new_suffix(self, key: str, last_id: int) -> list[int] | None:
        """Return the tokens between the model's last token and its next turn.

        None if the template's own text does not show the place.
        """
        reply, tools = json.loads(key)
        marked = self._suffix(self._guard(reply), self._guard_tools(tools), last_id)
        if marked is None:
            return None
        # Encoded with the previous token: some tokenizers treat the start of a text differently.
        ids = self.control_tokens.encode(marked)
        return ids[1:] if ids[:1] == [last_id] else None

    def _suffix(self, reply: Sequence[Message], tools: Schemas, last_id: int) -> str | None:
        """Render the text after a turn of the model, from its last token on."""
        text = self._apply_template([*_DUMMY, *reply], tools)
        id, rest = self._after(text, f"{_MARK}{_MARK}")
        return rest if id == last_id else None

    def _after(self, text: str, mark: str) -> tuple[int | None, str]:
        """Return the control token right after `mark`, None if there is none, and the text on."""
        _, found, rest = text.partition(mark)
        id, start, _ = next(self.control_tokens.find(rest), (None, 0, 0))
        return (id, rest[start:]) if found and not rest[:start].strip() else (None, rest)

    def _stays(self, messages: Sequence[Message], tools: Schemas, previous: Transition) -> bool:
        """Return whether the template renders the conversation like the previous step's tokens."""
        if self._keeps_turns:
            return True
        turn = str(self.tokenizer.decode(list(previous.completion_ids[:-1])))
        return self._is_written(messages, tools, len(previous.messages), turn)

    def _is_written(
        self, messages: Sequence[Message], tools: Schemas, place: int, turn: str
    ) -> bool:
        """Return whether a conversation renders as its concatenated parts, whitespace aside.

        The parts are the state before `place`, `turn`, and the text after a turn of the model.
        """
        after = self._suffix(messages[place + 1 :], tools, self._end_of_turn) or ""
        before = self._apply_template(messages[:place], tools)
        whole = self._apply_template(messages, tools)
        return "".join((before + turn + after).split()) == "".join(whole.split())

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; a text of `n` tokens has no more than `n` times that."""
        return max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def _keeps_turns(self) -> bool:
        """Whether the template renders every turn unchanged.

        Tested with each tag in its source, since a template that parses a turn names the tags, and
        before messages of a user and of a tool.
        """
        tags = dict.fromkeys([*_TAG.findall(str(self.tokenizer.chat_template)), *_THOUGHT])
        turns = ["Yes", "Hm".join(("", *_THOUGHT, "")), *(f"Hm{tag}Yes" for tag in tags)]
        replies: list[Message] = [
            {"role": "user", "content": "Go on"},
            {"role": "tool", "name": "f", "content": "Go on"},
        ]
        for turn, reply in itertools.product(turns, replies):
            answer: Message = {"role": "assistant", "content": turn}
            messages = [_QUESTION, answer, reply, answer, reply]
            try:
                if not self._is_written(messages, None, 3, turn):
                    return False
            except Exception:  # noqa: BLE001, S112 - foreign code: the template rejects it
                continue
        return True

    def _apply_template(
        self, messages: Sequence[Message], tools: Schemas, *, add_generation_prompt: bool = True
    ) -> str:
        missing = self._missing_roles
        text = self.tokenizer.apply_chat_template(
            fold_roles(messages, missing) if missing else [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )
        return str(text)

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Guard the texts of messages; the model's own turns may contain its markup."""
        guarded = []
        for message in messages:
            own = self._own_markup if message["role"] == "assistant" else None
            markers = self._markers[message["role"] == "tool"]
            content = self.control_tokens.guard(message["content"], own, markers)
            guarded.append(
                cast(Message, {**self.control_tokens.guard(message), "content": content})
            )
        return guarded

    def _guard_tools(self, tools: Schemas) -> Any:
        return self.control_tokens.guard(tools, None, self._markers[True])

    def _find_missing_roles(self) -> frozenset[str]:
        """Return the roles that the template refuses, and ``tool`` if it leaves results out."""
        missing = set()
        states: dict[str, list[Message]] = {
            "user": [_QUESTION],
            "system": [{"role": "system", "content": _WORD}, _QUESTION],
            "tool": [_QUESTION, _ANSWER, {"role": "tool", "name": "f", "content": _WORD}],
        }
        for role, state in states.items():
            try:
                text = self._apply_template(state, None)
            except Exception as error:
                if role == "user":
                    raise ConfigurationError(
                        f"The chat template of {self.tokenizer.name_or_path!r} cannot render a "
                        f"user's message: {error}. Set tokenizer.chat_template."
                    ) from error
                missing.add(role)
            else:
                missing |= {role} if role == "tool" and _WORD not in text else set()
        return frozenset(missing)

    @functools.cached_property
    def _markers(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Plain text with which the template marks roles: in any message, and in tool results.

        It is what the template writes around contents: units in brackets, lines with a symbol such
        as a colon, and where no control token is near, any line. Other words next to control
        tokens, such as ``user``, mark nothing by themselves.
        """
        runs, ends = set(), {""}
        for roles in (["system", "user", "assistant", "user"], ["user", "assistant", "tool"]):
            said = [cast(Message, {"role": r, "name": "f", "content": _MARK}) for r in roles]
            for state in (said[: place + 1] for place in range(len(said))):
                try:
                    runs |= {*self._apply_template(state, None).split(_MARK)}
                    whole = self._apply_template(state, None, add_generation_prompt=False)
                except Exception:  # noqa: BLE001, S112 - foreign code: the template rejects it
                    continue
                ends.add(whole.rpartition(_MARK)[2])
        written: dict[str, str] = {}
        for run in sorted(runs):
            end = max(filter(run.startswith, ends), key=len)  # the start of the next message is on
            written |= self._patterns_of(end) | self._patterns_of(run.removeprefix(end))
        everyone = [written[text] for text in sorted(written, key=len, reverse=True)
                    if not CALLS.fullmatch(text)]  # fmt: skip
        by_tools = [*everyone, *(written[text] for text in written if CALLS.fullmatch(text))]
        everywhere, in_results = (
            re.compile("|".join(patterns), re.MULTILINE | re.IGNORECASE) if patterns else None
            for patterns in (everyone, by_tools)
        )
        return everywhere, in_results

    def _patterns_of(self, run: str) -> dict[str, str]:
        """Return patterns of the role markers in text of the template, by marker."""
        patterns: dict[str, str] = {}
        spans = [(start, end) for _, start, end in self.control_tokens.find(run)]
        starts = [0, *(end for _, end in spans)]
        for start, end in zip(starts, [*(start for start, _ in spans), len(run)], strict=True):
            for line in filter(None, map(str.strip, run[start:end].splitlines())):
                units = _UNIT.findall(line)
                patterns |= {unit: _variants(unit) for unit in units}
                for text in filter(None, (part.strip(" |") for part in _UNIT.split(line))):
                    if len(text) < 2:  # nothing to break up
                        continue
                    if _SYMBOL.search(text) and (not units or re.search(r"\w", text)):
                        patterns[text] = _variants(text)
                    elif not units and not spans:
                        patterns[text] = f"^(?:{_variants(text)})"
        return patterns

    @functools.cached_property
    def _end_of_turn(self) -> int:
        """The token with which the template ends a turn of the model."""
        text = self._apply_template(_DUMMY, None, add_generation_prompt=False)
        id, _ = self._after(text, f"{_MARK}{_MARK}")
        return int(self.tokenizer.eos_token_id if id is None else id)

    @functools.cached_property
    def _own_markup(self) -> OwnMarkup:
        """Markup that a model writes in a turn, such as ``<tool_call>``."""
        tags = self.control_tokens.tags
        prompt = self._apply_template([_QUESTION], None).rstrip()
        return OwnMarkup(tags, next((tag[1:-1] for tag in tags if prompt.endswith(tag)), ""))


def _variants(marker: str) -> str:
    """Return a pattern of a role marker, with any blanks or none, also as a reader sees it."""
    texts = filter(None, dict.fromkeys((marker, as_read(marker))))
    return "|".join(r"[^\S\n]*".join(map(re.escape, text.split())) for text in texts)


def _key(messages: Sequence[Message], tools: Schemas) -> str:
    key = json.dumps([list(messages), list(tools) if tools else None], ensure_ascii=False)
    return clean(key)  # a tool may return lone surrogates


def _reply(messages: Sequence[Message], previous: Transition) -> Sequence[Message] | None:
    """Return the messages since `previous`, or None if `messages` does not extend it."""
    length = len(previous.messages)
    if not previous.completion_ids or len(messages) <= length + 1:
        return None
    turn = messages[length]
    if turn["role"] != "assistant" or turn["content"] != previous.action:
        return None
    if list(messages[:length]) != list(previous.messages):
        return None
    return messages[length + 1 :]
