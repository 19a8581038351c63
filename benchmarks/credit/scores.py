"""Scores of estimators against the true advantages, per step and in the gradient.

The correlation is divided by the square root of the truth's reliability, which corrects for noise
in the truth. Intervals are a bootstrap over clusters: seeds are drawn, then tasks within a seed,
the same for all stages.

The worth of an estimator in batches of `grpo` is the ratio of their noise-to-signal, per
environment step. With ``g_j`` the gradient of group j, divided by the root mean square norm of the
batch's groups, ``energy = mean_j |g_j|^2`` and ``signal = mean_{j != k} g_j . g_k``, both averaged
over batches, noise-to-signal is ``(energy - signal) / signal``.
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
    Estimator,
    estimate,
    find_estimator,
    needs_values,
)
from agent_trainers.algorithms.episodes import divide_by_rms, groups
from agent_trainers.experimental.branching import rtmc, tree, vine
from benchmarks.credit.gradients import Products, cosine, energy_and_signal, group_products
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode

BRANCHING: Final = {"rtmc": rtmc, "vine": vine, "tree": tree}
"""Experimental estimators by the names of their rows."""
NOT_APPLICABLE: Final = "not applicable"
NOT_RUN: Final = "not run"
NUM_RESAMPLES: Final = 1000
MIN_GROUPS: Final = 4
"""Groups of a batch that the interval of a worth takes at least."""
MIN_Z: Final = 2.0
"""Signs are compared where the truth is at least this many standard errors from 0."""
_LOWER_LAMBDA: Final = {"gae_step": 0.9, "gae_token": 0.98, "gae_bilevel": 0.9}
"""A second row of these estimators relies more on the critic."""
Array = npt.NDArray[np.float64]


def true_advantages(episodes: Sequence[CreditEpisode]) -> list[Any]:
    """Return the true advantages."""
    return [np.array(episode.advantages) for episode in episodes]


def true_advantages_scaled(episodes: Sequence[CreditEpisode]) -> list[Any]:
    """Return the true advantages over the root mean square of each group's, plus 1e-4."""
    truth = true_advantages(episodes)
    return list(divide_by_rms(truth, groups(episodes).values(), "group"))


CEILINGS: Final[Mapping[str, Estimator]] = {
    "true advantages": true_advantages,
    "true advantages, group-scaled": true_advantages_scaled,
}
"""Rows of perfect credit."""
_FUNCTIONS: Final[Mapping[str, Estimator]] = {**CEILINGS, **BRANCHING}


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


UNKNOWN: Final = Score(value=float("nan"), low=float("nan"), high=float("nan"))


class Scores(NamedTuple):
    """Scores of one estimator."""

    correlation: Score
    """Correlation with the true advantage, corrected for noise."""
    sign: Score
    """Share of right signs among steps with a clear true sign; an estimate of 0 counts half."""
    cosine: Score
    """Cosine of its gradient with that of the true advantages on the same batch."""
    worth: Score
    """Batches of `grpo` that a batch is worth, per environment step; NaN if it or `grpo` has no
    signal whose interval is above 0, or a batch has fewer than `MIN_GROUPS` groups."""


class BatchSums(NamedTuple):
    """Sums over a batch from which the scores of an estimator are computed."""

    seed: int
    steps: Array
    """Sums over the steps of each task, (tasks, 13)."""
    own: Products | None
    """Inner products of the groups' gradients; None if the batch has none."""
    reference: Products | None
    """Inner products of the gradients of `grpo`."""


class _Sums:
    """Columns of sums over the steps of a task."""

    COUNT, X, Y, XX, YY, XY, A, B, AA, BB, AB, RIGHT, CLEAR = range(13)


def all_estimators(custom: Sequence[str] = ()) -> list[str]:
    """Return the names of true advantages and the package's estimators, then import paths."""
    return [*CEILINGS, *ADVANTAGE_ESTIMATORS, *BRANCHING, *custom]


def rows_of(estimators: Sequence[str]) -> list[Row]:
    """Return the rows of estimators, by name or import path.

    Raises:
        UnknownNameError: If there is no such estimator.
    """
    rows = []
    for name in estimators:
        if name in _FUNCTIONS or not needs_values(find_estimator(name)):
            rows.append(Row(name, name))
            continue
        rows += [Row(f"{name}, {critic}", name, critic) for critic in ("no critic", "critic")]
        if (lam := _LOWER_LAMBDA.get(name)) is not None:
            rows.append(Row(f"{name}, critic, lam {lam}", name, "critic", {"lam": lam}))
    return rows


def sees_branches(row: Row) -> bool:
    """Return whether the estimator of a row is given branches."""
    return bool(getattr(find_estimator(_estimator(row)), "uses_branches", False))


