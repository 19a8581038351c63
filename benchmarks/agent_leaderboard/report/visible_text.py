"""Text that others wrote, made safe to look at: nothing in it steers, hides or reorders."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from agent_leaderboard.records.names import UNSEEN

_PLAIN: Final = frozenset("\n\t")
_MARKDOWN: Final = frozenset("\\`*_[]<>|~#&")
_FORMULA: Final = tuple("=+-@\t")


def visible(text: str) -> str:
    """Return text with every hidden character written out: ``⟨U+202E⟩``."""
    return "".join(
        f"⟨U+{ord(c):04X}⟩"
        if c not in _PLAIN and unicodedata.category(c) in UNSEEN and not _joins(c)
        else c
        for c in text
    )


def markdown_cell(text: str) -> str:
    """Return text as a cell of a Markdown table shows it as it is."""
    words = " ".join(visible(text).split())
    return "".join(f"\\{c}" if c in _MARKDOWN else c for c in words)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table; its first `names` columns stand to the left, the others right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|---" * names + "|---:" * (len(head) - names) + "|")
    return "\n".join(lines)


def csv_cell(text: str) -> str:
    """Return text that no spreadsheet takes for a formula."""
    words = visible(text)
    return f"'{words}" if words.startswith(_FORMULA) else words


def _joins(character: str) -> bool:
    """Return whether a character joins others into one, as in emoji and in Persian words."""
    return character in "\u200c\u200d"
