"""Quantiles of the beta and Student's t distribution, which NumPy lacks.

Everything else of SciPy would come for these two alone. The tests compare them with tables.
"""

import functools
import math
from typing import Final

_TINY: Final = 1e-300
_PRECISION: Final = 1e-14


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function (Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the continued fraction converges fast
        return 1 - beta_cdf(1 - x, b, a)
    logarithm = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    return math.exp(logarithm) * _continued_fraction(x, a, b) / a


@functools.lru_cache(maxsize=10_000)
def beta_quantile(chance: float, a: float, b: float) -> float:
    """Return where `beta_cdf` reaches `chance`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(middle, a, b) < chance else (low, middle)
    return (low + high) / 2


def t_quantile(alpha: float, degrees: float) -> float:
    """Return what Student's t exceeds in absolute value with the chance `alpha`."""
    x = beta_quantile(alpha, degrees / 2, 0.5)
    return math.sqrt(degrees * (1 - x) / x)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Evaluate the fraction of `beta_cdf` by Lentz's method."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            fraction *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return fraction


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