def estimates_of(row: Row, batch: CreditBatch) -> list[Array] | str:
    """Return the estimated advantages of a batch's measured episodes, (S,) each.

    Advantages per token are averaged over each step. `NOT_RUN` if the row needs the values of a
    critic and the batch has none; `NOT_APPLICABLE` if an estimator of the package refuses it.

    Raises:
        ConfigurationError: If the estimator returns neither one number per step nor per token, or
            a custom one refuses the batch.
    """
    estimator = _estimator(row)
    episodes = batch.episodes if sees_branches(row) else batch.measured
    options = dict(row.options)
    if row.critic == "critic":
        if not all(episode.values for episode in batch.measured):
            return NOT_RUN
        options["values"] = [episode.values for episode in episodes]
    elif row.critic:
        options["values"] = [[[0.0] * length for length in e.lengths] for e in episodes]
    try:
        advantages = estimate(estimator, episodes, **options)
    except ConfigurationError:
        if row.estimator in ADVANTAGE_ESTIMATORS or row.estimator in _FUNCTIONS:
            return NOT_APPLICABLE
        raise
    return [
        _per_step(row, values, episode)
        for values, episode in zip(advantages, episodes, strict=True)
        if episode.start == 0
    ]


def score(
    batches: Sequence[CreditBatch],
    estimates: Sequence[Sequence[npt.ArrayLike]],
    *,
    cost: float = 1.0,
    seed: int = 0,
) -> Scores:
    """Score an estimator on batches of one environment, each with the same weight.

    Args:
        batches: Batches with true advantages.
        estimates: Advantages per step of each measured episode, (S,), by batch.
        cost: Environment steps that the estimator is given, in units of those of `grpo`.
        seed: Seed of the bootstrap.
    """
    return combine(
        [sums_of(b, e) for b, e in zip(batches, estimates, strict=True)], cost=cost, seed=seed
    )


def sums_of(batch: CreditBatch, estimates: Sequence[npt.ArrayLike]) -> BatchSums:
    """Return what the scores of an estimator take from a batch."""
    return BatchSums(
        batch.seed,
        _task_sums(batch, estimates),
        group_products(batch, estimates),
        group_products(batch, estimate("grpo", batch.measured)),
    )


def combine(sums: Sequence[BatchSums], *, cost: float = 1.0, seed: int = 0) -> Scores:
    """Return the scores of an estimator from its sums by batch; see `score`."""
    once = np.ones((1, 1)), [np.ones((1, len(batch.steps))) for batch in sums]
    drawn = _resample([batch.seed for batch in sums], [len(b.steps) for b in sums], seed)
    steps = [batch.steps for batch in sums]
    correlation, sign = map(_with_interval, _figures(steps, *once), _figures(steps, *drawn))
    own = [batch.own for batch in sums if batch.own is not None]
    reference = [batch.reference for batch in sums if batch.reference is not None]
    if len(own) < len(sums):
        return Scores(correlation, sign, UNKNOWN, UNKNOWN)
    figures = (_gradient_figures(own, reference, cost, *weights) for weights in (once, drawn))
    cosines, worth, *signals = map(_with_interval, *figures)
    is_estimable = all(signal.low > 0.0 for signal in signals) and all(
        len(batch.steps) >= MIN_GROUPS for batch in sums
    )
    return Scores(correlation, sign, cosines, worth if is_estimable else UNKNOWN)


def reliability(batches: Sequence[CreditBatch]) -> float:
    """Return the mean reliability of the batches in which it is defined."""
    known = [b.reliability for b in batches if not np.isnan(b.reliability)]
    return float(np.mean(known)) if known else float("nan")


def _estimator(row: Row) -> str | Estimator:
    return _FUNCTIONS.get(row.estimator, row.estimator)


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


def _gradient_figures(
    own: Sequence[Products],
    reference: Sequence[Products],
    cost: float,
    batch_weights: Array,
    task_weights: Sequence[Array],
) -> list[Array]:
    """Return cosine, worth, and the signals of the estimator and of `grpo`, (R,) each.

    See `_figures` for the weights.
    """
    found = [cosine(p, w) for p, w in zip(own, task_weights, strict=True)]
    figures = [_weighted_mean(found, batch_weights)]
    ratios, signals = [], []
    with np.errstate(all="ignore"):
        for products in (own, reference):
            parts = [energy_and_signal(p, w) for p, w in zip(products, task_weights, strict=True)]
            energy = _weighted_mean([part[0] for part in parts], batch_weights)
            signal = _weighted_mean([part[1] for part in parts], batch_weights)
            ratios.append((energy - signal) / np.maximum(signal, 0.0))
            signals.append(signal)
        return [*figures, ratios[1] / ratios[0] / cost, *signals]


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
    if not len(known):
        return UNKNOWN
    low = np.percentile(known, 2.5, method="lower")
    high = np.percentile(known, 97.5, method="higher")  # may be infinite
    return Score(value=float(value[0]), low=float(low), high=float(high))
