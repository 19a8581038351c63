"""Trains several trainers in turns, one optimiser step each, and times the steps.

So all sides meet the same machine. Each trainer runs its own ``train()`` in a thread, and waits
before every step until it is its turn; only one works at a time.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from benchmarks.performance.comparison import measure_in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """What one optimiser step took."""

    seconds: float
    """All of it: rollout, scores, gradient, update."""
    gradient_seconds: float
    """All but the update of the weights."""
    facts: dict[str, float]
    """What the side says of its step."""


def train_in_turns(
    trainers: Mapping[str, Trainer],
    rounds: int,
    *,
    before_round: Callable[[], None] = lambda: None,
    facts: Mapping[str, Callable[[], dict[str, float]]] | None = None,
) -> dict[str, list[TimedStep]]:
    """Train each trainer for `rounds` steps after one that is not counted; return its steps.

    The ``max_steps`` of each is `rounds` + 1. `before_round` is called when no trainer is at work,
    `facts` after each step.
    """
    sides = {
        name: _Side(trainer, (facts or {}).get(name, dict[str, float]))
        for name, trainer in trainers.items()
    }
    try:
        for side in sides.values():
            side.start()
        turns = {name: side.take_turn for name, side in sides.items()}
        steps = measure_in_turns(
            turns, rounds + 1, description=" vs ".join(sides), before_round=before_round
        )
    finally:
        for side in sides.values():
            side.end()
    return {name: timed[1:] for name, timed in steps.items()}


class _Stopped(Exception):
    """Ends a trainer's thread where another side failed."""


class _Side(TrainerCallback):  # type: ignore[misc]
    """One trainer in its thread."""

    def __init__(self, trainer: Trainer, facts: Callable[[], dict[str, float]]) -> None:
        self._trainer, self._facts = trainer, facts
        self._may_go, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def start(self) -> None:
        """Let the trainer go until it waits before its first step."""
        self._thread.start()
        self._wait()

    def take_turn(self) -> TimedStep:
        """Let the trainer do one step."""
        self._may_go.release()
        self._wait()
        return self._step

    def end(self) -> None:
        """Let the thread end, wherever it is."""
        self._is_stopped = True
        self._may_go.release()
        if self._thread.ident is not None:
            self._thread.join()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the turn."""
        self._has_paused.release()
        self._may_go.acquire()
        if self._is_stopped:
            raise _Stopped
        self._started = _now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note when the gradient was there."""
        self._gradient_seconds = _now() - self._started

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step."""
        seconds = _now() - self._started
        self._step = TimedStep(
            seconds=seconds, gradient_seconds=self._gradient_seconds, facts=self._facts()
        )

    def _run(self) -> None:
        try:
            self._trainer.train()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
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
