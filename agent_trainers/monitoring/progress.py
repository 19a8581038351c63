"""How a run shows itself while it goes on: a live view in a terminal, a plain bar elsewhere."""

from typing import Any

from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from agent_trainers.monitoring.live_view import LiveView


class SuccessProgress(ProgressCallback):  # type: ignore[misc]
    """transformers' bar, with success and return of the last batch in it, not a line a step."""

    SHOWN = (("success", "success"), ("reward", "return"), ("episodes/mean_turns", "turns"))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Show the newest figures."""
        shown = {label: f"{logs[name]:.2f}" for name, label in self.SHOWN if logs and name in logs}
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar, also after an error; may be called again."""
        if self.training_bar is not None:
            self.training_bar.close()


def show_progress(trainer: Any, title: str) -> LiveView | SuccessProgress:
    """Replace the trainer's own progress bar and log printer; the caller closes what it gets.

    Args:
        trainer: A trainer of ours.
        title: What runs, for the heading.
    """
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    console = Console(stderr=True)
    progress: LiveView | SuccessProgress
    if console.is_terminal and not console.is_dumb_terminal:
        progress = LiveView(title, trainer.clock, console)
    else:
        progress = SuccessProgress()
    trainer.add_callback(progress)
    return progress
