"""Interleaved A/B timing, so that all sides are measured under the same load of the machine."""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        for side in sides.values():
            side.start()
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
    """A trainer in its thread."""

    def __init__(self, trainer: Trainer, facts: Callable[[], dict[str, float]]) -> None:
        self._trainer, self._facts = trainer, facts
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def start(self) -> None:
        """Run until the first step."""
        self._thread.start()
        self._wait()

    def step(self) -> TimedStep:
        """Run one step."""
        self._may_run.release()
        self._wait()
        return self._timed

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._may_run.release()
        if self._thread.ident is not None:
            self._thread.join()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Pause."""
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_stopped:
            raise _Stopped
        self._started = _now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time of the gradient."""
        self._gradient_seconds = _now() - self._started

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step."""
        self._timed = TimedStep(
            seconds=_now() - self._started,
            gradient_seconds=self._gradient_seconds,
            facts=self._facts(),
        )

    def _run(self) -> None:
        try:
            self._trainer.train()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            self._error = error
        finally:
            self._has_paused.release()

    def _wait(self) -> None:
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
