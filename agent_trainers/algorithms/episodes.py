"""What estimators of advantages know of an episode, and the arithmetic that they share."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

T = TypeVar("T")
U = TypeVar("U")

WHITEN_EPSILON: Final = 1e-8
"""Added to the variance when a whole batch is whitened."""


class Episode(Protocol):
    """What an estimator needs to know of an episode; a `Trajectory` fits."""

    @property
    def group_id(self) -> str:
        """Episodes with the same id are compared with each other."""

    @property
    def rewards(self) -> Sequence[float]:
        """Reward of each step, shape (S,)."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of action tokens of each step, shape (S,)."""

    @property
    def anchors(self) -> Sequence[Hashable]:
        """What was observed before each step, shape (S,); equal where the observations are."""

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was cut off, so that its last state still has a value."""

    @property
    def is_scorable(self) -> bool:
        """Whether the episode counts."""


def apart(
    function: Callable[[Sequence[T]], Sequence[U]], items: Sequence[T], keys: Sequence[Hashable]
) -> list[U]:
    """Apply a function of many items to those of each key by themselves.

    Returns:
        What it returns for each item, in the order of `items`.
    """
    results: dict[int, U] = {}
    for key in dict.fromkeys(keys):
        own = [i for i, other in enumerate(keys) if other == key]
        results |= zip(own, function([items[i] for i in own]), strict=True)
    return [results[i] for i in range(len(items))]


def whiten(arrays: Sequence[Array], weights: Sequence[npt.ArrayLike] | None = None) -> list[Array]:
    """Give a batch mean 0 and variance 1: ``(x - mean) / sqrt(variance + 1e-8)``.

    Args:
        arrays: Values of any lengths.
        weights: How often each value counts, in the same shapes; once if not given. The variance
            is the unbiased one of as many values.

    Returns:
        Arrays of the same shapes; all 0 where there is no variance.
    """
    x = join([np.asarray(array, float) for array in arrays])
    w = np.ones(len(x)) if weights is None else join([np.asarray(v, float) for v in weights])
    total = w.sum()
    if total < 2:
        return [np.zeros_like(array) for array in arrays]
    mean = (w * x).sum() / total
    variance = (w * (x - mean) ** 2).sum() / (total - 1)
    scale = 1.0 / np.sqrt(variance + WHITEN_EPSILON)
    # what is left of equal values is rounding, which the division would blow up
    is_noise = variance <= (1e-7 * max(1.0, abs(mean))) ** 2
    return [
        np.zeros_like(array) if is_noise else ((array - mean) * scale).astype(np.float32)
        for array in arrays
    ]


def discount(values: Iterable[float], factor: float) -> Floats:
    """Return ``y_t = x_t + factor * y_{t+1}``."""
    sums = np.array(list(values), float)
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += factor * sums[t + 1]
    return sums


def returns_to_go(episodes: Sequence[Episode], gamma: float) -> list[Floats]:
    """Return ``G_t = r_t + gamma * G_{t+1}`` of each episode, (S,); (0,) if not scorable."""
    return [
        discount(episode.rewards, gamma) if episode.is_scorable else np.zeros(0)
        for episode in episodes
    ]


def groups(episodes: Sequence[Episode]) -> dict[str, list[int]]:
    """Return the numbers of the episodes of each group that can be scored."""
    members: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        if episode.is_scorable and len(episode.rewards):
            members.setdefault(episode.group_id, []).append(i)
    return members


def join(arrays: Sequence[Floats]) -> Floats:
    """Return the values of all arrays, one after the other."""
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)
