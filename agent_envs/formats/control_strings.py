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
_PATTERNS: Final = (
    r"<\|[^<>|\s]{1,80}\|?>", r"<[^<>|\s]{1,80}\|>",  # ChatML, Llama 3 and 4, Phi, GPT-OSS, Gemma 4
    "<\uff5c[^<>\uff5c]{1,80}\uff5c>", r"<\[[^<>\[\]]{1,80}\]>",  # DeepSeek, Seed
    r"</?s>", r"<</?SYS>>",  # Llama 2
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK"
    r"|MODEL_SETTINGS|CALL_ID|ARGS|BOS|EOS|CLS|SEP|PAD|UNK|[gs]?MASK)\]",  # Mistral, GLM, BERT
    r"\[\|[^\[\]|]{1,80}\|\]", r"\]~!?b[\[\]]", r"\[e~\[",  # Exaone, MiniMax
    r"<(?:start|end|begin(?:ning)?)_of_\w+>", r"<\w*_(?:TOKEN|token)>", r"<(?:seed:|_)\w+>",
    # Baichuan, Nemotron, Apertus, Pangu
    r"[<\[](?:reserved|extra_id|SPECIAL|TOKENS_UNUSED|unused)_?\d+[>\]]",
    r"</?(?:bos|eos|pad|unk|mask|cls|sep|[se]op|eo[ahmst]|role|\u7528\u6237)>", ">>[A-Z]{4,20}<<",
    r"</?tool_(?:response|result)s?>",  # Qwen, around tool results
    rf"(?i:[<\[][/_]{{0,2}}(?:{_ROLES})(?:_(?:start|end))?[>\]])",
    r"#{2,3} ?(?:Instruction|Input|Response|[Hh]uman|User|[Aa]ssistant|System|Prompt|\u6307\u793a"
    r"|\u5fdc\u7b54|\uc9c8\ubb38|\ub2f5\ubcc0)(?: Prompt| Message)?(?::|$)",
    r"@@ (?:Instruction|Response)\b", r"<step> Source: \w+",  # Magicoder, Code Llama
    r"\b(?:USER|ASSISTANT|SYSTEM|HUMAN|CHATBOT)(?=:)",  # Alpaca, Solar, Vicuna
)  # fmt: skip
_LINES: Final = (
    r"(?:^|(?<=^ )|(?<=[*>]))(?:(?:GPT4|Code) (?:Correct )?)?(?:User|Assistant|System|Human|AI|Bot"
    r"|GPT|Falcon|Instruct|\u95ee|\u7b54|\u7528\u6237|\u52a9\u624b|\u30e6\u30fc\u30b6\u30fc"
    r"|\u30b7\u30b9\u30c6\u30e0)(?=[:\uff1a])"
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

    A text that hides matches by other forms of letters or unseen characters, or from a tokenizer's
    `normalized`, is normalised first.
    """
    shown = normalized(text if text.isascii() else _as_read(text))
    if shown != text and len(pattern.findall(shown)) > len(pattern.findall(text)):
        text = shown
    for _ in range(_MAX_PASSES):  # "######" holds "###" twice
        text, before = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text), text
        if text == before:
            break
    return text


def _as_read(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    return "".join(char for char in text if unicodedata.category(char) != "Cf")


@functools.lru_cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.MULTILINE)
