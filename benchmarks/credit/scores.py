"""How right an estimator is: its correlation with the true advantages, and how often its sign is.

The correlation is corrected for what is noise in the truth (divided by the root of its
reliability). Intervals are a bootstrap over clusters: seeds are drawn, then tasks within a seed,
the same for all stages, so steps of an episode, and episodes of a task, stay together.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.credit.true_advantages import CreditBatch

NUM_RESAMPLES: Final = 1000
CLEAR: Final = 2.0
"""Signs are compared where the truth is so many standard errors from 0."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A figure with its 95 % interval; NaN where nothing can be said."""

    value: float
    low: float
    high: float


class Scores(NamedTuple):
    """How right an estimator is."""

    correlation: Score
    """With the true advantage, corrected for noise; 1 is perfect."""
    sign: Score
    """The share of steps with the right sign, of those whose true one is clear; 0 counts half."""


def score(
    batches: Sequence[CreditBatch], estimates: Sequence[Sequence[npt.ArrayLike]], *, seed: int = 0
) -> Scores:
    """Score an estimator on batches of one environment; each batch counts the same.

    Args:
        batches: With their true advantages.
        estimates: Of each batch, an advantage per step of each episode, (S,); branches left out.
        seed: Of the bootstrap.
    """
    sums = [_sums_of_tasks(b, e) for b, e in zip(batches, estimates, strict=True)]
    once = _Draws(np.ones((1, 1)), [np.ones((1, len(tasks))) for tasks in sums])
    draws = _resample([batch.seed for batch in batches], [len(s) for s in sums], seed)
    values, resampled = _figures(sums, once), _figures(sums, draws)
    return Scores(*(_with_interval(v, r) for v, r in zip(values, resampled, strict=True)))


def reliability(batches: Sequence[CreditBatch]) -> float:
    """Return the mean reliability of batches in which something varies."""
    known = [b.reliability for b in batches if not np.isnan(b.reliability)]
    return float(np.mean(known)) if known else float("nan")


class _Draws(NamedTuple):
    """Of R resamples: how often each batch is drawn, and in it each task."""

    batches: Array
    """Shape (batches, R), or (1, R) for all the same."""
    tasks: Sequence[Array]
    """Of each batch, (R, tasks)."""


class _Column:
    """Columns of sums over the steps of a task."""

    COUNT, X, Y, XX, YY, XY, A, B, AA, BB, AB, RIGHT, CLEAR = range(13)


def _sums_of_tasks(batch: CreditBatch, estimates: Sequence[npt.ArrayLike]) -> Array:
    """Return what correlations are made of, summed over the steps of each task, (tasks, 13)."""
    tasks: dict[str, Array] = defaultdict(lambda: np.zeros(13))
    measured = [episode for episode in batch.episodes if episode.start == 0]
    for episode, estimate in zip(measured, estimates, strict=True):
        x, y = np.asarray(estimate, float), np.array(episode.advantages)
        a, b = np.array(episode.halves)
        is_clear = np.abs(y) > CLEAR * np.array(episode.standard_errors)
        is_right = np.where(x == 0.0, 0.5, np.sign(x) == np.sign(y))
        columns = [np.ones_like(y), x, y, x * x, y * y, x * y, a, b, a * a, b * b, a * b,
                   is_clear * is_right, is_clear]  # fmt: skip
        tasks[episode.group_id] += np.array([column.sum() for column in columns], float)
    return np.array(list(tasks.values()))


def _figures(sums: Sequence[Array], draws: _Draws) -> tuple[Array, Array]:
    """Return corrected correlation and share of right signs, of each resample: (R,), (R,)."""
    correlations, signs = [], []
    c = _Column
    for tasks, weights in zip(sums, draws.tasks, strict=True):
        s = weights @ tasks  # (R, 13)
        n = s[:, c.COUNT]
        measured = _correlation(n, *(s[:, i] for i in (c.X, c.Y, c.XX, c.YY, c.XY)))
        half = _correlation(n, *(s[:, i] for i in (c.A, c.B, c.AA, c.BB, c.AB)))
        with np.errstate(all="ignore"):
            reliable = np.where(half > 0, 2 * half / (1 + half), np.nan)
            correlations.append(measured / np.sqrt(reliable))
            signs.append(s[:, c.RIGHT] / s[:, c.CLEAR])
    return _mean(correlations, draws.batches), _mean(signs, draws.batches)


def _correlation(n: Array, x: Array, y: Array, xx: Array, yy: Array, xy: Array) -> Array:
    """Return Pearson's, from sums; 0 where the first is constant, NaN where the second is."""
    with np.errstate(all="ignore"):
        var_x, var_y = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2
        correlation = (xy / n - x * y / n**2) / np.sqrt(var_x * var_y)
    correlation = np.where(var_x > 1e-12, correlation, 0.0)
    return np.where(var_y > 1e-12, correlation, np.nan)


def _mean(figures: Sequence[Array], weights: Array) -> Array:
    """Return the mean over batches, leaving out those in which nothing can be said."""
    stacked = np.array(figures)  # (batches, R)
    weights = np.where(np.isnan(stacked), 0.0, weights)
    with np.errstate(all="ignore"):
        mean: Array = (weights * np.nan_to_num(stacked)).sum(0) / weights.sum(0)
    return mean


def _resample(seeds: Sequence[int], num_tasks: Sequence[int], seed: int) -> _Draws:
    """Draw seeds, and tasks in them; the batches of a seed, which share tasks, are drawn alike."""
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(seeds))
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), NUM_RESAMPLES)
    tasks = {}
    for name in names:
        most = max(n for s, n in zip(seeds, num_tasks, strict=True) if s == name)
        tasks[name] = rng.multinomial(most, np.full(most, 1 / most), NUM_RESAMPLES).astype(float)
    return _Draws(
        np.array([drawn[:, names.index(name)] for name in seeds], float),
        [tasks[name][:, :count] for name, count in zip(seeds, num_tasks, strict=True)],
    )


def _with_interval(value: Array, resampled: Array) -> Score:
    known = resampled[~np.isnan(resampled)]
    if not len(known):
        return Score(value=float(value[0]), low=float("nan"), high=float("nan"))
    low, high = np.percentile(known, [2.5, 97.5])
    return Score(value=float(value[0]), low=float(low), high=float(high))
