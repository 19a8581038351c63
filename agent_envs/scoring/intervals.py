"""How far a measured share may be from the true one."""

import statistics
from typing import Final

_Z: Final = statistics.NormalDist().inv_cdf(0.975)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval (1927) of a mean of `count` values in [0, 1].

    Exact in form for shares. For other values in [0, 1] it is conservative: their variance is at
    most ``mean * (1 - mean)``.
    """
    shift = _Z**2 / count
    middle = (mean + shift / 2) / (1 + shift)
    reach = _Z / (1 + shift) * (mean * (1 - mean) / count + shift / (4 * count)) ** 0.5
    return max(0.0, middle - reach), min(1.0, middle + reach)


def drop_interval(
    before: tuple[float, float, float], after: tuple[float, float, float]
) -> tuple[float, float]:
    """Return the 95 % interval of a difference of two shares, `before` less `after`.

    Newcombe's (1998, method 10), of the shares with their own intervals: ``(share, low, high)``.
    """
    (p, low, high), (q, low_after, high_after) = before, after
    below = ((p - low) ** 2 + (high_after - q) ** 2) ** 0.5
    above = ((high - p) ** 2 + (q - low_after) ** 2) ** 0.5
    return p - q - below, p - q + above
