"""An episode as people read it: who said what, and what each step earned."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Speaker = Literal["task", "agent", "environment", "end"]
_STYLES: Final[Mapping[Speaker, str]] = {
    "task": "bold cyan",
    "agent": "bold green",
    "environment": "bold yellow",
    "end": "bold magenta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something that was said."""

    speaker: Speaker
    text: str
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    """What the step earned, if it is one."""
    error: str | None = None
    """The code of the mistake, if it was one."""


def format_entries(entries: Sequence[Entry], *, is_coloured: bool = True, width: int = 100) -> str:
    """Return entries as text for a terminal.

    Args:
        entries: What was said.
        is_coloured: Whether to use ANSI colours.
        width: Columns of the terminal.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(
        file=io.StringIO(), force_terminal=is_coloured, no_color=not is_coloured, width=width,
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    for entry in entries:
        heading = Text(entry.speaker, style=_STYLES[entry.speaker])
        if entry.error is not None:
            heading.append(f"  {entry.error}", style="bold red")
        for name, value in entry.reward_terms.items():
            if value:
                heading.append(f"  {name} {value:+.3g}", style="green" if value > 0 else "red")
        console.print(heading)
        console.print(Padding(Text(_printable(entry.text)), (0, 0, 0, 2)))
    assert isinstance(console.file, io.StringIO)  # noqa: S101 - it is the one above
    return console.file.getvalue()


def _printable(text: str) -> str:
    """Return text without what would steer a terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text
    ).encode(errors="replace").decode()  # fmt: skip
