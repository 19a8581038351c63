"""Input of advantage estimators, and the arithmetic that they share."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import lookup

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Scale = Literal["group", "batch", "none"]
SCALES: Final[tuple[str, ...]] = get_args(Scale)

SCALE_EPSILON: Final = 1e-4
"""Added to what advantages are divided by, as in TRL."""

T = TypeVar("T")
U = TypeVar("U")


class Episode(Protocol):
    """Fields of an episode that estimators read; a `Trajectory` has them."""

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
        """Observation before each step, or a digest of it, shape (S,)."""

    @property
    def states(self) -> Sequence[Hashable]:
        """Digest of the whole history before each step, shape (S,)."""

    @property
    def reward_terms(self) -> Sequence[Mapping[str, float]]:
        """Terms of the reward of each step by name, shape (S,)."""

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was truncated, so that its last state has a value."""

    @property
    def is_scorable(self) -> bool:
        """Whether the episode counts."""


def apart(
    function: Callable[[Sequence[T]], Sequence[U]], items: Sequence[T], keys: Sequence[Hashable]
) -> list[U]:
    """Apply `function` to the items of each key separately; return its results in their order."""
    results: dict[int, U] = {}
    for key in dict.fromkeys(keys):
        own = [i for i, other in enumerate(keys) if other == key]
        results |= zip(own, function([items[i] for i in own]), strict=True)
    return [results[i] for i in range(len(items))]


def whiten(arrays: Sequence[Array], weights: Sequence[npt.ArrayLike] | None = None) -> list[Array]:
    """Give a batch mean 0 and variance 1: ``(x - mean) / sqrt(variance + 1e-8)``; 0 if constant.

    `weights` are how often each value counts, in the same shapes; the variance is the unbiased one
    of as many values.
    """
    x = np.concatenate([np.zeros(0), *arrays])
    w = np.ones(len(x)) if weights is None else np.concatenate([np.zeros(0), *weights])
    total = w.sum()
    if total < 2:
        return [np.zeros_like(array) for array in arrays]
    mean = (w * x).sum() / total
    variance = (w * (x - mean) ** 2).sum() / (total - 1)
    scale = 1.0 / np.sqrt(variance + 1e-8)
    # equal float32 values leave rounding, which the division would blow up
    is_constant = is_rounding(np.sqrt(variance), mean, epsilon=1e-7)
    return [
        np.zeros_like(array) if is_constant else ((array - mean) * scale).astype(np.float32)
        for array in arrays
    ]


def is_rounding(difference: npt.ArrayLike, value: npt.ArrayLike, *, epsilon: float = 1e-9) -> Any:
    """Return whether differences from `value` are rounding errors, same shape as `difference`."""
    return np.abs(difference) <= epsilon * np.maximum(1.0, np.abs(value))


def above(values: npt.ArrayLike, baseline: npt.ArrayLike) -> Floats:
    """Return ``values - baseline``, exactly 0 where only rounding is left."""
    difference = np.subtract(values, baseline)
    return np.where(is_rounding(difference, baseline), 0.0, difference)


def check_scale(scale: str) -> None:
    """Raise an `UnknownNameError` if there is no such scale."""
    lookup(dict.fromkeys(SCALES), scale, kind="scale")


def divide_by_rms(
    advantages: Sequence[npt.NDArray[Any]], grouped: Iterable[Sequence[int]], scale: Scale
) -> list[Array]:
    """Divide by the root mean square of each group, or of the batch, plus 1e-4.

    Each episode has the same weight. ``none`` divides by 1; another word is an `UnknownNameError`.
    """
    check_scale(scale)
    scaled = [np.asarray(values, np.float32) for values in advantages]
    parts = list(grouped)
    for part in parts if scale == "group" else [[i for members in parts for i in members]]:
        squares = [np.mean(np.square(advantages[i])) for i in part if len(advantages[i])]
        divisor = 1.0 if scale == "none" else np.sqrt(np.mean(squares or 0.0)) + SCALE_EPSILON
        for i in part:
            scaled[i] = (advantages[i] / divisor).astype(np.float32)
    return scaled


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
    """Return the indices of the scorable episodes of each group."""
    members: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        if episode.is_scorable and len(episode.rewards):
            members.setdefault(episode.group_id, []).append(i)
    return members
