"""Tools to keep notes and a plan, which every later state contains."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from agent_envs.core.tool import Tool, ToolError

MAX_CHARS: Final = 4_000
"""Of a note with its title, and of a plan."""
TOO_LONG_TEXT: Final = "That is too long: {length} characters; {limit} are allowed."


class Note(NamedTuple):
    """A piece of evidence, with the title of its page and the number of its sentence, from 0."""

    text: str
    title: str | None
    sentence: int | None

    @property
    def fact(self) -> tuple[str, int] | None:
        """The cited supporting fact, title and sentence, or None."""
        return None if self.title is None or self.sentence is None else (self.title, self.sentence)

    @property
    def triple(self) -> tuple[str, str, str] | None:
        """Subject, relation and object of a text ``subject | relation | object``, or None."""
        parts = [part.strip() for part in self.text.split("|")]
        return (parts[0], parts[1], parts[2]) if len(parts) == 3 and all(parts) else None

    def __str__(self) -> str:
        """Return the note as the model sees it."""
        if self.title is None:
            return self.text
        place = self.title if self.sentence is None else f"{self.title}, {self.sentence}"
        return f"{self.text} ({place})"


class Notebook:
    """Numbered notes and a plan."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self.notes: dict[int, Note] = {}
        self._last_number = 0
        self._plan = ""

    @property
    def tools(self) -> dict[str, Sequence[Tool]]:
        """The tools by name."""
        return {
            "note": (Tool(self.note, timeout=None), Tool(self.drop_note, timeout=None)),
            "plan": (Tool(self.plan, timeout=None),),
        }

    @property
    def text(self) -> str:
        """Notes and plan as the model sees them."""
        notes = [f"[{number}] {note}" for number, note in self.notes.items()]
        plan = [f"Plan:\n{self._plan}"] if self._plan else []
        return "\n\n".join([*plan, *(["\n".join(["Notes:", *notes])] if notes else [])])

    def note(self, text: str, title: str | None = None, sentence: int | None = None) -> str:
        """Keep a piece of evidence in a numbered list that stays in view.

        Args:
            text: What to keep; a fact may be written "subject | relation | object".
            title: The page it is from.
            sentence: The number of the sentence there, as read shows it.
        """
        if not text.strip():
            raise ToolError("A note needs a text.")
        _check_length(text, title or "")
        self._last_number += 1
        self.notes[self._last_number] = Note(" ".join(text.split()), title, sentence)
        return f"Kept as note {self._last_number}."

    def drop_note(self, number: int) -> str:
        """Drop a note that is not needed after all.

        Args:
            number: The note's number.
        """
        if self.notes.pop(number, None) is None:
            numbers = ", ".join(map(str, self.notes)) or "none"
            raise ToolError(f"There is no note {number} (there are: {numbers}).")
        return f"Dropped note {number}."

    def plan(self, text: str) -> str:
        """Write down how to go on; it stays in view until there is a new plan.

        Args:
            text: The plan.
        """
        _check_length(text)
        self._plan = text.strip()
        return "The plan is noted." if self._plan else "There is no plan now."


def _check_length(*texts: str) -> None:
    if (length := sum(map(len, texts))) > MAX_CHARS:
        raise ToolError(TOO_LONG_TEXT.format(length=length, limit=MAX_CHARS))
