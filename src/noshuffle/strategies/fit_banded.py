"""Best banded Toeplitz strategies: p coefficients of C, or p coefficients of its inverse.

    fit_banded           c has p coefficients: BandToep (arXiv 2306.08153, 2405.15913)
    fit_banded_inverse   1/c has p coefficients: BandInv (arXiv 2505.12128), p draws a step

Both minimize log(error² · sensitivity²) by L-BFGS with the analytic gradients of `fit_forms`. For
columns that one unit may meet together (lags b, 2b, …, k of them) the squared sensitivity is

    p <= b or k = 1      k‖c‖²                  columns do not overlap
    otherwise            ‖Σ_{l<k} x^{lb} ĉ‖²    ĉ = |c| (Epochs) or its running maximum from the
                                                right (MinSeparation): never below the true value

The inverse is searched as d(x) = (1 − λx)·q(x) with log(1 − λ) a variable, because its best slow
root lies close to one; and n grows by fours, each optimum starting the next.

>>> from noshuffle.participation import SinglePass
>>> found = fit_banded(SinglePass(128), bands=4)
>>> round(found.objective, 4), found.converged
(4.3641, True)
>>> round(fit_banded_inverse(SinglePass(128), bands=4).objective, 3)
2.581
"""

from __future__ import annotations

import numpy as np

from noshuffle.errors import whole
from noshuffle.participation import MinSeparation, Participation
from noshuffle.strategies.base import reciprocal
from noshuffle.strategies.fit_forms import (
    WALL,
    Fit,
    ValueAndGradient,
    better,
    coarser,
    descend,
    error_form,
    layout,
    sensitivity_form,
    through_reciprocal,
)
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.recursions import decaying
from noshuffle.strategies.toeplitz import banded, banded_inverse, root_coefficients
from noshuffle.strategies.workload import Workload, prefix


def fit_banded(
    participation: Participation, *, bands: int, workload: Workload | None = None
) -> Fit:
    """The banded Toeplitz strategy with the least rms error × sensitivity.

    Guarantees: deterministic; never worse than the truncated square root of the workload. With
    more bands than the separation the coefficients are kept non-negative and non-increasing, for
    which the sensitivity is exact. Coefficients have norm one.
    """
    workload = workload or prefix()
    whole(bands=bands)
    n, separation, most = layout(participation)
    bands = min(bands, n)
    form = error_form(n, workload=workload)
    overlap = most > 1 and bands > separation
    squared = sensitivity_form(n, separation=separation, most=most, is_free=False)

    def loss(c: Array) -> tuple[float, Array]:
        with np.errstate(all="ignore"):
            d = reciprocal(c, n)
            value, slope = form(d)
        if not value < 1e120:
            return WALL, np.zeros(bands)
        slope = through_reciprocal(c, d, slope)
        size, size_slope = float(c @ c), 2 * c
        if overlap:
            padded = np.zeros(n)
            padded[:bands] = c
            size, size_slope = squared(padded)
        return float(np.log(value * size)), slope / value + size_slope[:bands] / size

    start = root_coefficients(bands, sign=-1, momentum=workload.beta)
    if overlap:
        # Differences s >= 0 with c_i = Σ_{j>=i} s_j: non-negative, non-increasing.
        start = np.minimum.accumulate(start)

        def by_difference(s: Array) -> tuple[float, Array]:
            value, slope = loss(np.cumsum(s[::-1])[::-1])
            return value, np.cumsum(slope)

        first = np.append(-np.diff(start), start[-1])
        s, converged, _ = descend(
            by_difference, first, bounds=[(0.0, np.inf)] * (bands - 1) + [(1e-12, np.inf)]
        )
        c = np.cumsum(s[::-1])[::-1]
    else:
        # The scale is free, so c_0 = 1 stays.
        def tail(x: Array) -> tuple[float, Array]:
            value, slope = loss(np.append(1.0, x))
            return value, slope[1:]

        x, converged, _ = descend(tail, start[1:] / start[0])
        c = np.append(1.0, x)
    found, begin = (banded((each / np.linalg.norm(each)).tolist()) for each in (c, start))
    return better(found, begin, participation, converged, workload=workload)


