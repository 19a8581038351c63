"""Control strings: what chat templates write around messages, broken up in other texts.

A chat server renders its model's template itself, so ``<|im_end|>`` in a passage may end a turn.
The strings of known model families are listed here; a local chat template shows its own.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Final, Literal

Author = Literal["user", "tool"]

_ROLES: Final = "user|assistant|system|human|bot|ai|chatbot|prompter"
_TITLES: Final = (
    f"{_ROLES}|instruction|input|output|response|prompt|question|answer|end"
    "|\u6307\u793a|\u5fdc\u7b54|\uc9c8\ubb38|\ub2f5\ubcc0|\uba85\ub839\uc5b4|\uc751\ub2f5"
)
_CAPITALS: Final = "(?-i:(?:USER|ASSISTANT|SYSTEM|HUMAN|CHATBOT)(?=:))"
_PATTERNS: Final = (
    r"<\|[^<>|\s]{1,80}\|?>", r"<[^<>|\s]{1,80}\|>",  # ChatML, Llama 3 and 4, Phi, GPT-OSS, Gemma 4
    "<\uff5c[^<>\uff5c]{1,80}\uff5c>", r"<\[[^<>\[\]]{1,80}\]>",  # DeepSeek, Seed
    r"</?s>", r"<</?SYS>>",  # Llama 2
    r"(?-i:\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK"
    r"|MODEL_SETTINGS|CALL_ID|ARGS|BOS|EOS|CLS|SEP|PAD|UNK|[gs]?MASK)\])", r"\[/?INST\]",  # Mistral
    r"\[\|[^\[\]|]{1,80}\|\]", r"\]~!?b[\[\]]", r"\[e~\[",  # Exaone, MiniMax
    r"<(?:start|end|begin(?:ning)?)_of_\w+>", r"<\w*_token>", r"<(?:seed:|_)\w+>",
    # Baichuan, Nemotron, Apertus, Pangu
    r"[<\[](?:reserved|extra_id|SPECIAL|TOKENS_UNUSED|unused)_?\d+[>\]]",
    r"</?(?:bos|eos|pad|unk|mask|cls|sep|[se]op|eo[ahmst]|role|\u7528\u6237)>",
    r"(?-i:>>[A-Z]{4,20}<<)",
    r"</?tool_(?:response|result)s?>",  # Qwen, around tool results
    rf"[<\[][/_]{{0,2}}(?:{_ROLES})(?:_(?:start|end))?[>\]]",
    rf"#{{2,3}}[^\S\n]*(?:{_TITLES})(?: Prompt| Message)?(?::|$)",
    r"@@[^\S\n]*(?:Instruction|Response)\b", r"<step>\s*Source: \w+",  # Magicoder, Code Llama
    rf"\b{_CAPITALS}",  # Vicuna
)  # fmt: skip
_LINES: Final = (
    r"(?:^|(?<=^ )|(?<=\s\s)|(?<=[^\w\s])|(?<=[.!?:;*>|-] ))(?:(?:GPT4|Code)\s+(?:Correct\s+)?)?"
    rf"(?:{_ROLES}|gpt|falcon|instruct|(?-i:Question|Answer)|\u95ee|\u7b54|\u7528\u6237|\u52a9\u624b"
    rf"|\u30e6\u30fc\u30b6\u30fc|\u30b7\u30b9\u30c6\u30e0)(?=[:\uff1a])|{_CAPITALS}"
)
"""Roles that prompts of environments may quote, but strangers must not."""
CALLS: Final = re.compile(r"</?(?:tool_call|tools|think|arg_key|arg_value)>")
"""Tags that models write, and feedback of an environment shows, but no tool result."""
_MAX_PASSES: Final = 8


def break_control_strings(text: str, *, by: Author | None = None, more: Iterable[str] = ()) -> str:
    """Insert a blank after the first character of each control string in `text`.

    They are those of well-known model families, and `more`; in texts `by` a user or a tool also
    lines that begin with a role; in those by a tool also tags around calls and thoughts.
    """
    known = sorted(map(re.escape, filter(str.strip, more)), key=len, reverse=True)
    own = {"user": (_LINES,), "tool": (_LINES, CALLS.pattern)}.get(by or "", ())
    return break_up(_compiled((*known, *_PATTERNS, *own)), text)


def break_up(pattern: re.Pattern[str], text: str, normalized: Callable[[str], str] = str) -> str:
    """Insert a blank after the first character of each match, until none is left.

    A text that hides matches by lookalikes or unseen characters, or from a tokenizer's
    `normalized`, is normalised first.
    """
    text = _break_up(pattern, text)
    shown = normalized(as_read(text))
    return _break_up(pattern, shown) if shown != text and pattern.search(shown) else text


def _break_up(pattern: re.Pattern[str], text: str) -> str:
    for _ in range(_MAX_PASSES):  # "######" holds "###" twice
        text, before = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text), text
        if text == before:
            break
    return text


def as_read(text: str) -> str:
    """Return a text without unseen characters, and with Latin letters for their lookalikes."""
    return unicodedata.normalize("NFKC", text).translate(_LETTERS)


class _Letters(dict[int, int | str]):
    """Characters as a reader sees them, by code point."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if len(f"a{char}b".splitlines()) > 1:
            char = "\n"
        elif not (char.isspace() or char.isprintable()) or unicodedata.category(char) in _UNSEEN:
            char = ""
        self[code] = char
        return char


_UNSEEN: Final = ("Mn", "Me")
_LETTERS: Final = _Letters(
    str.maketrans(
        "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf"
        "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0425\u0405\u0406\u0408"
        "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458",
        "ABEZHIKMNOPTYXoABEKMHOPCTXSIJaeopcyxsij",
    ) | dict.fromkeys((0x115F, 0x1160), "")
)  # fmt: skip
"""Greek and Cyrillic letters that look Latin, and unseen letters of Hangul."""


@functools.lru_cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.MULTILINE | re.IGNORECASE)
