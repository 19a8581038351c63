"""What a few seeds allow to say: Student's t intervals, and exact tests that pair runs by seed."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Final

T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip
"""The 97.5 % quantile of Student's t by degrees of freedom, from 1."""
ALPHA: Final = 0.05
MOST_SEEDS: Final = 16
"""A test tries all signs: 65,536 for so many."""


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean by Student's t; infinite for one value."""
    if len(values) < 2:
        return float("inf")
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def sign_flip_test(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of the paired permutation test.

    Under the null hypothesis each difference could as well have had the other sign (Fisher, 1935).

    Args:
        differences: First less second, one per seed that both have; at most `MOST_SEEDS`.

    Raises:
        ValueError: If there are none, or more.
    """
    if not 0 < len(differences) <= MOST_SEEDS:
        raise ValueError(f"1 to {MOST_SEEDS} differences, not {len(differences)}.")
    observed = abs(sum(differences))
    signs = itertools.product((1.0, -1.0), repeat=len(differences))
    # a tolerance: sums that are equal on paper differ in the last bit by the order of their terms
    sums = [abs(sum(s * d for s, d in zip(own, differences, strict=True))) for own in signs]
    return sum(value >= observed - 1e-9 for value in sums) / len(sums)


def smallest_p(num_seeds: int) -> float:
    """Return the smallest p-value that `sign_flip_test` can give."""
    return min(1.0, 2.0 ** (1 - num_seeds))


def seeds_needed(num_comparisons: int) -> int:
    """Return from how many seeds on one of so many comparisons can be significant after Holm."""
    return next(n for n in itertools.count(1) if smallest_p(n) * num_comparisons < ALPHA)
