"""How sure a score is: intervals, paired comparisons, and ranks with ties.

The unit is the task. Samples of one task are averaged first, because they are not independent: a
task that is easy is easy every time. Functions here are pure, and draw from a generator passed in.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError

CONFIDENCE: Final = 0.95
ALPHA: Final = 1 - CONFIDENCE
NUM_RESAMPLES: Final = 5_000
_CHUNK: Final = 1_000_000
"""Draws made at once: memory stays small for any number of tasks."""

TaskScores = Mapping[int, float]
"""The mean score of each task, by the task's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, and where the true one is likely to be."""

    mean: float
    """Mean over tasks."""
    low: float
    """Lower end of the interval of `CONFIDENCE`."""
    high: float
    """Upper end."""
    num_tasks: int
    """How many tasks it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two agents on the tasks that both played."""

    difference: Interval
    """First less second, by the paired bootstrap."""
    p_bootstrap: float
    """Two-sided p-value of the paired bootstrap."""
    p_sign: float
    """Two-sided p-value of the exact sign test over tasks; with one sample a task and scores of 0
    or 1 it is McNemar's exact test."""
    num_better: int
    """Tasks where the first scores higher."""
    num_worse: int
    """Tasks where the second does."""
    num_equal: int
    """Tasks where neither does."""


def mean_by_task(scores: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Average the samples of each task: a task's index and a score, one pair an episode."""
    samples: dict[int, list[float]] = {}
    for task, score in scores:
        samples.setdefault(task, []).append(score)
    return {task: math.fsum(samples[task]) / len(samples[task]) for task in sorted(samples)}


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, *, is_share: bool = False
) -> Interval:
    """Estimate a mean with the percentile interval of the bootstrap over tasks.

    (Efron and Tibshirani, 1993, chapter 13.) Where every value is the same, resampling finds no
    spread at all; if the values are shares, their exact bound (Clopper and Pearson, 1934) stands
    in: n failures out of n do not prove a success rate of 0.

    Args:
        values: One per task, shape (N,).
        rng: Draws the resamples.
        is_share: Whether values lie between 0 and 1, as success does.

    Raises:
        ConfigurationError: If there are no values.
    """
    return mean_over_environments([values], rng, is_share=is_share)


def mean_over_environments(
    values: Sequence[Sequence[float]], rng: np.random.Generator, *, is_share: bool = True
) -> Interval:
    """Estimate the mean of several environments' means, each of equal weight.

    Tasks are resampled within each environment: the environments are what they are, not a sample.
    """
    arrays = [np.asarray(one, float) for one in values]
    if not arrays or not all(map(len, arrays)):
        raise ConfigurationError("An interval needs values of at least one task, in each of them.")
    mean = float(np.mean([array.mean() for array in arrays]))
    num_tasks = sum(map(len, arrays))
    if np.ptp(np.concatenate(arrays)) == 0:
        low, high = _exact_bounds(mean, num_tasks) if is_share else (mean, mean)
    else:
        low, high = _percentiles(
            np.mean([_resampled_means(array, rng) for array in arrays], axis=0)
        )
    return Interval(mean=mean, low=low, high=high, num_tasks=num_tasks)


