"""The progress of a run: a live panel in a terminal or notebook, a plain bar elsewhere."""

import contextlib
import datetime
import html
import itertools
import logging
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils import is_in_notebook

from agent_trainers.monitoring.report import trajectory_page
from agent_trainers.monitoring.trajectory_samples import choose, trained_samples

BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS: Final = "_.-=+*%#"
CURVE_WIDTH: Final = 40
MAX_TERMS: Final = 8
MAX_ENVS: Final = 16
MAX_NAME: Final = 44
SECONDS_BETWEEN_UPDATES: Final = 1.0  # of a notebook
_SUCCESS: Final = re.compile(r"(?=env/|eval_)(?P<evaluated>eval_)?(env/(?P<env>[^/]+)/)?success")

NUMBERS: Final = (
    ("episodes/mean_turns", "turns", "{:.1f}"),
    ("tools/calls", "tool calls", "{:.1f}"),
    ("completions/mean_length", "tokens", "{:.0f}"),
    ("loss", "loss", "{:.3f}"),
    ("grad_norm", "gradient", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("kl", "KL", "{:.4f}"),
    ("clip_ratio/region_mean", "clipped", "{:.1%}"),
    ("sampling/sampling_logp_difference/mean", "drift", "{:.1e}"),
    ("groups/without_variance", "groups without variance", "{:.0%}"),
    ("groups/extra", "extra groups", "{:.0f}"),
    ("curriculum/level", "level", "{:.0f}"),
    ("critic/explained_variance", "critic explains", "{:.0%}"),
    ("context/drops", "contexts cut", "{:.0%}"),
)
"""Metrics with their labels and formats."""
_PARTS: Final = (("generate", "cyan"), ("environment", "yellow"), ("score", "magenta"),
                 ("train", "green"))  # fmt: skip
_ACTIVITIES: Final = {"rollout": "generating episodes", "score": "scoring", "train": "training"}
_FAILURES: Final = (
    "episodes/environment_error", "episodes/timeout", "episodes/policy_error", "episodes/left_out",
    "episodes/token_limit", "episodes/context_overflow", "actions/", "tools/failures",
)  # fmt: skip


class RunView(JupyterMixin):
    """A panel with the state of a run, for any rich console and for notebooks."""

    def __init__(self, title: str, num_steps: int) -> None:
        """Describe a run of `num_steps` optimiser steps."""
        self.step = 0
        self.seconds_done = 0.0
        self.seconds_left: float | None = None
        self.activity = ""
        self.alarms: Sequence[str] = ()
        self._title = title
        self._num_steps = num_steps
        self._curves: defaultdict[str, list[float]] = defaultdict(list)
        self._successes: defaultdict[str, list[float]] = defaultdict(list)
        self._newest: dict[str, float] = {}
        self._lock = threading.Lock()  # a separate thread renders it

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add a log entry: of an evaluation its success, of a training batch everything."""
        with self._lock:
            for name, value in logs.items():
                if match := _SUCCESS.fullmatch(name):
                    label = ("evaluated " if match["evaluated"] else "") + (match["env"] or "")
                    self._successes[label.strip()].append(value)
            if "reward" not in logs and "loss" not in logs:
                return
            self._newest = {name: v for name, v in logs.items() if isinstance(v, int | float)}
            for name, value in self._newest.items():
                if name in ("success", "reward") or name.startswith("rewards/"):
                    self._curves[name].append(value)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the panel."""
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        with self._lock:
            parts: list[Any] = [self._progress(), "", self._curve_table(blocks)]
            if self._newest:
                parts += [*self._drawn(), "", self._numbers(), "", self._times(), self._failures()]
            parts += [Text(f"alarm: {alarm}", "bold red") for alarm in self.alarms]
        yield Panel(Group(*parts), title=self._title, title_align="left", padding=(0, 1))

    def _progress(self) -> Table:
        steps, times = Column(no_wrap=True), Column(no_wrap=True, justify="right")
        table = Table.grid(steps, Column(ratio=1), times, padding=(0, 1), expand=True)
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        table.add_row(
            f"[bold]step {self.step}/{self._num_steps}",
            ProgressBar(total=max(1, self._num_steps), completed=self.step),
            f"{duration(self.seconds_done)}{left}  [dim]{self.activity}",
        )
        return table

    def _curve_table(self, blocks: str) -> Table:
        """Return success, return, reward terms and environments, each with its curve."""
        values = Column(justify="right", no_wrap=True)
        table = Table.grid(Column(no_wrap=True), values, Column(no_wrap=True), padding=(0, 2))

        def add(label: str, form: str, curve: Sequence[float], colour: str, style: str) -> None:
            drawn = Text(sparkline(curve, CURVE_WIDTH, blocks), colour)
            table.add_row(Text(label, style), form.format(curve[-1]), drawn)

        if curve := self._curves.get("success"):
            add("success", "{:.1%}", curve, "green", "bold")
        if curve := self._curves.get("reward"):
            add("return", "{:+.3f}", curve, "green", "bold")
        for name in sorted(name for name in self._curves if name.startswith("rewards/"))[
            :MAX_TERMS
        ]:
            add(f"  {name.removeprefix('rewards/')}", "{:+.3f}", self._curves[name], "cyan", "")
        for label, curve in [*self._successes.items()][:MAX_ENVS]:
            short = label if len(label) <= MAX_NAME else f"{label[: MAX_NAME - 3]}..."
            add(f"  {short}", "{:.1%}", curve, "magenta", "")
        return table

    def _numbers(self) -> Columns:
        shown = [
            Text.assemble((f"{label} ", "dim"), form.format(self._newest[name]))
            for name, label, form in NUMBERS
            if name in self._newest
        ]
        return Columns(shown, padding=(0, 3), equal=True)

    def _drawn(self) -> list[Text]:
        """Return the largest shares of environments, or pools of tasks, that a curriculum draws."""
        for prefix, form in (("curriculum/share/", "{:.0%}"), ("curriculum/tasks/", "{:.0f}")):
            values = {n: v for n, v in self._newest.items() if n.startswith(prefix) and v > 0}
            if largest := sorted(values, key=lambda name: -values[name])[:MAX_TERMS]:
                words = [f"{n.removeprefix(prefix)} {form.format(values[n])}" for n in largest]
                return [Text.assemble(("drawn  ", "dim"), "   ".join(words))]
        return []

    def _times(self) -> Text:
        """Return the parts of a step as one bar, with their seconds."""
        seconds = time_split(self._newest)
        total = sum(seconds.values())
        bar, words = Text(), Text()
        for name, colour in _PARTS:
            share = seconds[name] / total if total else 0.0
            bar.append(" " * round(share * CURVE_WIDTH / 2), f"on {colour}")
            words.append(f"  {name} {seconds[name]:.2f}", colour)
        return Text.assemble((f"{total:.2f} s a step  ", "dim"), bar, words)

    def _failures(self) -> Text:
        found = [
            f"{'tool failures' if name == 'tools/failures' else name.split('/')[-1]} {value:.1%}"
            for name, value in sorted(self._newest.items())
            if name.startswith(_FAILURES) and value > 0 and name != "actions/invalid"
        ]
        if not found:
            return Text("no failures", "dim")
        return Text.assemble(("failures  ", "dim"), ("   ".join(found), "red"))


class LiveView(TrainerCallback):  # type: ignore[misc]
    """Keeps a `RunView` at the bottom of the terminal while training runs."""

    def __init__(
        self,
        title: str,
        clock: Any = None,
        find_alarms: Callable[[], Sequence[str]] = list,
        console: Console | None = None,
    ) -> None:
        """Show the activity of the trainer's `StepClock` and alarms, if given."""
        self._title, self._clock, self._find_alarms = title, clock, find_alarms
        self._console = console or Console(stderr=True)
        self._open = contextlib.ExitStack()
        self._view: RunView | None = None
        self._started = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the view, on the main process."""
        if not state.is_world_process_zero:
            return
        self._view = RunView(self._title, state.max_steps)
        self._view.step = self._first_step = state.global_step
        for entry in state.log_history:  # of a resumed run
            self._view.add(entry)
        self._started = time.perf_counter()
        self._show(self._view)

    def _show(self, view: RunView) -> None:
        stderr = sys.stderr
        # printed lines appear above the view; redirected output stays where it goes
        self._open.enter_context(
            Live(
                console=self._console,
                get_renderable=lambda: self._update(view),
                redirect_stdout=sys.stdout.isatty(),
            )
        )
        # handlers keep the stream they were made with: redirect their lines, too
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    handler.setStream(sys.stderr)
                    self._open.callback(handler.setStream, stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        if self._view is not None:
            self._view.step = state.global_step
            seconds = time.perf_counter() - self._started
            per_step = seconds / max(1, state.global_step - self._first_step)
            self._view.seconds_left = per_step * (state.max_steps - state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the newest metrics."""
        if self._view is not None and logs:
            self._view.add(logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last panel on the terminal."""
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an error; may be called again."""
        if self._view is not None:
            self._view.activity = ""
        self._clock = None
        self._open.close()
        self._view = None

    def _update(self, view: RunView) -> RunView:
        view.seconds_done = time.perf_counter() - self._started
        if self._clock is not None:
            view.activity = _ACTIVITIES.get(self._clock.part, self._clock.part)
        view.alarms = self._find_alarms()
        return view


class NotebookView(LiveView):
    """The same view in a notebook, and trajectories of the last batch when training ends."""

    def __init__(self, trainer: Any) -> None:
        """Show the runs of `trainer`."""
        super().__init__("training", trainer.clock)
        self._trainer = trainer
        self._handle: Any = None
        self._updated = 0.0

    def _show(self, view: RunView) -> None:
        from IPython.display import display

        self._handle, self._updated = display(view, display_id=True), time.perf_counter()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Redraw the view, at most once a second."""
        super().on_log(args, state, control, logs)
        now = time.perf_counter()
        if self._view is not None and now >= self._updated + SECONDS_BETWEEN_UPDATES:
            self._handle.update(self._update(self._view))
            self._updated = now

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the last state, and trajectories to unfold."""
        if self._view is None:
            return
        self._handle.update(self._update(self._view))
        self.close()
        from IPython.display import HTML, display

        if (record := self._trainer.last_batch) is None:
            return
        label = f"training, step {state.global_step}"
        chosen = choose(record.trajectories, 4)
        samples = trained_samples(record, chosen, label=label, optimiser_step=state.global_step)
        page = trajectory_page(samples, tokenizer=self._trainer.processing_class, title=label)
        # in a frame, so that the styles of page and notebook do not mix
        frame = (
            f'<iframe srcdoc="{html.escape(page)}" width="100%" height="480" '
            'sandbox="allow-scripts" style="border:1px solid #ccc"></iframe>'
        )
        display(HTML(f"<details><summary>Trajectories of {label}</summary>{frame}</details>"))


class PlainProgress(ProgressCallback):  # type: ignore[misc]
    """transformers' bar with success, return and turns of the last batch, without a line a step."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open no bar: an evaluation is a single batch."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Show the newest metrics."""
        logs = logs or {}
        names = {"success": "success", "reward": "return", "episodes/mean_turns": "turns"}
        shown = {label: f"{logs[name]:.2f}" for name, label in names.items() if name in logs}
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)

    def close(self) -> None:
        """Close the bar, also after an error; may be called again."""
        if self.training_bar is not None:
            self.training_bar.close()


def show_in_notebook(trainer: Any) -> None:
    """In a notebook, replace transformers' table of training losses by `NotebookView`.

    Relies on: the trainer adds that table unless `disable_tqdm` is set.
    """
    if is_in_notebook() and not trainer.args.disable_tqdm:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(NotebookView(trainer))


def show_progress(trainer: Any, title: str) -> LiveView | PlainProgress:
    """Replace the trainer's progress bar and log printer; the caller closes the result."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, NotebookView):
            return callback
    for kind in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(kind)
    console = Console(stderr=True)
    progress: LiveView | PlainProgress = PlainProgress()
    if console.is_terminal and not console.is_dumb_terminal:
        progress = LiveView(title, trainer.clock, lambda: _alarms(trainer), console)
    trainer.add_callback(progress)
    return progress


def _alarms(trainer: Any) -> list[str]:
    return [text for each in trainer.extensions for text in each.active_alarms().values()]


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a curve of at most `width` characters; each is the mean of its share of values."""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def time_split(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by part."""
    rollout, wait = (logs.get(f"time/{part}_seconds", 0.0) for part in ("rollout", "wait"))
    return {
        "generate": rollout - wait,
        "environment": wait,
        "score": logs.get("time/score_seconds", 0.0),
        "train": logs.get("time/train_seconds", 0.0),
    }


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds; ``0:12`` without hours."""
    return str(datetime.timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
