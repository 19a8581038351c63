"""How a run shows itself: a view that redraws itself in a terminal, a plain bar elsewhere."""

import contextlib
import datetime
import itertools
import logging
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS: Final = "_.-=+*%#"
REFRESHES_PER_SECOND: Final = 4.0
CURVE_WIDTH: Final = 40
MAX_TERMS: Final = 8
MAX_ENVS: Final = 16
MAX_NAME: Final = 44
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
"""What is logged, as it is called and written where people read it."""
_PARTS: Final = (("generate", "cyan"), ("environment", "yellow"), ("score", "magenta"),
                 ("train", "green"))  # fmt: skip
_DOING: Final = {"rollout": "playing episodes", "score": "scoring", "train": "training"}
_FAILURES: Final = (
    "episodes/environment_error", "episodes/timeout", "episodes/policy_error", "episodes/left_out",
    "episodes/token_limit", "episodes/context_overflow", "actions/", "tools/failures",
)  # fmt: skip


class RunView:
    """What is known of a run, as a panel; any rich console can print it."""

    def __init__(self, title: str, num_steps: int) -> None:
        """Know nothing yet of a run of `num_steps` optimiser steps."""
        self.step = 0
        self.seconds_done = 0.0
        self.seconds_left: float | None = None
        self.doing = ""
        self.alarms: Sequence[str] = ()
        self._title = title
        self._num_steps = num_steps
        self._curves: defaultdict[str, list[float]] = defaultdict(list)
        self._successes: defaultdict[str, list[float]] = defaultdict(list)
        self._newest: dict[str, float] = {}
        self._lock = threading.Lock()  # it is drawn from a thread of its own

    def add(self, logs: Mapping[str, Any]) -> None:
        """Take in what was logged: of an evaluation its success, of a training batch everything."""
        with self._lock:
            self._add_successes(logs)
            if "reward" not in logs and "loss" not in logs:
                return
            self._newest = {name: v for name, v in logs.items() if isinstance(v, int | float)}
            for name, value in self._newest.items():
                if name in ("success", "reward") or name.startswith("rewards/"):
                    self._curves[name].append(value)

    def _add_successes(self, logs: Mapping[str, Any]) -> None:
        """Take in the success of each of several environments, in training and in evaluation."""
        for name, value in logs.items():
            if match := _SUCCESS.fullmatch(name):
                label = ("evaluated " if match["evaluated"] else "") + (match["env"] or "")
                self._successes[label.strip()].append(value)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel."""
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        with self._lock:
            parts: list[Any] = [self._progress(), "", self._reward_table(blocks)]
            if self._newest:
                parts += [
                    *self._drawn(),
                    "",
                    self._numbers(),
                    "",
                    self._time_split(),
                    self._failures(),
                ]
            parts += [Text(f"alarm: {alarm}", "bold red") for alarm in self.alarms]
        yield Panel(Group(*parts), title=self._title, title_align="left", padding=(0, 1))

    def _progress(self) -> Table:
        steps, times = Column(no_wrap=True), Column(no_wrap=True, justify="right")
        table = Table.grid(steps, Column(ratio=1), times, padding=(0, 1), expand=True)
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        table.add_row(
            f"[bold]step {self.step}/{self._num_steps}",
            ProgressBar(total=max(1, self._num_steps), completed=self.step),
            f"{duration(self.seconds_done)}{left}  [dim]{self.doing}",
        )
        return table

    def _reward_table(self, blocks: str) -> Table:
        values = Column(justify="right", no_wrap=True)
        table = Table.grid(Column(no_wrap=True), values, Column(no_wrap=True), padding=(0, 2))
        terms = sorted(name for name in self._curves if name.startswith("rewards/"))[:MAX_TERMS]
        for name in ("success", "reward", *terms):
            if curve := self._curves.get(name):
                label = {"success": "success", "reward": "return"}.get(name)
                text = Text(label or f"  {name.removeprefix('rewards/')}", "bold" if label else "")
                form = "{:.1%}" if name == "success" else "{:+.3f}"
                drawn = Text(sparkline(curve, CURVE_WIDTH, blocks), "green" if label else "cyan")
                table.add_row(text, form.format(curve[-1]), drawn)
        for label, curve in [*self._successes.items()][:MAX_ENVS]:
            name = label if len(label) <= MAX_NAME else f"{label[: MAX_NAME - 3]}..."
            drawn = Text(sparkline(curve, CURVE_WIDTH, blocks), "magenta")
            table.add_row(Text(f"  {name}"), f"{curve[-1]:.1%}", drawn)
        return table

    def _numbers(self) -> Columns:
        shown = [
            Text.assemble((f"{label} ", "dim"), form.format(self._newest[name]))
            for name, label, form in NUMBERS
            if name in self._newest
        ]
        return Columns(shown, padding=(0, 3), equal=True)

    def _drawn(self) -> list[Text]:
        """Say what a curriculum draws: shares of environments, or tasks in pools; if there is one.

        The largest come first.
        """
        for prefix, form in (("curriculum/share/", "{:.0%}"), ("curriculum/tasks/", "{:.0f}")):
            values = {n: v for n, v in self._newest.items() if n.startswith(prefix) and v > 0}
            largest = sorted(values, key=lambda name: -values[name])[:MAX_TERMS]
            if largest:
                words = [f"{n.removeprefix(prefix)} {form.format(values[n])}" for n in largest]
                return [Text.assemble(("drawn  ", "dim"), "   ".join(words))]
        return []

    def _time_split(self) -> Text:
        """Draw the parts of a step as one bar, and say how long each took."""
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
    """Keeps a `RunView` on the terminal while training runs; whatever is printed goes above it."""

    def __init__(
        self, title: str, clock: Any = None, console: Console | None = None, watch: Any = None
    ) -> None:
        """Show nothing until training begins.

        Then what the trainer's `StepClock` and `HackWatch` say, too, where they are given.
        """
        self._title = title
        self._clock, self._watch = clock, watch
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
        for entry in state.log_history:  # of a resumed run: its curves go on
            self._view.add(entry)
        self._started = time.perf_counter()
        live = Live(
            console=self._console,
            get_renderable=self._current,
            refresh_per_second=REFRESHES_PER_SECOND,
            # output that goes to a file stays there
            redirect_stdout=sys.stdout.isatty(),
        )
        stderr = sys.stderr
        self._open.enter_context(live)
        # a handler keeps the stream it was made with, so its lines would go through the view
        for handler in _log_handlers_to(stderr):
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
        """Take in the newest figures."""
        if self._view is not None and logs:
            self._view.add(logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last picture on the terminal."""
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error; may be called again."""
        if self._view is not None:
            self._view.doing = ""
        self._open.close()
        self._view = None

    def _current(self) -> RunView | str:
        """Return the view as of now; called from the thread that draws."""
        view = self._view
        if view is None:
            return ""
        view.seconds_done = time.perf_counter() - self._started
        if self._clock is not None:
            view.doing = _DOING.get(self._clock.part, self._clock.part)
        if self._watch is not None:
            view.alarms = [alarm.text for alarm in self._watch.active]
        return view


class SuccessProgress(ProgressCallback):  # type: ignore[misc]
    """transformers' bar, with success and return of the last batch in it, not a line a step."""

    SHOWN = (("success", "success"), ("reward", "return"), ("episodes/mean_turns", "turns"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the bar, on the main process."""
        super().on_train_begin(args, state, control)
        if self.training_bar is not None:
            self.training_bar.set_description("training")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open no bar: an evaluation is one batch, whose bar would stand still and then be full."""

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
    """Replace the trainer's own progress bar and log printer; the caller closes what it gets."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SuccessProgress):
            return callback  # a notebook's
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    console = Console(stderr=True)
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    progress = (
        LiveView(title, trainer.clock, console, trainer.watch) if can_redraw else SuccessProgress()
    )
    trainer.add_callback(progress)
    return progress


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a curve of at most `width` characters, from the lowest value to the highest.

    Where there are more values than characters, each stands for the mean of its share of them.
    """
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def time_split(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the wall-clock seconds of a step by part, from what was logged."""
    rollout, wait = (logs.get(f"time/{part}_seconds", 0.0) for part in ("rollout", "wait"))
    return {
        "generate": rollout - wait,
        "environment": wait,
        "score": logs.get("time/score_seconds", 0.0),
        "train": logs.get("time/train_seconds", 0.0),
    }


def _log_handlers_to(stream: Any) -> list[logging.StreamHandler[Any]]:
    return [
        handler
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in getattr(logger, "handlers", ())
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream
    ]


def duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds; ``0:12`` where there are no hours."""
    return str(datetime.timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
