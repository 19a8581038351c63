"""Where the seconds of an optimiser step go: playing, scoring, training."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Measures the parts of each optimiser step, and logs them when it ends.

    ``time/rollout_seconds``: episodes are played, until the last has ended. ``time/wait_seconds``:
    the part of it in which nothing was generated, so environments were waited for.
    ``time/score_seconds``: rows, log-probabilities, values and advantages. ``time/train_seconds``:
    the rest of the step: forward, backward, optimiser. Wall time of the main process.
    """

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        """Log into `metrics`: where TRL's `log` finds the values of the mode ``train``."""
        self._metrics = metrics
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._generated = 0.0
        self._started: float | None = None
        self.part = "train"  # what is being done now

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the block's seconds to `part`, and not to the block around it."""
        started, before = time.perf_counter(), sum(self._seconds.values())
        outer, self.part = self.part, part
        try:
            yield
        finally:
            self.part = outer
            inside = sum(self._seconds.values()) - before
            self._seconds[part] += time.perf_counter() - started - inside

    def note_generation(self, seconds: float) -> None:
        """Note seconds of this process's rollout in which tokens were generated."""
        self._generated += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the step so far, by part."""
        rollout, score = self._seconds["rollout"], self._seconds["score"]
        total = 0.0 if self._started is None else time.perf_counter() - self._started
        return {
            "rollout": rollout,
            "wait": max(0.0, rollout - self._generated),
            "score": score,
            "train": max(0.0, total - rollout - score),
        }

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step. Relies on: generation happens after it."""
        self._seconds.clear()
        self._generated = 0.0
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step. Relies on: called after the optimiser step and before `log`."""
        for part, seconds in self.seconds().items():
            self._metrics[f"time/{part}_seconds"].append(seconds)
