"""Breaks up what looks like a chat template's control tokens, for those who render text themselves.

Where we encode, control tokens are told from text by their place and text stays as it is. A chat
server, or another library's loop, takes texts alone and may read ``<|im_end|>`` in a passage as the
end of a turn; so the text says ``< |im_end|>`` there.
"""

import re
from collections.abc import Iterable
from typing import Final

_WORDS: Final = "|".join([
    r"<\|[^<>|\s]{1,80}\|?>", r"<[^<>|\s]{1,80}\|>",  # ChatML, Llama 3 and 4, Phi, GPT-OSS, Gemma 4
    "<\uff5c[^<>\uff5c]{1,80}\uff5c>",  # DeepSeek
    r"</?s>", r"<</?SYS>>",  # Llama 2
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK"
    r"|CALL_ID|ARGS)\]",  # Mistral
    r"<(?:start|end)_of_turn>", r"</?(?:bos|eos|pad|unk)>", r"\[gMASK\]", "<sop>",  # Gemma, GLM
    r"</?tool_(?:response|result)>",  # Qwen, around what a tool says
])  # fmt: skip
_CALLS: Final = r"</?(?:tool_call|tools|think|arg_key|arg_value)>"
"""What a model writes itself, and an environment's feedback shows; no tool does."""


def break_control_strings(text: str, *, by_tool: bool = False, more: Iterable[str] = ()) -> str:
    """Return `text` with a blank after the first character of each control token in it.

    The tokens are those of well-known families, and `more`; from a tool also those that open and
    close calls and thoughts.
    """
    known = sorted(map(re.escape, filter(str.strip, more)), key=len, reverse=True)
    pattern = "|".join([*known, _WORDS, *([_CALLS] if by_tool else [])])
    return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text)
