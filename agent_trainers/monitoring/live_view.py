"""The progress of a run: a live panel in a terminal or notebook, lines elsewhere."""

import contextlib
import datetime
import itertools
import logging
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

BLOCKS: Final = "▁▂▃▄▅▆▇█"
CURVE_WIDTH: Final = 40
MAX_TERMS: Final = 8
MAX_ENVS: Final = 16
MAX_LINES: Final = 100
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
_PARTS: Final = {"generate": "cyan", "environment": "yellow", "score": "magenta", "train": "green"}
_ACTIVITIES: Final = {"rollout": "generating episodes", "score": "scoring", "train": "training"}
_FAILURES: Final = (
    "episodes/environment_error", "episodes/timeout", "episodes/policy_error",
    "episodes/token_limit", "episodes/context_overflow", "actions/", "tools/failures",
)  # fmt: skip


class LiveView(TrainerCallback, JupyterMixin):  # type: ignore[misc]
    """A panel with the state of a run, redrawn while it trains; a rich renderable."""

    def __init__(self, title: str, trainer: Any = None, console: Console | None = None) -> None:
        """Show the runs of `trainer`: its activity, and the alarms of its extensions."""
        self._title, self._trainer = title, trainer
        self._console = console or Console(stderr=True)
        self._open = contextlib.ExitStack()
        self._handle: Any = None  # of the panel in a notebook
        self._is_open = False
        self._step = self._first_step = self._num_steps = 0
        self._started = time.perf_counter()
        self._curves: defaultdict[str, list[float]] = defaultdict(list)
        self._successes: defaultdict[str, list[float]] = defaultdict(list)
        self._newest: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._step = self._first_step = state.global_step
        self._num_steps = state.max_steps
        for entry in state.log_history:  # of a resumed run
            self.add(entry)
        self._started, self._is_open = time.perf_counter(), True
        if is_in_notebook():
            from IPython.display import display

            self._handle = display(self, display_id=True)
            return
        stderr = sys.stderr
        # printed lines appear above the view; redirected output stays where it goes
        live = Live(
            console=self._console,
            get_renderable=lambda: self,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._open.enter_context(live)
        # handlers keep the stream they were made with: redirect their lines, too
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                    handler.setStream(sys.stderr)
                    self._open.callback(handler.setStream, stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if self._is_open and logs:
            self.add(logs)
            if self._handle is not None:
                self._handle.update(self)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an error; may be called again."""
        if self._is_open and self._handle is not None:
            self._handle.update(self)
        self._is_open = False
        self._open.close()

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add a log entry: of an evaluation its success, of a training batch everything."""
        for name, value in logs.items():
            if match := _SUCCESS.fullmatch(name):
                label = ("evaluated " if match["evaluated"] else "") + (match["env"] or "")
                self._successes[label.strip()].append(value)
        if "reward" not in logs and "loss" not in logs:
            return
        newest = {name: v for name, v in logs.items() if isinstance(v, int | float)}
        for name, value in newest.items():
            if name in ("success", "reward") or name.startswith("rewards/"):
                self._curves[name].append(value)
        self._newest = newest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the panel; a thread of rich does so while metrics are added."""
        logs = self._newest
        parts: list[Any] = [self._progress(), "", self._curve_table()]
        if logs:
            parts += ["", _numbers(logs), "", _times(logs), _failures(logs)]
        alarms = [
            text
            for extension in getattr(self._trainer, "extensions", ())
            for text in extension.active_alarms().values()
        ]
        parts += [Text(f"alarm: {alarm}", "bold red") for alarm in alarms]
        yield Panel(Group(*parts), title=Text(self._title), title_align="left", padding=(0, 1))

    def _progress(self) -> Table:
        steps, times = Column(no_wrap=True), Column(no_wrap=True, justify="right")
        table = Table.grid(steps, Column(ratio=1), times, padding=(0, 1), expand=True)
        seconds, left = time.perf_counter() - self._started, ""
        if done := self._step - self._first_step:
            left = f", {duration(seconds / done * (self._num_steps - self._step))} left"
        activity = ""
        if self._is_open and (clock := getattr(self._trainer, "clock", None)) is not None:
            activity = _ACTIVITIES.get(clock.part, clock.part)
        table.add_row(
            f"[bold]step {self._step}/{self._num_steps}",
            ProgressBar(total=max(1, self._num_steps), completed=self._step),
            f"{duration(seconds)}{left}  [dim]{activity}",
        )
        return table

    def _curve_table(self) -> Table:
        """Return success, return, reward terms and environments, each with its curve."""
        names = sorted(name for name in list(self._curves) if name.startswith("rewards/"))
        rows = [
            (Text("success", "bold"), "{:.1%}", self._curves.get("success"), "green"),
            (Text("return", "bold"), "{:+.3f}", self._curves.get("reward"), "green"),
            *((Text(f"  {n.removeprefix('rewards/')}"), "{:+.3f}", self._curves[n], "cyan")
              for n in names[:MAX_TERMS]),
            *((Text(f"  {label}"), "{:.1%}", curve, "magenta")
              for label, curve in list(self._successes.items())[:MAX_ENVS]),
        ]  # fmt: skip
        labels = Column(no_wrap=True, max_width=46)
        values = Column(justify="right", no_wrap=True)
        table = Table.grid(labels, values, Column(no_wrap=True), padding=(0, 2))
        for label, form, curve, colour in rows:
            if curve:
                drawn = Text(sparkline(curve, CURVE_WIDTH), colour)
                table.add_row(label, form.format(curve[-1]), drawn)
        return table


def _numbers(logs: Mapping[str, float]) -> Columns:
    shown = [
        Text.assemble((f"{label} ", "dim"), form.format(logs[name]))
        for name, label, form in NUMBERS
        if name in logs
    ]
    return Columns(shown, padding=(0, 3), equal=True)


def _times(logs: Mapping[str, float]) -> Text:
    """Return the parts of a step as one bar, with their seconds."""
    rollout, wait, score, train = (
        logs.get(f"time/{part}_seconds", 0.0) for part in ("rollout", "wait", "score", "train")
    )
    seconds = dict(zip(_PARTS, (rollout - wait, wait, score, train), strict=True))
    total = sum(seconds.values())
    bar, words = Text(), Text()
    for name, colour in _PARTS.items():
        share = seconds[name] / total if total else 0.0
        bar.append(" " * round(share * CURVE_WIDTH / 2), f"on {colour}")
        words.append(f"  {name} {seconds[name]:.2f}", colour)
    return Text.assemble((f"{total:.2f} s a step  ", "dim"), bar, words)


def _failures(logs: Mapping[str, float]) -> Text:
    found = [
        f"{'tool failures' if name == 'tools/failures' else name.split('/')[-1]} {value:.1%}"
        for name, value in sorted(logs.items())
        if name.startswith(_FAILURES) and value > 0 and name != "actions/invalid"
    ]
    if not found:
        return Text("no failures", "dim")
    return Text.assemble(("failures  ", "dim"), ("   ".join(found), "red"))


class PlainProgress(TrainerCallback):  # type: ignore[misc]
    """Prints a line of metrics for each evaluation, and for about `MAX_LINES` steps of a run."""

    def __init__(self) -> None:
        self._started, self._first_step = time.perf_counter(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        step, last, logs = state.global_step, state.max_steps, logs or {}
        prefix = "eval_" if "eval_loss" in logs else ""
        is_due = prefix or ("loss" in logs and (step % -(-last // MAX_LINES) == 0 or step == last))
        if not (is_due and state.is_world_process_zero):
            return
        names = {"success": "success", "reward": "return", "episodes/mean_turns": "turns"}
        names |= {} if prefix else {"loss": "loss", "grad_norm": "gradient"}
        shown = [f"{names[n]} {logs[prefix + n]:.3f}" for n in names if prefix + n in logs]
        seconds = time.perf_counter() - self._started
        left = seconds / max(1, step - self._first_step) * (last - step)
        shown += ["evaluated"] if prefix else [duration(seconds), f"{duration(left)} left"]
        sys.stderr.write(f"step {step}/{last}: {', '.join(shown)}\n")

    def close(self) -> None:
        """Do nothing."""


def show_in_notebook(trainer: Any) -> None:
    """In a notebook, replace transformers' table of training losses by `LiveView`.

    Relies on: the trainer adds that table unless `disable_tqdm` is set.
    """
    if is_in_notebook() and not trainer.args.disable_tqdm:
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(LiveView("training", trainer))


def show_progress(trainer: Any, title: str) -> LiveView | PlainProgress:
    """Replace the trainer's progress bar and log printer; the caller closes the result."""
    for kind in (ProgressCallback, PrinterCallback, LiveView):
        trainer.remove_callback(kind)
    console = Console(stderr=True)
    progress: LiveView | PlainProgress = PlainProgress()
    can_draw = console.is_terminal and not console.is_dumb_terminal and not is_notebook_command()
    if is_in_notebook() or (can_draw and console.encoding.startswith("utf")):
        progress = LiveView(title, trainer, console)
    trainer.add_callback(progress)
    return progress


def is_notebook_command() -> bool:
    """Return whether a cell runs this process with ``!``: its terminal cannot move the cursor."""
    return "JPY_PARENT_PID" in os.environ and not is_in_notebook()


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters; each is the mean of its share of values."""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds; ``0:12`` without hours."""
    return str(datetime.timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