def compare(first: TaskScores, second: TaskScores, rng: np.random.Generator) -> Comparison | None:
    """Compare two agents on the tasks that both played; None if there are none."""
    array = np.asarray(_differences(first, second))
    if not len(array):
        return None
    better, worse = int((array > 0).sum()), int((array < 0).sum())
    p_sign = sign_test(better, worse)
    if np.ptp(array) == 0:  # resampling finds no spread; the exact bound and test stand in
        (low, high), p_bootstrap = _exact_difference(float(array[0]), len(array)), p_sign
    else:
        means = _resampled_means(array, rng)
        low, high = _percentiles(means)
        # One more than was counted: a p-value of 0 would claim more than resamples can show.
        tail = min((means <= 0).sum(), (means >= 0).sum())
        p_bootstrap = min(1.0, 2 * (float(tail) + 1) / (len(means) + 1))
    return Comparison(
        difference=Interval(mean=float(array.mean()), low=low, high=high, num_tasks=len(array)),
        p_bootstrap=p_bootstrap,
        p_sign=p_sign,
        num_better=better,
        num_worse=worse,
        num_equal=len(array) - better - worse,
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the exact two-sided p-value of the sign test; ties are left out.

    With one pass or fail a task this is McNemar's exact test, on the two counts of tasks that only
    one of two agents solved (McNemar, 1947): the smaller is binomial with chance 1/2.
    """
    total, smaller = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(total, i) for i in range(smaller + 1))
    share: float = 2 * tail / 2**total  # of integers: sums of any size are exact
    return min(1.0, share)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for there being several of them (Holm, 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, floor = [0.0] * len(p_values), 0.0
    for position, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p_values) - position) * p_values[i]))
        adjusted[i] = floor
    return adjusted


RANK_RULE: Final = (
    "Ranks: the agent with the highest score leads, and every agent whose difference from it is "
    "not significant shares its rank; of the rest, the highest leads the next group, and so on. A "
    "rank is one more than the number of agents in the groups before; = marks one that is shared. "
    "Significant: exact sign test on the tasks that both played (McNemar's where a task is played "
    f"once), with Holm's correction over all that are compared with the leader, {ALPHA:.0%} level."
)


def ranks_with_ties(scores: Mapping[str, TaskScores]) -> dict[str, int]:
    """Rank agents from 1 by `RANK_RULE`; none of their scores is empty."""
    means = {agent: math.fsum(own.values()) / len(own) for agent, own in scores.items()}
    waiting = sorted(scores, key=lambda agent: (-means[agent], agent))
    ranks: dict[str, int] = {}
    while waiting:
        leader, *others = waiting
        adjusted = holm([_sign_test_of(scores[leader], scores[other]) for other in others])
        ties = {o for o, p_value in zip(others, adjusted, strict=True) if p_value >= ALPHA}
        rank = len(ranks) + 1
        ranks |= dict.fromkeys([leader, *ties], rank)
        waiting = [agent for agent in others if agent not in ties]
    return {agent: ranks[agent] for agent in scores}


def _sign_test_of(first: TaskScores, second: TaskScores) -> float:
    differences = _differences(first, second)
    return sign_test(sum(d > 0 for d in differences), sum(d < 0 for d in differences))


def _differences(first: TaskScores, second: TaskScores) -> list[float]:
    return [first[task] - second[task] for task in sorted(first.keys() & second.keys())]


def _exact_bounds(share: float, num_tasks: int) -> tuple[float, float]:
    """Return Clopper and Pearson's bounds, which have a closed form where all is 0 or all 1."""
    reach = (ALPHA / 2) ** (1 / num_tasks)
    if share == 0:
        return 0.0, 1 - reach
    if share == 1:
        return reach, 1.0
    return share, share


def _exact_difference(difference: float, num_tasks: int) -> tuple[float, float]:
    """Bound a difference that is 0, 1 or -1 on every task.

    At least `reach` of all tasks are then like these, with the confidence of `_exact_bounds`; of
    the others, the worst is assumed.
    """
    if difference not in (-1.0, 0.0, 1.0):
        return difference, difference
    reach = (ALPHA / 2) ** (1 / num_tasks)
    worst = max(-1.0, reach * difference - (1 - reach)), reach * difference + (1 - reach)
    return worst[0], min(1.0, worst[1])


def _resampled_means(
    values: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the mean of each resample, shape (NUM_RESAMPLES,)."""
    size = len(values)
    rows = max(1, _CHUNK // size)
    chunks = [
        values[rng.integers(size, size=(min(rows, NUM_RESAMPLES - start), size))].mean(axis=1)
        for start in range(0, NUM_RESAMPLES, rows)
    ]
    return np.concatenate(chunks)


def _percentiles(means: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2], method="inverted_cdf")
    return float(low), float(high)
