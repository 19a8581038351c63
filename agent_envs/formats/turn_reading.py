"""Find the actions in what a model wrote, from left to right, in time linear in its length.

What stands inside of an action, such as a tag in a query, is part of that action. Two things
outside never act: thoughts, and code or quotations between backquotes beside an action that is not
in any. An action in a code block is one where there is no other: many models write it so.
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
    """Something that is meant as an action, or as part of one."""

    end: int
    """Where it ends in the text."""
    is_whole: bool
    """Whether it was closed; else it may be a mere mention in a thought."""
    content: T
    """What was read."""


Understand = Callable[[], ParsedAction]
"""Checks what was read: left until it is known to count, since feedback costs more than reading."""
Read = Callable[[re.Match[str]], Span[T]]


def find_spans(
    text: str, opening: str, read: Read[T], limit: int | None = None
) -> list[tuple[re.Match[str], Span[T]]]:
    """Return what is meant as an action, each with the match of its beginning.

    Args:
        text: One turn of the model.
        opening: A pattern of what an action begins with.
        read: Called with each match of it; finds the end.
        limit: Return the first ones only; None for all.
    """
    pattern = re.compile(f"{_MARKS}|{opening}", re.MULTILINE)
    limit = len(text) if limit is None else limit
    outside_of_code = _find(text, pattern, read, limit, skips_code=True)
    return outside_of_code or _find(text, pattern, read, limit, skips_code=False)


def find_actions(text: str, opening: str, read: Read[Understand]) -> list[ParsedAction]:
    """Return the actions of a turn, mistakes too; of too many, only so many as to say so."""
    return [span.content() for _, span in find_spans(text, opening, read, limit=MAX_CALLS + 1)]


def without_thoughts(text: str) -> str:
    """Return what a model said outside ``<think>…</think>``, closed or not."""
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
        elif match["think"]:  # a thought that the template began: what stood before is part of it
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
    """Return where code ends; without an end it is a mere mark."""
    mark, start = opening["code"], opening.end()
    end = text.find(mark, start)
    is_closed = end >= 0 and (len(mark) >= 3 or text.find("\n", start, end) < 0)
    return end + len(mark) if is_closed else start
