"""Distinguish control tokens of a chat template from text that only looks like them.

Messages are plain text: ``<|im_end|>`` in a passage is ten characters, not the end of a turn. Texts
are guarded before the template is rendered (`ControlTokens.guard`): a lone surrogate, which no
other text can contain, is put before every character that could start a control token. So every
unmarked control token in the rendered text is the template's, and only those become tokens
(`ControlTokens.encode`).
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerBase

from agent_envs.errors import ConfigurationError
from agent_envs.formats.control_strings import break_up

_START: Final = "\udc00"
"""Precedes a character of a text that could start a control token."""
_EDGE: Final = "\udc01"
"""Starts a text, so that it cannot complete a control token that the template started."""
_MARKUP: Final = re.compile(r"[<>\[\]{}|]")
_TAG: Final = re.compile(r"</?(?![\w-]*(?:respon|result|output|observ))[\w-]+>", re.IGNORECASE)
"""Tags a model may write; ``<tool_response>`` and the like are never its own."""


class OwnMarkup(NamedTuple):
    """Markup that a model writes in its turn: calls and thoughts."""

    tags: frozenset[str] = frozenset()
    """Control tokens that count in pairs: ``<tool_call>`` with ``</tool_call>`` after it."""
    opened: str = ""
    """Name of the tag that the template opens and the model only closes; or empty."""


class ControlTokens:
    """The control tokens of one tokenizer.

    They are its special tokens and added tokens that look like markup (``<tool_response>``), but
    not added words and runs of blanks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # control tokens would be indistinguishable from text
            raise ConfigurationError(
                f"{type(tokenizer).__name__} is not backed by `tokenizers`. Use a fast tokenizer."
            )
        self._backend = backend
        added: dict[int, AddedToken] = dict(sorted(tokenizer.added_tokens_decoder.items()))
        self._ids = {str(token): id for id, token in added.items() if _is_control(token)}
        self._words = {str(t): id for id, t in added.items() if str(t) not in self._ids}
        unknown = tokenizer.unk_token_id  # not a control token: any unknown word becomes it
        self._control_ids = frozenset(self._ids.values()) - {unknown}
        self.tags = frozenset(
            text for id, token in added.items()
            if not token.special and _TAG.fullmatch(text := str(token)) and id in self._control_ids
        )  # fmt: skip
        """Control tokens that a model may write: ``<tool_call>``, ``<think>``."""
        first = "".join(sorted({text[0] for text in self._ids}))
        self._first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")
        longest_first = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        self._unmarked = re.compile(f"(?<!{_START})(?:{longest_first or '(?!)'})")
        ends = "".join(sorted({*first, *(text[-1] for text in self._ids)}))
        self._ends = re.compile(f"[{re.escape(ends)}]" if ends else "(?!)")

    def guard(
        self, value: Any, own: OwnMarkup | None = None, markers: re.Pattern[str] | None = None
    ) -> Any:
        """Return a text, or a structure of texts, with marks before possible control tokens.

        Args:
            value: Text, or a list or dictionary of such (a tool's schema, a call's arguments).
            own: Markup that the text's author may write; None for none.
            markers: Plain text with which the template marks roles, which is broken up.
        """
        if isinstance(value, str):
            return self._guard_text(self._without(markers, value) if markers else value, own)
        if isinstance(value, Mapping):
            return {
                self.guard(key, None, markers): self.guard(item, own, markers)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(item, own, markers) for item in value]
        return value

    def encode(self, marked: str) -> list[int]:
        """Return the tokens of a text that was rendered from guarded texts.

        They are the tokenizer's own unless that would read text as a control token.
        """
        text = clean(marked.replace(_START, "").replace(_EDGE, ""))
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if marked == text and not self._hides_markup(text):
            return ids
        written = [id for id, _, _ in self.find(marked) if id in self._control_ids]
        if [id for id in ids if id in self._control_ids] == written:
            return ids
        return self._encode_marked(marked)

    def find(self, marked: str) -> Iterator[tuple[int, int, int]]:
        """Yield the template's control tokens in a rendered text: id, start and end."""
        for match in self._unmarked.finditer(marked):
            yield self._ids[match[0]], *match.span()

    def _without(self, markers: re.Pattern[str], text: str) -> str:
        return break_up(markers, text, self._normalized)

    def _normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer
        if normalizer is None:
            return text
        normal: str = normalizer.normalize_str(clean(text))
        return normal.replace("\u2581", " ")  # as some write blanks

    def _guard_text(self, text: str, own: OwnMarkup | None) -> str:
        text = clean(text)
        if not self._ends.search(text):
            return text
        spans = _own_spans(text, own) if own is not None else []
        parts: list[str] = []
        position, is_marked = 0, False
        for start, end in [*spans, (len(text), len(text))]:
            plain = text[position:start]
            is_marked |= self._ends.search(plain) is not None
            parts += [self._first.sub(lambda found: _START + found[0], plain), text[start:end]]
            position = end
        if not is_marked:
            return text
        marked = "".join(parts)
        indent = len(text) - len(text.lstrip())  # blank, so without marks; templates strip it
        if marked.startswith(_START, indent) or any(start == indent for start, _ in spans[:1]):
            return marked
        return marked[:indent] + _EDGE + marked[indent:]

    def _hides_markup(self, text: str) -> bool:
        """Return whether the tokenizer's normaliser turns other characters into markup."""
        if text.isascii():
            return False
        return len(_MARKUP.findall(self._normalized(text))) != len(_MARKUP.findall(text))

    def _encode_marked(self, marked: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for id, start, stop in self.find(marked):
            ids += [*self._encode_plain(marked[end:start], is_first=end == 0), id]
            end = stop
        return ids + self._encode_plain(marked[end:], is_first=end == 0)

    def _encode_plain(self, marked: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a text without control tokens; `is_first` begins the state."""
        text = marked.replace(_START, "").replace(_EDGE, "")
        tokenizer = self._plain if is_first else self._inner
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            if token in self._words:
                ids.append(self._words[token])
            elif id not in self._control_ids:
                ids.append(id)
            else:  # a word of the model's own vocabulary, like ``<pad>`` in word-level ones
                letters = [i for letter in token for i in self._plain.encode(letter).ids]
                ids += [i for i in letters if i not in self._control_ids]
        return ids

    @functools.cached_property
    def _inner(self) -> Tokenizer:
        """`_plain` for the text after a control token, which gets no leading blank."""
        first = self._plain.pre_tokenizer
        if not isinstance(first, Metaspace) or first.prepend_scheme != "first":
            return self._plain
        inner = Tokenizer.from_str(self._plain.to_str())
        inner.pre_tokenizer = Metaspace(first.replacement, "never", first.split)
        return inner

    @functools.cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without control tokens."""
        plain = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        plain.add_tokens(
            [t for t in self._tokenizer.added_tokens_decoder.values() if str(t) in self._words]
        )
        return plain


def clean(text: str) -> str:
    """Return `text` with lone surrogates replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _own_spans(text: str, own: OwnMarkup) -> list[tuple[int, int]]:
    """Return the spans of its author's own markup in a text, in linear time."""
    spans: list[tuple[int, int]] = []
    names = sorted(tag[1:-1] for tag in own.tags if f"</{tag[1:]}" in own.tags)
    opening = re.compile("|".join(f"<({re.escape(name)})>" for name in names) or "(?!)")
    position = 0
    unclosed: set[str] = set()
    if own.opened and own.opened in names:
        start = text.find(closing := f"</{own.opened}>")
        if start >= 0 and f"<{own.opened}>" not in text[:start]:
            position = start + len(closing)
            spans.append((start, position))
    while match := opening.search(text, position):
        name, position = match[match.lastindex or 0], match.end()
        start = -1 if name in unclosed else text.find(f"</{name}>", position)
        if start < 0:
            unclosed.add(name)
            continue
        end = start + len(f"</{name}>")
        spans += [match.span(), (start, end)]
        position = end
    return spans


def _is_control(token: AddedToken) -> bool:
    is_blank = not str(token).strip(" \n\r\t\u2581")
    return not is_blank and (token.special or bool(_MARKUP.search(str(token))))
