"""Policy gradients of a batch for any advantages, and how consistent they are between groups.

A batch stores a vector ``f_t`` for each step: the gradient of the log-probability of the action's
tokens, in a basis that keeps inner products. The gradient of an estimator is ``sum_t a_t f_t``.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.credit.true_advantages import CreditBatch, unpack

MAX_COMPONENTS: Final = 96
"""Numbers stored for each step at most."""
MAX_LOST: Final = 1e-4
"""Share of the gradients' energy that may be lost if fewer numbers suffice."""
Array = npt.NDArray[np.float64]


class Products(NamedTuple):
    """Inner products between gradients of the groups of a batch, (n, n) each."""

    own: Array
    """Products of the estimator's gradients, divided by their mean square norm so that each batch
    counts the same."""
    cross: Array
    """Products of these divided gradients with the true ones."""
    true: Array
    """Products of the true gradients."""


def compress(gram: Array) -> tuple[Array, float]:
    """Return vectors with the given inner products, and the share of their energy that is kept.

    Args:
        gram: Inner products, (S, S).

    Returns:
        Vectors of mean square norm 1, (S, k), from the largest eigenvalues of `gram`; and the sum
        of these over the sum of all.
    """
    values, basis = np.linalg.eigh(gram)
    values, basis = np.maximum(values[::-1], 0.0), basis[:, ::-1]
    total = values.sum()
    if total == 0.0:
        return np.zeros((len(gram), 1)), 1.0
    kept = np.cumsum(values) / total
    k = min(int(np.searchsorted(kept, 1.0 - MAX_LOST)) + 1, MAX_COMPONENTS, len(gram))
    vectors: Array = basis[:, :k] * np.sqrt(values[:k] * len(gram) / total)
    return vectors, float(kept[k - 1])


def group_products(batch: CreditBatch, estimates: Sequence[npt.ArrayLike]) -> Products | None:
    """Return the inner products of a batch's groups; None if it has no gradients."""
    if not all(episode.gradients for episode in batch.measured):
        return None
    groups = list(dict.fromkeys(episode.group_id for episode in batch.measured))
    sums: Array = np.zeros(())
    for episode, estimated in zip(batch.measured, estimates, strict=True):
        vectors = unpack(episode.gradients)
        if not sums.ndim:
            sums = np.zeros((2, len(groups), vectors.shape[1]))  # (2, n, k)
        advantages = np.array([estimated, episode.advantages], float)
        sums[:, groups.index(episode.group_id)] += advantages @ vectors
    own, true = sums
    if (scale := np.sqrt((own**2).sum(1).mean())) > 0.0:
        own = own / scale
    return Products(own @ own.T, own @ true.T, true @ true.T)


def cosine(products: Products, weights: Array) -> Array:
    """Return the cosine of estimated and true gradient of a batch in each resample, (R,).

    0 where the estimated gradient is 0, NaN where the true one is. `weights` are how often a
    resample draws each group, (R, n).
    """
    own, cross, true = (np.einsum("rj,jk,rk->r", weights, p, weights) for p in products)
    with np.errstate(all="ignore"):
        cosines: Array = cross / np.sqrt(own * true)
    return np.where(own > 1e-12, cosines, np.where(true > 0.0, 0.0, np.nan))


def energy_and_signal(products: Products, weights: Array) -> tuple[Array, Array]:
    """Return the mean square norm of a group's gradient, and that of its expectation, (R,) each.

    The second is a U-statistic: the mean of ``g_j . g_k`` over pairs of different groups. Pairs of
    a resample that drew the same group twice are left out.
    """
    squares = np.diag(products.own)
    pairs = np.einsum("rj,jk,rk->r", weights, products.own, weights) - weights**2 @ squares
    with np.errstate(all="ignore"):
        energy: Array = weights @ squares / weights.sum(1)
        signal: Array = pairs / (weights.sum(1) ** 2 - (weights**2).sum(1))
    return energy, signal
