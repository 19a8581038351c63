"""Untrusted text made safe to show: no character steers, hides or reorders others."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from agent_leaderboard.records.names import INVISIBLE

_ALLOWED: Final = frozenset("\n\t\u200c\u200d")
"""Invisible characters that are harmless: the last two join others in emoji and in Persian."""
_MARKDOWN: Final = frozenset("\\`*_[]<>|~#&")


def visible(text: str) -> str:
    """Return text with invisible characters spelled out: ``⟨U+202E⟩``."""
    return "".join(
        f"⟨U+{ord(c):04X}⟩" if c not in _ALLOWED and unicodedata.category(c) in INVISIBLE else c
        for c in text
    )


def markdown_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    words = " ".join(visible(text).split())
    return "".join(f"\\{c}" if c in _MARKDOWN else c for c in words)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table; the first `names` columns are left-aligned, the others right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|---" * names + "|---:" * (len(head) - names) + "|")
    return "\n".join(lines)
