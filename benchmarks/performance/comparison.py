"""Sides of a comparison: measured in turns, and what is written down about them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def measure_in_turns(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    description: str,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:
    """Measure each side once a round, so that all meet the same machine.

    Who goes first changes from round to round.
    """
    measured: dict[str, list[T]] = {name: [] for name in sides}
    for number in tqdm(range(rounds), desc=description, leave=False):
        before_round()
        for name in sides if number % 2 else reversed(list(sides)):
            measured[name].append(sides[name]())
    return measured


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, least and greatest, and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def compare(
    ours: Sequence[float], other: Sequence[float], *, target: float, is_speedup: bool = False
) -> dict[str, Any]:
    """Return the spread of the ratios of pairs: of seconds, or bytes.

    The ratio is ours to the other side's, and its median to be at most `target`; of a speed-up it
    is the other side's to ours, and to be at least `target`.
    """
    pairs = zip(ours, other, strict=True)
    ratios = [b / a if is_speedup else a / b for a, b in pairs]
    median = statistics.median(ratios)
    return {
        **spread(ratios),
        "target": target,
        "is_reached": median >= target if is_speedup else median <= target,
        "ours": spread(ours),
        "other": spread(other),
    }
