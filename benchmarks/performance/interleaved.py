"""Interleaved A/B timing, so that all sides are measured under the same load of the machine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
    """Return the spread of the ratios of pairs, and of both sides."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return {**spread(ratios), "ours": spread(ours), "other": spread(other)}


def seconds_of(action: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


class StepTimer(TrainerCallback):  # type: ignore[misc]
    """Runs and times single optimiser steps of a trainer, each by a ``train()`` with its own seed.

    Relies on: ``train()`` keeps the weights and the state of the optimiser of the one before.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Time `trainer`, which has its tasks already, after one step to warm up."""
        self._trainer = trainer
        trainer.args.max_steps = 1
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        trainer.train()

    def step(self) -> tuple[float, float]:
        """Return the seconds of a step, and those of it before the update of the weights."""
        self._trainer.args.seed += 1
        self._trainer.train()
        return self._ended - self._started, self._had_gradient - self._started

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock. Relies on: the rollout follows."""
        self._started = _now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the gradient."""
        self._had_gradient = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the step."""
        self._ended = _now()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
