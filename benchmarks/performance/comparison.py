"""Two sides of a comparison, measured in turns: what is written down about them."""

import statistics
from collections.abc import Sequence
from typing import Any


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
    """Return the spread of the ratios of pairs, measured next to each other.

    Args:
        ours: A number per pair: seconds, or bytes.
        other: The same of the other side.
        target: What the median ratio is to reach: at most, or for a speed-up at least.
        is_speedup: Whether the ratio is other to ours, how many times faster we are; or else ours
            to other, the share that we take.
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
