"""Episodes as text for people: messages, rewards and metrics."""

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Speaker = Literal["task", "agent", "environment", "end"]
_STYLES: Final[Mapping[Speaker, str]] = {
    "task": "bold cyan", "agent": "bold green", "environment": "bold yellow", "end": "bold magenta"
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message."""

    speaker: Speaker
    text: str
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    """The reward terms of a step."""
    error: str | None = None
    """The code of a mistake."""


class Transcript:
    """The entries of an episode, for `ToolEnv.render`; none without a ``render_mode``."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: list[Entry] = []

    @property
    def text(self) -> str:
        """The episode so far as coloured text."""
        return format_entries(self._entries)

    def begin(self, mode: str | None, question: str) -> None:
        """Start an episode."""
        self._entries.clear()
        self._add(mode, Entry(speaker="task", text=question))

    def add_step(
        self,
        mode: str | None,
        action: str,
        observation: str,
        info: Mapping[str, Any],
        *,
        is_last: bool,
    ) -> None:
        """Add a step, and the metrics after the last one."""
        if mode is None:
            return
        terms, error = info["reward_terms"], info["action"].get("error")
        self._add(mode, Entry(speaker="agent", text=action, reward_terms=terms, error=error))
        if observation:
            self._add(mode, Entry(speaker="environment", text=observation))
        if is_last:
            figures = "  ".join(f"{name} {value:g}" for name, value in info["metrics"].items())
            self._add(mode, Entry(speaker="end", text=figures))

    def _add(self, mode: str | None, entry: Entry) -> None:
        if mode is not None:
            self._entries.append(entry)
        if mode == "human":
            sys.stdout.write(format_entries([entry], is_coloured=sys.stdout.isatty()))
            sys.stdout.flush()


def format_entries(entries: Sequence[Entry], *, is_coloured: bool = True) -> str:
    """Return entries as text for a terminal of 100 columns, with or without ANSI colours."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(
        file=io.StringIO(), force_terminal=is_coloured, no_color=not is_coloured, width=100,
        highlight=False, legacy_windows=False, force_jupyter=False,
    )  # fmt: skip
    with console.capture() as capture:
        for entry in entries:
            heading = Text(entry.speaker, style=_STYLES[entry.speaker])
            if entry.error is not None:
                heading.append(f"  {entry.error}", style="bold red")
            for name, value in entry.reward_terms.items():
                if value:
                    heading.append(f"  {name} {value:+.3g}", style="green" if value > 0 else "red")
            console.print(heading, Padding(Text(_printable(entry.text)), (0, 0, 0, 2)))
    return capture.get()


def _printable(text: str) -> str:
    """Escape control characters."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text
    ).encode(errors="replace").decode()  # fmt: skip
