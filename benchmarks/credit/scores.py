"""Correlation of estimated with true advantages, and the share of right signs, per estimator.

The correlation is divided by the square root of the truth's reliability, which corrects for noise
in the truth. Intervals are a bootstrap over clusters: seeds are drawn, then tasks within a seed,
the same for all stages.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimate,
    find_estimator,
    needs_values,
)
from agent_trainers.experimental.branching import tree, vine
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode

BRANCHING: Final = {"vine": vine, "tree": tree}
"""Experimental estimators by the names of their rows."""
NUM_RESAMPLES: Final = 1000
MIN_Z: Final = 2.0
"""Signs are compared where the truth is at least this many standard errors from 0."""
_LOWER_LAMBDA: Final = {"gae_step": 0.9, "gae_token": 0.98, "gae_bilevel": 0.9}
"""A second row of these estimators relies more on the critic."""
Array = npt.NDArray[np.float64]


class Row(NamedTuple):
    """A row of the table."""

    name: str
    estimator: str
    critic: str = ""
    """``critic``: values of a fitted critic; ``no critic``: all values 0; else empty."""
    options: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A value with its 95 % interval; NaN if undefined."""

    value: float
    low: float
    high: float


class Scores(NamedTuple):
    """Scores of one estimator."""

    correlation: Score
    """Correlation with the true advantage, corrected for noise."""
    sign: Score
    """Share of right signs among steps with a clear true sign; an estimate of 0 counts half."""


class _Sums:
    """Columns of sums over the steps of a task."""

    COUNT, X, Y, XX, YY, XY, A, B, AA, BB, AB, RIGHT, CLEAR = range(13)


def all_estimators(custom: Sequence[str] = ()) -> list[str]:
    """Return the names of the package's estimators, then import paths of others."""
    return [*ADVANTAGE_ESTIMATORS, *BRANCHING, *custom]


def rows_of(estimators: Sequence[str]) -> list[Row]:
    """Return the rows of estimators, by name or import path.

    Raises:
        UnknownNameError: If there is no such estimator.
    """
    rows = []
    for name in estimators:
        if name in BRANCHING or not needs_values(find_estimator(name)):
            rows.append(Row(name, name))
            continue
        rows += [Row(f"{name}, {critic}", name, critic) for critic in ("no critic", "critic")]
        if (lam := _LOWER_LAMBDA.get(name)) is not None:
            rows.append(Row(f"{name}, critic, lam {lam}", name, "critic", {"lam": lam}))
    return rows


def estimates_of(row: Row, batch: CreditBatch) -> list[Array] | None:
    """Return the estimated advantages of a batch's measured episodes, (S,) each.

    Advantages per token are averaged over each step. None if the row needs the values of a critic
    and the batch has none, or if an estimator of the package refuses the batch's rewards.

    Raises:
        ConfigurationError: If the estimator returns neither one number per step nor per token.
    """
    estimator = BRANCHING.get(row.estimator, row.estimator)
    has_branches = getattr(find_estimator(estimator), "uses_branches", False)
    episodes = batch.episodes if has_branches else batch.measured
    options = dict(row.options)
    if row.critic == "critic":
        if not all(episode.values for episode in batch.measured):
            return None
        options["values"] = [episode.values for episode in episodes]
    elif row.critic:
        options["values"] = [[[0.0] * length for length in e.lengths] for e in episodes]
    try:
        advantages = estimate(estimator, episodes, **options)
    except ConfigurationError:
        if row.estimator in ADVANTAGE_ESTIMATORS:
            return None
        raise
    return [
        _per_step(row, values, episode)
        for values, episode in zip(advantages, episodes, strict=True)
        if episode.start == 0
    ]


def score(
    batches: Sequence[CreditBatch], estimates: Sequence[Sequence[npt.ArrayLike]], *, seed: int = 0
) -> Scores:
    """Score an estimator on batches of one environment, each with the same weight.

    Args:
        batches: Batches with true advantages.
        estimates: Advantages per step of each measured episode, (S,), by batch.
        seed: Seed of the bootstrap.
    """
    sums = [_task_sums(b, e) for b, e in zip(batches, estimates, strict=True)]
    values = _figures(sums, np.ones((1, 1)), [np.ones((1, len(tasks))) for tasks in sums])
    drawn = _resample([batch.seed for batch in batches], [len(tasks) for tasks in sums], seed)
    resampled = _figures(sums, *drawn)
    return Scores(*map(_with_interval, values, resampled))


def reliability(batches: Sequence[CreditBatch]) -> float:
    """Return the mean reliability of the batches in which it is defined."""
    known = [b.reliability for b in batches if not np.isnan(b.reliability)]
    return float(np.mean(known)) if known else float("nan")


