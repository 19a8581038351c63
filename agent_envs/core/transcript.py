"""Episodes as text for people: messages, rewards and metrics."""

import io
import sys
from collections.abc import Mapping
from typing import Any, Final

_STYLES: Final[Mapping[str, str]] = {
    "task": "bold cyan", "agent": "bold green", "environment": "bold yellow", "end": "bold magenta"
}  # fmt: skip


class Transcript:
    """An episode for `ToolEnv.render`; empty without a ``render_mode``."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: list[tuple[str, str, str | None, Mapping[str, float]]] = []

    @property
    def text(self) -> str:
        """The episode so far as coloured text."""
        return "".join(format_entry(*entry) for entry in self._entries)

    def begin(self, mode: str | None, question: str) -> None:
        """Start an episode."""
        self._entries.clear()
        self._add(mode, "task", question)

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
        self._add(mode, "agent", action, info["action"].get("error"), info["reward_terms"])
        if observation:
            self._add(mode, "environment", observation)
        if is_last:
            figures = "  ".join(f"{name} {value:g}" for name, value in info["metrics"].items())
            self._add(mode, "end", figures)

    def _add(
        self,
        mode: str | None,
        speaker: str,
        text: str,
        error: str | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> None:
        entry = (speaker, text, error, terms or {})
        if mode is not None:
            self._entries.append(entry)
        if mode == "human":
            sys.stdout.write(format_entry(*entry, is_coloured=sys.stdout.isatty()))
            sys.stdout.flush()


def format_entry(
    speaker: str,
    text: str,
    error: str | None = None,
    terms: Mapping[str, float] | None = None,
    *,
    is_coloured: bool = True,
) -> str:
    """Return an entry as text for a terminal of 100 columns, with or without ANSI colours."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(
        file=io.StringIO(), force_terminal=is_coloured, no_color=not is_coloured, width=100,
        highlight=False, legacy_windows=False, force_jupyter=False,
    )  # fmt: skip
    heading = Text(speaker, style=_STYLES[speaker])
    if error is not None:
        heading.append(f"  {error}", style="bold red")
    for name, value in (terms or {}).items():
        if value:
            heading.append(f"  {name} {value:+.3g}", style="green" if value > 0 else "red")
    shown = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    shown = shown.encode(errors="replace").decode()
    with console.capture() as capture:
        console.print(heading, Padding(Text(shown), (0, 0, 0, 2)))
    return capture.get()
