"""How a run shows itself in a notebook: a bar, the curve and figures below, then trajectories."""

import base64
import html
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils import is_in_notebook

from agent_trainers.monitoring.live_view import NUMBERS, SuccessProgress
from agent_trainers.monitoring.report import learning_curve_png, trajectory_page
from agent_trainers.monitoring.trajectory_samples import choose, trained_samples

SECONDS_BETWEEN_PICTURES: Final = 2.0
NUM_SAMPLES: Final = 4
_PAGE_HEIGHT: Final = 480


class RunPicture:
    """The learning curve of a run and its newest figures; a notebook shows it as HTML."""

    def __init__(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Take the trainer's log."""
        self._history = history

    def _repr_html_(self) -> str:
        batches = [entry for entry in self._history if "reward" in entry]
        if not batches:
            return "<em>No batch has been trained on yet.</em>"
        curve = base64.b64encode(learning_curve_png(self._history)).decode("ascii")
        cells = "".join(
            f"<td style='text-align:left'>{html.escape(label)} <b>{form.format(value)}</b></td>"
            for name, label, form in (("success", "success", "{:.1%}"),
                                      ("reward", "return", "{:+.3f}"), *NUMBERS)
            if isinstance(value := batches[-1].get(name), int | float)
        )  # fmt: skip
        return (
            f"<img src='data:image/png;base64,{curve}' style='max-width:640px' "
            f"alt='success and return by optimiser step'/><table><tr>{cells}</tr></table>"
        )


class NotebookView(SuccessProgress):
    """The bar of `SuccessProgress`, a `RunPicture` that is kept up to date, and what was played."""

    def __init__(self, trainer: Any) -> None:
        """Show the runs of `trainer`."""
        super().__init__()
        self._trainer = trainer
        self._handle: Any = None
        self._drawn = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the bar, and a place for the picture below it."""
        super().on_train_begin(args, state, control)
        if state.is_world_process_zero:
            from IPython.display import display

            self._handle = display(RunPicture(state.log_history), display_id=True)
            self._drawn = time.perf_counter()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Show the newest figures; the picture anew, but not many times a second."""
        super().on_log(args, state, control, logs)
        if self._handle is not None and self._drawn + SECONDS_BETWEEN_PICTURES < (
            now := time.perf_counter()
        ):
            self._handle.update(RunPicture(state.log_history))
            self._drawn = now

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draw the last picture, and show some trajectories of the last batch."""
        super().on_train_end(args, state, control)
        if self._handle is not None:
            self._handle.update(RunPicture(state.log_history))
            self._handle = None
            self._show_trajectories(state.global_step)

    def _show_trajectories(self, step: int) -> None:
        from IPython.display import HTML, display

        if (record := self._trainer.last_batch) is None:
            return
        label = f"training, step {step}"
        samples = trained_samples(
            record, choose(record.trajectories, NUM_SAMPLES), label=label, optimiser_step=step
        )
        page = trajectory_page(samples, tokenizer=self._trainer.processing_class, title=label)
        # a frame of its own: neither's styles touch the other
        frame = (
            f'<iframe srcdoc="{html.escape(page)}" width="100%" height="{_PAGE_HEIGHT}" '
            'sandbox="allow-scripts" style="border:1px solid #ccc"></iframe>'
        )
        display(HTML(f"<details><summary>Trajectories of step {step}</summary>{frame}</details>"))


def show_in_notebook(trainer: Any) -> None:
    """In a notebook, show a trainer's runs by `NotebookView` instead of transformers' table.

    That one knows the training loss alone, which says nothing here. Relies on: it is what the
    trainer adds for itself there, unless `disable_tqdm` is set.
    """
    if not is_in_notebook() or trainer.args.disable_tqdm:
        return
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
    trainer.add_callback(NotebookView(trainer))
