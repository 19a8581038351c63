"""Calibration of predicted values: reliability diagram, expected calibration error, correlation."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 10
Numbers = Sequence[float] | npt.NDArray[np.float64]


class Bin(NamedTuple):
    """Neighbouring predictions: weighted means and total weight."""

    predicted: float
    observed: float
    weight: float


class Line(NamedTuple):
    """Calibration line: ``slope * prediction + intercept``."""

    slope: float
    intercept: float


class Reliability(NamedTuple):
    """Agreement of predictions with observed outcomes, in the unit of the outcomes."""

    bins: list[Bin]
    calibration_error: float
    """Expected calibration error over bins of equal weight (Naeini et al., AAAI 2015;
    arXiv:1909.10155)."""
    mean_squared_error: float
    """Includes the noise of the observations."""
    mean_squared_error_of_mean: float
    """Error of the constant prediction of the mean."""
    correlation: float
    """NaN if predictions or observations are constant."""
    least_squared_error: float
    """Error of a perfect prediction: the observation noise; NaN if unknown."""
    best_correlation: float
    """Correlation of a perfect prediction; NaN if unknown."""


def reliability(
    predicted: Numbers, observed: Numbers, weights: Numbers, noise: float = math.nan
) -> Reliability:
    """Compare predictions with observed outcomes.

    Args:
        predicted: Predictions, shape (N,).
        observed: Mean outcomes, shape (N,), each over as many observations as its weight.
        weights: Positive weights, shape (N,).
        noise: Mean squared distance of `observed` from the true expectations.

    Raises:
        ValueError: If there are no predictions.
    """
    p, y, w = (np.asarray(x, np.float64) for x in (predicted, observed, weights))
    if len(p) == 0:
        raise ValueError("There are no predictions to compare with outcomes.")
    order = np.argsort(p, kind="stable")
    quantile = (np.cumsum(w[order]) - w[order] / 2) / w.sum()  # middle of each weight, in (0, 1)
    number = np.minimum((quantile * NUM_BINS).astype(int), NUM_BINS - 1)
    members = [order[number == i] for i in np.unique(number)]
    bins = [
        Bin(
            float(np.average(p[m], weights=w[m])),
            float(np.average(y[m], weights=w[m])),
            float(w[m].sum()),
        )
        for m in members
    ]
    mean_p, mean_y = np.average(p, weights=w), np.average(y, weights=w)
    variance_p = float(np.average((p - mean_p) ** 2, weights=w))
    variance_y = float(np.average((y - mean_y) ** 2, weights=w))
    covariance = float(np.average((p - mean_p) * (y - mean_y), weights=w))
    varies = min(variance_p, variance_y) > 1e-18
    return Reliability(
        bins=bins,
        calibration_error=sum(b.weight * abs(b.predicted - b.observed) for b in bins)
        / float(w.sum()),
        mean_squared_error=float(np.average((p - y) ** 2, weights=w)),
        mean_squared_error_of_mean=variance_y,
        correlation=covariance / math.sqrt(variance_p * variance_y) if varies else math.nan,
        least_squared_error=noise,
        best_correlation=math.sqrt(max(0.0, 1.0 - noise / variance_y))
        if varies and not math.isnan(noise)
        else math.nan,
    )


def fit_line(predicted: Numbers, observed: Numbers, weights: Numbers) -> Line:
    """Fit outcomes to predictions by weighted least squares, keeping the order of predictions.

    A slope that is not positive is replaced by 1. Arguments as in `reliability`.
    """
    p, y, w = (np.asarray(x, np.float64) for x in (predicted, observed, weights))
    mean_p, mean_y = np.average(p, weights=w), np.average(y, weights=w)
    variance = np.average((p - mean_p) ** 2, weights=w)
    covariance = np.average((p - mean_p) * (y - mean_y), weights=w)
    slope = covariance / variance if variance > 1e-12 and covariance > 0 else 1.0
    return Line(float(slope), float(mean_y - slope * mean_p))


def reliability_png(measured: Mapping[str, Reliability]) -> bytes:
    """Draw the reliability diagram, one line per kind of prediction, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axline((0, 0), slope=1, color="#9ca3af", linestyle="--", linewidth=1)
    for (name, found), colour in zip(measured.items(), ("#2563eb", "#d97706"), strict=False):
        axes.plot(
            [b.predicted for b in found.bins], [b.observed for b in found.bins],
            marker="o", color=colour, label=f"{name}: error {found.calibration_error:.3f}",
        )  # fmt: skip
    axes.set(xlabel="predicted value", ylabel="mean outcome of branches", aspect="equal")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    png = io.BytesIO()
    figure.savefig(png)
    return png.getvalue()
