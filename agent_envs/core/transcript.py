"""Episodes as text for people: messages, rewards and metrics."""

import io
from collections.abc import Mapping
from typing import Any, Final

_STYLES: Final[Mapping[str, str]] = {
    "task": "bold cyan", "agent": "bold green", "environment": "bold yellow", "end": "bold magenta"
}  # fmt: skip


class Transcript:
    """An episode for `ToolEnv.render`, as coloured text, or printed in the mode ``"human"``."""

    text = ""

    def begin(self, mode: str, question: str) -> None:
        """Start an episode."""
        self.text = ""
        self._add(mode, "task", question)

    def add_step(
        self, mode: str, action: str, observation: str, info: Mapping[str, Any], *, is_last: bool
    ) -> None:
        """Add a step, and the metrics after the last one."""
        terms = (f"{name} {value:+.3g}" for name, value in info["reward_terms"].items() if value)
        self._add(mode, "agent", action, "  ".join([info["action"].get("error", ""), *terms]))
        if observation:
            self._add(mode, "environment", observation)
        if is_last:
            figures = "  ".join(f"{name} {value:g}" for name, value in info["metrics"].items())
            self._add(mode, "end", figures)

    def _add(self, mode: str, speaker: str, text: str, note: str = "") -> None:
        if mode == "human":
            print_entry(speaker, text, note)
        else:
            file = io.StringIO()
            print_entry(speaker, text, note, file=file, force_terminal=True)
            self.text += file.getvalue()


def print_entry(speaker: str, text: str, note: str, **options: Any) -> None:
    """Print an entry, to the terminal unless the options of `rich.console.Console` differ."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    shown = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    shown = shown.encode(errors="replace").decode()
    console = Console(width=100, highlight=False, **options)
    heading = Text.assemble((speaker, _STYLES[speaker]), "  ", (note, "bold"))
    console.print(heading, Padding(Text(shown), (0, 0, 0, 2)))
