"""Interleaved A/B timing, so that all sides are measured under the same load of the machine."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback

T = TypeVar("T")


def measure_interleaved(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    description: str,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:
    """Measure each side once a round, in alternating order."""
    measured: dict[str, list[T]] = {name: [] for name in sides}
    for number in tqdm(range(rounds), desc=description, leave=False):
        before_round()
        for name in sides if number % 2 else reversed(list(sides)):
            measured[name].append(sides[name]())
    return measured


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, minimum, maximum and all values."""
    return {
        "median": statistics.median(values), "min": min(values), "max": max(values),
        "values": list(values),
    }  # fmt: skip


def compare(ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Return the spread of the ratios of pairs, of seconds or bytes, and of both sides."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return {**spread(ratios), "ours": spread(ours), "other": spread(other)}


def seconds_of(action: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Times and facts of one optimiser step."""

    seconds: float
    """Rollout, scores, gradient and update."""
    gradient_seconds: float
    """Without the update of the weights."""
    facts: dict[str, float]


def train_interleaved(
    trainers: Mapping[str, Trainer],
    rounds: int,
    *,
    before_round: Callable[[], object] = lambda: None,
    facts: Mapping[str, Callable[[], dict[str, float]]] | None = None,
) -> dict[str, list[TimedStep]]:
    """Train each trainer for `rounds` timed steps after one warm-up step, one step at a time.

    Each trainer runs ``train()`` in a thread that waits before every step; its ``max_steps`` must
    be `rounds` + 1. `before_round` is called between steps, `facts` after each step.
    """
    sides = {
        name: _Side(trainer, (facts or {}).get(name, dict[str, float]))
        for name, trainer in trainers.items()
    }
    try:
        steps = measure_interleaved(
            {name: side.step for name, side in sides.items()},
            rounds + 1,
            description=" vs ".join(sides),
            before_round=before_round,
        )
    finally:
        for side in sides.values():
            side.stop()
    return {name: timed[1:] for name, timed in steps.items()}


class _Stopped(Exception):
    """Ends a trainer's thread after another side failed."""


class _Side(TrainerCallback):  # type: ignore[misc]
    """A trainer in its thread, which starts with the first step."""

    def __init__(self, trainer: Trainer, facts: Callable[[], dict[str, float]]) -> None:
        self._trainer, self._facts = trainer, facts
        self._may_run: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[TimedStep | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def step(self) -> TimedStep:
        """Run one step."""
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.put(True)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        """End the thread."""
        self._may_run.put(False)
        if self._thread.ident is not None:
            self._thread.join()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the turn."""
        if not self._may_run.get():
            raise _Stopped
        self._started = _now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time of the gradient."""
        self._gradient_seconds = _now() - self._started

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over the step."""
        seconds = _now() - self._started
        self._results.put(
            TimedStep(seconds=seconds, gradient_seconds=self._gradient_seconds, facts=self._facts())
        )

    def _run(self) -> None:
        try:
            self._trainer.train()
            raise RuntimeError("The training has ended: max_steps must be rounds + 1.")
        except BaseException as error:  # noqa: BLE001 - raised again by `step`
            self._results.put(error)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