def _split(d: Array) -> Array:
    """Variables (log(1−λ), q_1, …) of d(x) = (1 − λx) q(x), λ the slow root."""
    from scipy.optimize import brentq

    lam = 0.5
    if np.polyval(d, 0.0) < 0 < np.polyval(d, 1.0):
        lam = float(brentq(lambda y: float(np.polyval(d, y)), 0.0, 1.0, xtol=1e-15))
    q = decaying(d, lam)[:-1]
    return np.append(np.log1p(-lam), q[1:])


def _join(x: Array) -> tuple[float, Array, Array]:
    lam, q = -float(np.expm1(x[0])), np.append(1.0, x[1:])
    return lam, q, np.convolve([1.0, -lam], q)


def fit_banded_inverse(
    participation: Participation, *, bands: int, workload: Workload | None = None
) -> Fit:
    """The strategy with `bands` noising coefficients and the least rms error × sensitivity.

    Guarantees: deterministic; never worse than the truncated inverse square root (BISR).
    """
    workload = workload or prefix()
    whole(bands=bands)
    bands = min(bands, layout(participation).steps)
    start = root_coefficients(bands, sign=1, momentum=workload.beta)
    fits = []
    # For patterns with free gaps both forms are searched: the running maximum is a bound there, the
    # equal gaps of epochs mostly the true worst case. The exact cost decides.
    for is_free in (False, True) if isinstance(participation, MinSeparation) else (False,):
        d, converged = _search_inverse(start, participation, is_free=is_free, workload=workload)
        found, first = (banded_inverse(coefficients=c.tolist()) for c in (d, start))
        fits.append(better(found, first, participation, converged, workload=workload))
    return min(fits, key=lambda fit: fit.objective)


def _search_inverse(
    start: Array, participation: Participation, *, is_free: bool, workload: Workload
) -> tuple[Array, bool]:
    """Coefficients of the inverse, and whether the search converged."""
    n, separation, most = layout(participation)
    bands = len(start)
    if bands == 1:
        return start, True
    x, converged = _split(start), True
    sizes = [n]
    while sizes[-1] // 4 >= max(64, 2 * bands, 4 * most):
        sizes.append(sizes[-1] // 4)
    for size in reversed(sizes):
        loss = _inverse_loss(
            error_form(size, workload=coarser(workload, n, size=size)),
            sensitivity_form(
                size, separation=max(1, separation * size // n), most=most, is_free=is_free
            ),
            size=size,
            bands=bands,
        )
        bounds = [(float(np.log(1e-3 / size)), -1e-9)] + [(-2.0, 2.0)] * (bands - 2)
        x, converged, _ = descend(loss, x, bounds=bounds)
    return _join(x)[2], converged


def _inverse_loss(
    form: ValueAndGradient, squared: ValueAndGradient, *, size: int, bands: int
) -> ValueAndGradient:
    """log(error² · sensitivity²) in the variables of `_split`."""

    def loss(x: Array) -> tuple[float, Array]:
        lam, q, d = _join(x)
        padded = np.zeros(size)
        padded[:bands] = d
        with np.errstate(all="ignore"):
            c = reciprocal(d, size)
            if not np.abs(c).max() < 1e60:
                return WALL, np.zeros(bands - 1)
            value, slope = form(padded)
            total, total_slope = squared(c)
            slope = slope[:bands] / value + through_reciprocal(d, c, total_slope) / total
        first = np.exp(x[0]) * float(slope[1:] @ q)  # ∂d/∂λ = −x·q(x), dλ = −exp(x_0)
        return float(np.log(value * total)), np.append(first, slope[1:-1] - lam * slope[2:])

    return loss
