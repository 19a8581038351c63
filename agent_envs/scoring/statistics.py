"""Confidence intervals, paired tests and corrections for multiple comparisons.

In benchmarks the unit is the task: samples of one task are averaged first, because they are not
independent. All functions are pure and deterministic. SciPy is imported only where its quantiles
are needed, so `wilson_interval` works without it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

CONFIDENCE: Final = 0.95
ALPHA: Final = 1 - CONFIDENCE
MAX_EXACT_PERMUTATION: Final = 16
"""Largest number of differences for which `paired_test` enumerates all signs (65,536)."""
NUM_PERMUTATIONS: Final = 10_000
_BLOCK: Final = 1_000_000
"""Signs drawn at once."""
_Z: Final = statistics.NormalDist().inv_cdf(1 - ALPHA / 2)

TaskScores = Mapping[int, float]
"""Mean score of each task, by task index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval, of `count` values (tasks, or trainings)."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Difference of two agents, first minus second, on the tasks that both ran."""

    difference: Interval
    p_value: float
    """Two-sided, by `paired_test`."""
    num_better: int
    num_worse: int
    num_equal: int


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval (1927) of a mean of `count` values in [0, 1].

    Values other than 0 and 1 make it conservative: their variance is at most ``mean * (1 - mean)``.
    """
    shift = _Z**2 / count
    middle = (mean + shift / 2) / (1 + shift)
    reach = _Z / (1 + shift) * (mean * (1 - mean) / count + shift / (4 * count)) ** 0.5
    return max(0.0, middle - reach), min(1.0, middle + reach)


def share_interval(shares: Sequence[float], num_episodes: int | None = None) -> Interval:
    """Estimate a share with an exact interval.

    With one episode per task: Clopper and Pearson (1934). With several: Korn and Graubard (1998),
    which uses the number of independent episodes that would vary as much as the tasks do.

    Args:
        shares: Share of successes of each task, in [0, 1], shape (N,).
        num_episodes: Number of episodes of all tasks; N by default.
    """
    from scipy.special import betaincinv

    values = np.asarray(shares, float)
    num_tasks = len(values)
    mean = math.fsum(values) / num_tasks
    size = _effective_size(values, mean, num_episodes or num_tasks)
    right = mean * size
    low = float(betaincinv(right, size - right + 1, ALPHA / 2)) if mean > 0 else 0.0
    high = float(betaincinv(right + 1, size - right, 1 - ALPHA / 2)) if mean < 1 else 1.0
    return Interval(mean=mean, low=low, high=high, count=num_tasks)


def _effective_size(values: npt.NDArray[np.float64], mean: float, num_episodes: int) -> float:
    """Return the effective number of independent episodes, at least the number of tasks."""
    num_tasks, variance = len(values), float(values.var())
    if mean in (0.0, 1.0) or num_tasks == num_episodes or num_tasks < 2:
        return num_tasks
    size = min(mean * (1 - mean) * num_tasks / max(variance, 1e-12), num_episodes)
    correction = _t_quantile(num_episodes - 1) / _t_quantile(num_tasks - 1)
    return max(size * correction**2, 1.0)


def mean_interval(values: Sequence[float]) -> Interval:
    """Estimate a mean by Student's t; the interval of a single value is infinite."""
    array = np.asarray(values, float)
    mean = math.fsum(array) / len(array)
    reach = math.inf
    if len(array) > 1:
        deviation = float(array.std(ddof=1)) / math.sqrt(len(array))
        reach = _t_quantile(len(array) - 1) * deviation
    return Interval(mean=mean, low=mean - reach, high=mean + reach, count=len(array))


def mean_of_shares(intervals: Sequence[Interval]) -> Interval:
    """Estimate the unweighted mean of several shares, each known with its own interval.

    The distances of the ends add up like independent errors (Zou and Donner, 2008), so that a
    share of 0 or 1 still contributes uncertainty.
    """
    mean = math.fsum(one.mean for one in intervals) / len(intervals)
    below = math.hypot(*(one.mean - one.low for one in intervals)) / len(intervals)
    above = math.hypot(*(one.high - one.mean for one in intervals)) / len(intervals)
    count = sum(one.count for one in intervals)
    return Interval(mean=mean, low=max(0.0, mean - below), high=min(1.0, mean + above), count=count)


