"""Find the actions in a model's text, from left to right, in linear time.

Text inside an action, such as a tag in a query, is part of that action. Thoughts are ignored, and
so is code between backquotes, unless all actions are in code: many models write them so.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agent_envs.formats.actions import MAX_CALLS, ParsedAction

T = TypeVar("T")

END_OF_THOUGHT: Final = "</think>"
_MARKS: Final = r"(?P<think></?think>)|(?P<code>`+)"


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """A candidate for an action or a part of one."""

    end: int
    is_whole: bool
    """Whether it was closed; else it may be a mention in a thought."""
    content: T


Understand = Callable[[], ParsedAction]
"""Checks the content; called only for actions that count, since feedback is expensive."""
Read = Callable[[re.Match[str]], Span[T]]


def find_spans(
    text: str, opening: str, read: Read[T], limit: int | None = None
) -> list[tuple[re.Match[str], Span[T]]]:
    """Return at most `limit` actions of a turn, each with the match of its start.

    `opening` is the pattern of the start of an action; `read` finds its end.
    """
    pattern = re.compile(f"{_MARKS}|{opening}", re.MULTILINE)
    limit = len(text) if limit is None else limit
    outside_of_code = _find(text, pattern, read, limit, skips_code=True)
    return outside_of_code or _find(text, pattern, read, limit, skips_code=False)


def find_actions(text: str, opening: str, read: Read[Understand]) -> list[ParsedAction]:
    """Return the actions of a turn, including mistakes, up to one more than allowed."""
    return [span.content() for _, span in find_spans(text, opening, read, limit=MAX_CALLS + 1)]


def without_thoughts(text: str) -> str:
    """Return the text outside ``<think>…</think>``, closed or not."""
    return text.rpartition(END_OF_THOUGHT)[2].partition("<think>")[0]


def _find(
    text: str, pattern: re.Pattern[str], read: Read[T], limit: int, *, skips_code: bool
) -> list[tuple[re.Match[str], Span[T]]]:
    found: list[tuple[re.Match[str], Span[T]]] = []
    position = 0
    while match := pattern.search(text, position):
        position = match.end()
        if match["code"]:
            if skips_code:
                position = _end_of_code(text, match)
        elif match["think"] == "<think>":
            if (end := text.find(END_OF_THOUGHT, position)) < 0:
                break
            position = end + len(END_OF_THOUGHT)
        elif match["think"]:  # a thought that the template opened: the text before belongs to it
            found.clear()
        else:
            span = read(match)
            position = span.end
            if not span.is_whole and (end := text.find(END_OF_THOUGHT, match.end())) >= 0:
                found.clear()
                position = end + len(END_OF_THOUGHT)
            elif len(found) < limit:
                found.append((match, span))
    return found


def _end_of_code(text: str, opening: re.Match[str]) -> int:
    """Return the end of code; without one, the end of the mark."""
    mark, start = opening["code"], opening.end()
    end = text.find(mark, start)
    is_closed = end >= 0 and (len(mark) >= 3 or text.find("\n", start, end) < 0)
    return end + len(mark) if is_closed else start