def _per_step(row: Row, advantages: Any, episode: CreditEpisode) -> Array:
    values = np.asarray(advantages, float)
    if len(values) == len(episode.rewards):
        return values
    if len(values) != sum(episode.lengths):
        raise ConfigurationError(
            f"{row.estimator} returned {len(values)} advantages for an episode of "
            f"{len(episode.rewards)} steps and {sum(episode.lengths)} tokens. Return one per step, "
            "or one per token."
        )
    bounds = np.cumsum([0, *episode.lengths[:-1]])
    means: Array = np.add.reduceat(values, bounds) / np.array(episode.lengths)
    return means


def _task_sums(batch: CreditBatch, estimates: Sequence[npt.ArrayLike]) -> Array:
    """Return the sums that correlations and signs are computed from, by task, (tasks, 13)."""
    tasks: dict[str, Array] = defaultdict(lambda: np.zeros(13))
    for episode, estimated in zip(batch.measured, estimates, strict=True):
        x, y = np.asarray(estimated, float), np.array(episode.advantages)
        a, b = np.array(episode.halves)
        is_clear = np.abs(y) > MIN_Z * np.array(episode.standard_errors)
        is_right = np.where(x == 0.0, 0.5, np.sign(x) == np.sign(y))
        columns = [np.ones_like(y), x, y, x * x, y * y, x * y, a, b, a * a, b * b, a * b,
                   is_clear * is_right, is_clear]  # fmt: skip
        tasks[episode.group_id] += np.array([column.sum() for column in columns], float)
    return np.array(list(tasks.values()))


def _figures(
    sums: Sequence[Array], batch_weights: Array, task_weights: Sequence[Array]
) -> tuple[Array, Array]:
    """Return corrected correlation and share of right signs of each resample, (R,) each.

    Args:
        sums: Sums by task of each batch, (tasks, 13).
        batch_weights: How often each resample draws each batch, (batches, R) or (1, 1).
        task_weights: How often each resample draws each task of a batch, (R, tasks) per batch.
    """
    correlations, signs = [], []
    c = _Sums
    for tasks, weights in zip(sums, task_weights, strict=True):
        s = weights @ tasks  # (R, 13)
        n = s[:, c.COUNT]
        measured = _correlation(n, *(s[:, i] for i in (c.X, c.Y, c.XX, c.YY, c.XY)))
        half = _correlation(n, *(s[:, i] for i in (c.A, c.B, c.AA, c.BB, c.AB)))
        with np.errstate(all="ignore"):
            reliable = np.where(half > 0, 2 * half / (1 + half), np.nan)
            correlations.append(measured / np.sqrt(reliable))
            signs.append(s[:, c.RIGHT] / s[:, c.CLEAR])
    return _weighted_mean(correlations, batch_weights), _weighted_mean(signs, batch_weights)


def _correlation(n: Array, x: Array, y: Array, xx: Array, yy: Array, xy: Array) -> Array:
    """Return Pearson's correlation; 0 if the first is constant, NaN if the second is."""
    with np.errstate(all="ignore"):
        var_x, var_y = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2
        correlation = (xy / n - x * y / n**2) / np.sqrt(var_x * var_y)
    correlation = np.where(var_x > 1e-12, correlation, 0.0)
    return np.where(var_y > 1e-12, correlation, np.nan)


def _weighted_mean(figures: Sequence[Array], weights: Array) -> Array:
    stacked = np.array(figures)  # (batches, R)
    weights = np.where(np.isnan(stacked), 0.0, weights)
    with np.errstate(all="ignore"):
        mean: Array = (weights * np.nan_to_num(stacked)).sum(0) / weights.sum(0)
    return mean


def _resample(
    seeds: Sequence[int], num_tasks: Sequence[int], seed: int
) -> tuple[Array, list[Array]]:
    """Draw seeds, then tasks; the batches of a seed share their tasks and are drawn alike."""
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(seeds))
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), NUM_RESAMPLES)
    tasks = {}
    for name in names:
        most = max(n for s, n in zip(seeds, num_tasks, strict=True) if s == name)
        tasks[name] = rng.multinomial(most, np.full(most, 1 / most), NUM_RESAMPLES).astype(float)
    return (
        np.array([drawn[:, names.index(name)] for name in seeds], float),
        [tasks[name][:, :count] for name, count in zip(seeds, num_tasks, strict=True)],
    )


def _with_interval(value: Array, resampled: Array) -> Score:
    known = resampled[~np.isnan(resampled)]
    low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (np.nan, np.nan)
    return Score(value=float(value[0]), low=float(low), high=float(high))
