"""How a run shows itself while it goes on: a live view in a terminal, a plain bar elsewhere."""

from typing import Any

from rich.console import Console
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from agent_trainers.monitoring.live_view import LiveView


class SuccessProgress(TrainerCallback):  # type: ignore[misc]
    """One bar over the optimiser steps, with success and return of the last batch.

    Takes the place of transformers' `ProgressCallback`, which prints every log line.
    """

    SHOWN = (("success", "success"), ("reward", "return"), ("episodes/mean_turns", "turns"))

    def __init__(self) -> None:
        """Show nothing until training begins."""
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the bar, on the main process."""
        if state.is_world_process_zero:
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="training", unit="step"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Show the newest figures."""
        if self._bar is not None and logs:
            shown = {label: logs[name] for name, label in self.SHOWN if name in logs}
            if shown:
                self._bar.set_postfix({label: f"{value:.2f}" for label, value in shown.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar, also after an error; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


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
