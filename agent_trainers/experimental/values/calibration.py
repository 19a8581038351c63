"""Whether predictions mean what they say: of what is given 0.7, seven in ten come true."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 10


class Bin(NamedTuple):
    """Predictions that lie next to each other."""

    predicted: float
    """Their mean."""
    observed: float
    """The mean of what came true."""
    weight: float
    """How many observations there are."""


class Line(NamedTuple):
    """What makes a calibrated prediction of another: ``slope * prediction + intercept``."""

    slope: float
    intercept: float


class Reliability(NamedTuple):
    """How good predictions are; errors are in the unit of what is predicted."""

    bins: list[Bin]
    calibration_error: float
    """Expected calibration error: the mean distance of `predicted` from `observed` over bins, by
    weight (Naeini et al., AAAI 2015; bins of equal weight, as in arXiv:1909.10155)."""
    mean_squared_error: float
    """Against what was observed, whose own noise is part of it."""
    mean_squared_error_of_mean: float
    """That of a prediction that is always the mean."""
    correlation: float
    """With what was observed, noise included; NaN where nothing varies."""
    least_squared_error: float
    """What a perfect prediction would have: the noise of what was observed; NaN if not known."""
    best_correlation: float
    """What a perfect prediction would have; NaN if not known."""


Numbers = Sequence[float] | npt.NDArray[np.float64]


def reliability(
    predicted: Numbers, observed: Numbers, weights: Numbers, noise: float = math.nan
) -> Reliability:
    """Compare predictions with what was observed.

    Args:
        predicted: Predictions, shape (N,).
        observed: What came true, shape (N,): each the mean of so many observations as its weight.
        weights: Shape (N,), positive.
        noise: How far, as a mean square, `observed` is from what is true.

    Raises:
        ValueError: If there is nothing to compare.
    """
    p, y, w = (np.asarray(x, np.float64) for x in (predicted, observed, weights))
    if len(p) == 0:
        raise ValueError("There are no predictions to compare with anything.")
    order = np.argsort(p, kind="stable")
    place = (np.cumsum(w[order]) - w[order] / 2) / w.sum()  # in (0, 1)
    number = np.minimum((place * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = []
    for i in np.unique(number):
        members = order[number == i]
        share = w[members] / w[members].sum()
        bins.append(Bin(float(share @ p[members]), float(share @ y[members]),
                        float(w[members].sum())))  # fmt: skip
    share = w / w.sum()
    mean_p, mean_y = share @ p, share @ y
    deviations = np.sqrt(share @ (p - mean_p) ** 2), np.sqrt(share @ (y - mean_y) ** 2)
    varies = min(deviations) > 1e-9
    covariance = share @ ((p - mean_p) * (y - mean_y))
    return Reliability(
        bins=bins,
        calibration_error=sum(b.weight * abs(b.predicted - b.observed) for b in bins)
        / float(w.sum()),
        mean_squared_error=float(share @ (p - y) ** 2),
        mean_squared_error_of_mean=float(deviations[1] ** 2),
        correlation=float(covariance / (deviations[0] * deviations[1])) if varies else float("nan"),
        least_squared_error=noise,
        best_correlation=math.sqrt(max(0.0, 1.0 - noise / deviations[1] ** 2))
        if varies and not math.isnan(noise)
        else math.nan,
    )


def fit_line(predicted: Numbers, observed: Numbers, weights: Numbers) -> Line:
    """Return the line of least squares through predictions and what was observed.

    It leaves the order of predictions as it is: a slope that is not positive gives up on that, and
    only the mean is set right. Arguments as in `reliability`.
    """
    p, y, w = (np.asarray(x, np.float64) for x in (predicted, observed, weights))
    mean_p, mean_y = np.average(p, weights=w), np.average(y, weights=w)
    variance = np.average((p - mean_p) ** 2, weights=w)
    covariance = np.average((p - mean_p) * (y - mean_y), weights=w)
    slope = covariance / variance if variance > 1e-12 and covariance > 0 else 1.0
    return Line(float(slope), float(mean_y - slope * mean_p))