def compare(first: TaskScores, second: TaskScores) -> Comparison | None:
    """Compare two agents on the tasks that both ran; None if there are none."""
    array = np.asarray(paired_differences(first, second))
    if not len(array):
        return None
    return Comparison(
        difference=_difference_interval(array),
        p_value=paired_test(array.tolist()),
        num_better=int((array > 0).sum()),
        num_worse=int((array < 0).sum()),
        num_equal=int((array == 0).sum()),
    )


def paired_differences(first: TaskScores, second: TaskScores) -> list[float]:
    """Return first minus second on their common tasks, by task index."""
    return [first[task] - second[task] for task in sorted(first.keys() & second.keys())]


def _difference_interval(differences: npt.NDArray[np.float64]) -> Interval:
    """Estimate a mean difference (Agresti and Min, 2005: add half a win, half a loss and a tie).

    The reach is at least that of an event not observed in so many tasks.
    """
    count = len(differences) + 2
    centre = math.fsum(differences) / count
    variance = (math.fsum(differences**2) + 1) / count - centre**2
    unseen = 1 - (ALPHA / 2) ** (1 / len(differences))
    reach = max(_t_quantile(count - 1) * math.sqrt(variance / count), unseen)
    mean = math.fsum(differences) / len(differences)
    low, high = max(-1.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach))
    return Interval(mean=mean, low=low, high=high, count=len(differences))


def paired_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Fisher's sign-flip test (1935) of mean difference 0.

    Exact for up to `MAX_EXACT_PERMUTATION` differences, and for differences of 1, 0 and -1, where
    it is the sign test; otherwise by `NUM_PERMUTATIONS` random draws with a fixed seed.
    """
    array = np.asarray(differences, float)
    if set(np.abs(array[array != 0])) <= {1.0}:
        return sign_test(int((array > 0).sum()), int((array < 0).sum()))
    total = abs(float(array.sum())) - 1e-9  # tolerance for the order of summation
    if len(array) <= MAX_EXACT_PERMUTATION:
        signs = 1 - 2 * (np.arange(2 ** len(array))[:, None] >> np.arange(len(array)) & 1)
        return float((np.abs(signs @ array) >= total).mean())
    rng, reached = np.random.default_rng(0), 1
    num_blocks = 1 + NUM_PERMUTATIONS * len(array) // _BLOCK
    for block in np.array_split(np.arange(NUM_PERMUTATIONS), num_blocks):
        draws = rng.choice((-1.0, 1.0), size=(len(block), len(array)))
        reached += int((np.abs(draws @ array) >= total).sum())
    return reached / (NUM_PERMUTATIONS + 1)


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the exact two-sided p-value of the sign test without ties (McNemar, 1947)."""
    total, smaller = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(total, i) for i in range(smaller + 1))
    share: float = 2 * tail / 2**total  # integers: exact for any size
    return min(1.0, share)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm, 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for position, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - position) * p_values[i]))
        adjusted[i] = floor
    return adjusted


def p_value_text(value: float) -> str:
    """Format a p-value; small ones as a bound."""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _t_quantile(degrees: int) -> float:
    """Return the two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - ALPHA / 2))


def krippendorff_alpha(units: Iterable[Sequence[float]]) -> float:
    """Return Krippendorff's alpha of interval data: the values of the raters of each unit.

    1 is full agreement, 0 that of chance ("Computing Krippendorff's Alpha-Reliability", 2011).
    Units with one value do not count; NaN if all values are equal.
    """
    rated = [np.asarray(unit, float) for unit in units if len(unit) > 1]
    values = np.concatenate(rated) if rated else np.zeros(0)
    if not values.size or not values.var():
        return math.nan
    # the squared differences of all ordered pairs of n values sum to 2 n^2 var
    observed = sum(2 * unit.size**2 * unit.var() / (unit.size - 1) for unit in rated) / values.size
    return float(1 - observed / (2 * values.size * values.var() / (values.size - 1)))
