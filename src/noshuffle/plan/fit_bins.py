"""Banded strategies for one secret position a unit, fitted to their own amplification.

With c >= 0 and at most b bands, the shifts of positions d apart have the inner product k·R(d),
R(d) = Σ_s c_s c_{(s+d) mod b}. By the bound of `accounting.bins`, m positions b/m apart need

    z = √(k·R(0)) · φ_m(ρ),      ρ = max_d R(d) / R(0) over d = b/m, 2b/m, …

with φ_m rising from its value at positions that do not overlap to 1/μ(ε, δ), without any secrecy:
bands that keep away from the next position are worth noise. For every m the search minimizes

    log rms(A·T(c)⁻¹) + ½ log R(0) + log φ_m(ρ)

by L-BFGS with exact slopes, φ_m from a few points (then more near the optimum), the maximum as a
norm of order 64. The plan's own accountant judges what is found. No state; no randomness.

>>> from noshuffle.participation import BallsInBins
>>> found = fit_bins(BallsInBins(4, 8), epsilon=1.0, delta=1e-5, workload=Workload())
>>> found.name, found.coefficients(8)[0] > found.coefficients(8)[4] >= 0
('banded', np.True_)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from noshuffle import accounting
from noshuffle.participation import BallsInBins
from noshuffle.strategies import Strategy, banded
from noshuffle.strategies.base import reciprocal
from noshuffle.strategies.fit import fit
from noshuffle.strategies.fit_forms import error_form, lbfgs, through_reciprocal
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import Workload

#: Most steps, and steps an epoch, that are fitted so: a search keeps all bands.
MOST_STEPS, MOST_BANDS = 20_000, 512
#: About how many positions of a class are tried; shares of overlap between which φ is a spline.
_POSITIONS, _SHARES = (6, 12, 20, 25), (0.0, 0.1, 0.2, 0.4, 0.7)
_ORDER = 64
_Lags = NDArray[np.intp]


def fit_bins(
    part: BallsInBins, *, epsilon: float, delta: float, workload: Workload
) -> Strategy | None:
    """The banded strategy with the least noise × rms at (ε, δ), or None for long runs."""
    n, b = part.steps, part.steps_per_epoch
    if n > MOST_STEPS or b > MOST_BANDS or b < 2:
        return None
    first = fit("banded", part.in_order, bands=b, workload=workload).strategy
    c = np.maximum(first.coefficients(b), 0.0)  # type: ignore[attr-defined]
    start = c[1:] / c[0]
    form = error_form(n, workload=workload)
    best, value = start, math.inf
    for count in _counts(b):
        apart, x = b // count * np.arange(1, count // 2 + 1), start
        knots = {share: _log_noise(count, share, epsilon, delta) for share in _SHARES}
        for is_last in (False, True):
            price = _price(knots, epsilon, delta)

            def loss(x: Array, price: _Price = price, apart: _Lags = apart) -> tuple[float, Array]:
                c = np.append(1.0, x)
                with np.errstate(all="ignore"):
                    d = reciprocal(c, n)
                    square, slope = form(d)
                if not square < 1e120:
                    return 1e3, np.zeros(len(x))
                own, share, by_own, by_share = _overlap(c, apart)
                log_price, by_price = price(share)
                slope = through_reciprocal(c, d, slope) / (2 * square) + by_own / (2 * own)
                total = 0.5 * math.log(square) + 0.5 * math.log(own) + log_price
                return total, (slope + by_price * by_share)[1:]

            found = lbfgs(loss, x, [(0.0, 2.0)] * (b - 1), maxiter=80, maxcor=20, ftol=1e-8)
            x, share = found.x, _overlap(np.append(1.0, found.x), apart)[1]
            near = () if is_last else (0.8 * share, share, min(1.25 * share, 0.95))
            knots |= {one: _log_noise(count, one, epsilon, delta) for one in near}
        if found.fun < value:
            best, value = x, float(found.fun)
    c = np.append(1.0, best)
    return banded((c / np.linalg.norm(c)).tolist())


_Price = Callable[[float], tuple[float, float]]


def _counts(b: int) -> list[int]:
    """Divisors of b near those that are tried."""
    divisors = [m for m in range(2, b + 1) if b % m == 0]
    return sorted({max([m for m in divisors if m <= near] or divisors[:1]) for near in _POSITIONS})


def _overlap(c: Array, apart: _Lags) -> tuple[float, float, Array, Array]:
    """R(0) and ρ, with their slopes by c."""
    b, own = len(c), float(c @ c)
    place = np.arange(b)
    later, before = (c[(place + sign * apart[:, None]) % b] for sign in (1, -1))
    each = later @ c
    top = float(each.max())
    if top == 0:
        return own, 0.0, 2 * c, np.zeros(b)
    scaled = (each / top) ** _ORDER
    most = top * float(scaled.sum()) ** (1 / _ORDER)
    weights = scaled * (top / each.clip(1e-300)) * (top / most) ** (_ORDER - 1)
    share = most / own
    return own, share, 2 * c, (weights @ (later + before) - 2 * share * c) / own


def _price(knots: dict[float, float], epsilon: float, delta: float) -> _Price:
    """log φ_m(ρ) and its slope, between the knots."""
    from scipy.interpolate import PchipInterpolator  # slow to import, and needed here alone

    known = _log_known(epsilon, delta)
    shares = sorted(knots)
    curve = PchipInterpolator([*shares, 1.0], [*(knots[share] for share in shares), known])
    slope = curve.derivative()

    def price(share: float) -> tuple[float, float]:
        if share >= 1:
            return known, 0.0
        return float(curve(share)), float(slope(share))

    return price


def _log_known(epsilon: float, delta: float) -> float:
    return -math.log(accounting.gaussian.mu(epsilon=epsilon, delta=delta))


def _log_noise(count: int, share: float, epsilon: float, delta: float) -> float:
    """log z at which m positions of norm one that overlap by `share` have δ at ε."""
    known = _log_known(epsilon, delta)

    def excess(log_noise: float) -> float:
        square = math.exp(-2 * log_noise)
        ratio = accounting.bins.ratio_of(
            count, share * square, (1 - share) * square, tail=1e-4 * delta
        )
        return math.inf if ratio is None else math.log(max(ratio.delta(epsilon), 1e-300) / delta)

    high, above = known, excess(known)
    low, below = high, above
    while below <= 0:  # less and less noise, until it is too little
        (high, above), low = (low, below), low - 0.2
        below = excess(low)
    while high - low > 1e-4 and above < -1e-4:
        part = below / (below - above) if below < math.inf else 0.5
        middle = low + min(0.9, max(0.1, part)) * (high - low)
        value = excess(middle)
        if value > 0:
            low, below = middle, value
        else:
            high, above = middle, value
    return high
