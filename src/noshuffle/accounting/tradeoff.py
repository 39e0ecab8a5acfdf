"""Trade-off curves: least type II error β at type I error α of whoever tells neighbours apart.

    f(α) = sup over ε of max(0, 1 − δ(ε) − e^ε α, e^−ε (1 − δ(ε) − α))      (Dong, Roth, Su 2022)

for a curve δ(ε) that holds in both directions; for one Gaussian mechanism f(α) = Φ(Φ⁻¹(1 − α) − μ).
The supremum over finitely many ε is a lower bound of β, and a guarantee. f(α) = 1 − α is
guessing. No state.

>>> [round(float(b), 3) for b in gaussian_tradeoff(np.array([0.05, 0.5]), mu=1.0)]
[0.74, 0.159]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr, ndtri

from noshuffle.errors import InvalidInput, non_negative

Array = np.ndarray

#: ε at which a curve is asked, beside 0; the largest follows from the curve.
_POINTS = 120


def gaussian_tradeoff(alphas: Array, *, mu: float) -> Array:
    """β of one Gaussian mechanism, exact."""
    if math.isinf(mu):
        return np.zeros(len(_errors(alphas)))
    non_negative(mu=mu)
    return np.asarray(ndtr(-ndtri(_errors(alphas)) - mu))  # 1 − α would round to 1


def from_curve(alphas: Array, epsilons: Array, deltas: Array) -> Array:
    """β from upper bounds of δ at some ε.

    Guarantees: never above the true curve if the δ are never below theirs.
    """
    alpha, e = _errors(alphas)[:, None], np.asarray(epsilons, dtype=float)
    left = 1 - np.asarray(deltas, dtype=float)
    lines = np.maximum(left - np.exp(np.minimum(e, 700.0)) * alpha, np.exp(-e) * (left - alpha))
    return np.asarray(np.maximum(lines.max(axis=1), 0.0))


def from_function(alphas: Array, deltas_fn: Callable[[Array], Array], *, top: float) -> Array:
    """β of a curve δ(ε) that is given as a function of many ε, up to ε = `top`."""
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3 * top, top, _POINTS)])
    return from_curve(alphas, epsilons, deltas_fn(epsilons))


def _errors(alphas: Array) -> Array:
    found = np.atleast_1d(np.asarray(alphas, dtype=float))
    if found.ndim != 1 or not np.all((found >= 0) & (found <= 1)):
        raise InvalidInput(f"type I errors lie between 0 and 1, got {alphas!r}")
    return found
