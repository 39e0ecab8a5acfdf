"""Rényi divergences of the Gaussian mechanism under the three ways of choosing a batch.

    everybody    D(α) = α / (2σ²)
    Poisson      D(α) = log E[(1 − q + q e^{(2x−1)/(2σ²)})^α] / (α − 1),  x ~ N(0, σ²)
                 the larger of the two directions (Mironov, Talwar, Zhang, 2019)
    fixed size   an upper bound, replace-one (Wang, Balle, Kasiviswanathan, 2019, theorem 27)

The Poisson expectation is written with u = q(e^{(2x−1)/(2σ²)} − 1), whose mean is zero, so that

    E[(1 + u)^α] − 1 = E[(1 + u)^α − 1 − αu]

has a positive integrand and nothing cancels when the divergence is tiny. At whole α it is a finite
sum of positive terms; at other α the trapezoidal rule converges exponentially (the integrand is
analytic in a strip of half width πσ²) where the alternating series of the paper cancels.

>>> round(poisson(noise_multiplier=1.0, rate=0.01, order=2), 9)
0.000171813
>>> round(float(fixed_size(noise_multiplier=1.0, rate=0.01, orders=(2,))[0]), 9)
0.000543509
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln

Array = np.ndarray

#: Points of an integral.
_MOST_POINTS = 2**21
#: Above this order the fixed-size bound keeps only its simpler terms, as in published tables.
_LARGEST_TIGHT_ORDER = 256


def _log_binomial(n: int, k: Array) -> Array:
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def _log_expm1(x: Array) -> Array:
    """log(e^x − 1) for x > 0."""
    return np.where(x > 30, x, np.log(np.expm1(np.minimum(x, 30)))) + np.where(
        x > 30, np.log1p(-np.exp(-np.maximum(x, 30))), 0.0
    )


def _log_sum_exp(x: Array) -> float:
    """log Σ e^x. SciPy's (1.17) spends 200 µs per call on kinds of arrays; a curve makes 156."""
    top = float(x.max())
    return top + math.log(np.exp(x - top).sum()) if math.isfinite(top) else top


def poisson(*, noise_multiplier: float, rate: float, order: float) -> float:
    """D_α((1 − q) N(0, σ²) + q N(1, σ²) ‖ N(0, σ²)), the exact value at any real α > 1.

    With so little noise that the integral would take millions of points, α that are not whole have
    the divergence without sampling, which is larger by at most α/(α − 1)·log 1/q.
    """
    whole = order / 2 / noise_multiplier / noise_multiplier
    if rate == 1 or not math.isfinite(whole):
        return whole
    if float(order).is_integer():
        log_excess = _whole_order(noise_multiplier, rate, int(order))
    elif order / noise_multiplier + 76.0 > _MOST_POINTS * _step(noise_multiplier):
        return whole
    else:
        log_excess = _real_order(noise_multiplier, rate, order)
    return float(np.logaddexp(0.0, log_excess)) / (order - 1)


def _step(sigma: float) -> float:
    """Between two points of the integral."""
    return min(0.4, math.pi * sigma) * 0.15


def _whole_order(sigma: float, q: float, order: int) -> float:
    """log(A − 1): the binomial weights sum to one, so each exponential gives up its 1."""
    k = np.arange(2, order + 1, dtype=float)
    with np.errstate(over="ignore"):
        growth = k * (k - 1) / (2 * sigma**2)
    terms = _log_binomial(order, k) + (order - k) * math.log1p(-q) + k * math.log(q)
    return _log_sum_exp(terms + _log_expm1(growth))


def _real_order(sigma: float, q: float, order: float) -> float:
    """log E[(1 + u)^α − 1 − αu] by the trapezoidal rule on t = x/σ.

    The singularities at Im t = ±πσ bound the error by e^{−2π·πσ/h}, the Gaussian by e^{−2π²/h²};
    the step makes both negligible. The integrand has its weight around t = 0 and t = α/σ.
    """
    h = _step(sigma)
    low, high = -38.0, order / sigma + 38.0
    t = low + h * np.arange(math.ceil((high - low) / h) + 1)
    e = (2 * sigma * t - 1) / (2 * sigma**2)
    u = q * np.expm1(np.minimum(e, 30.0))
    log_1u = np.where(
        e < 30.0, np.log1p(u), np.logaddexp(math.log1p(-q), math.log(q) + np.maximum(e, 30.0))
    )
    log_f = np.empty_like(t)
    small = np.abs(order * u) < 0.1
    v = u[small]
    series = np.zeros_like(v)  # Σ_{k≥2} C(α, k) u^k, by Horner's rule
    for k in range(14, 1, -1):
        series = 1 + series * v * (order - k) / (k + 1)
    with np.errstate(divide="ignore"):
        log_f[small] = math.log(order * (order - 1) / 2) + 2 * np.log(np.abs(v)) + np.log(series)
        large = ~small & (u > 0)
        power = order * log_1u[large]
        linear = np.where(
            e[large] < 30.0,
            np.log1p(order * u[large]),
            math.log(order * q) + np.maximum(e[large], 30.0),
        )
        log_f[large] = power + np.log1p(-np.exp(linear - power))
    left = ~small & (u <= 0)
    log_f[left] = np.log(np.expm1(order * log_1u[left]) - order * u[left])
    log_phi = -0.5 * t**2 - 0.5 * math.log(2 * math.pi)
    return _log_sum_exp(log_f + log_phi) + math.log(h)


def fixed_size(*, noise_multiplier: float, rate: float, orders: Sequence[float]) -> Array:
    """Upper bound on D_α for a uniform subset of a fixed fraction q, replace-one neighbours.

    At whole α, with B(n) = E[(e^Y − 1)^n], Y ~ N(−1/(2σ²), 1/σ²), the bound is

        log(1 + Σ_{i=2..α} C(α, i) q^i · min(4 √(B(2⌊i/2⌋) B(2⌈i/2⌉)), 2 e^{i(i−1)/(2σ²)}))

    over α − 1; (α − 1)D(α) is convex, so the values between are interpolated. σ is the noise
    over the replace-one sensitivity.
    """
    if rate == 1:
        return np.asarray(orders, dtype=float) / (2 * noise_multiplier**2)
    whole_orders = {math.floor(a) for a in orders} | {math.ceil(a) for a in orders}
    tight = [a for a in whole_orders if a <= _LARGEST_TIGHT_ORDER]
    moments = _even_moments(noise_multiplier, max(tight, default=2))
    log_a = {
        a: 0.0 if a == 1 else _fixed_whole(noise_multiplier, rate, a, moments) for a in whole_orders
    }
    out = []
    for a in orders:
        fraction = a - math.floor(a)
        value = (1 - fraction) * log_a[math.floor(a)] + fraction * log_a[math.ceil(a)]
        out.append(value / (a - 1))
    return np.array(out)


def _fixed_whole(sigma: float, q: float, order: int, moments: Array) -> float:
    i = np.arange(2, order + 1)
    with np.errstate(over="ignore"):
        bound = math.log(2) + i * (i - 1.0) / (2 * sigma**2)
    if order <= _LARGEST_TIGHT_ORDER:
        mixed = math.log(4) + 0.5 * (moments[i // 2] + moments[(i + 1) // 2])
        bound = np.minimum(bound, mixed)
    else:
        bound[0] = min(bound[0], math.log(4) + float(_log_expm1(np.array(1 / sigma**2))))
    terms = _log_binomial(order, i) + i * math.log(q) + bound
    return float(np.logaddexp(0.0, _log_sum_exp(terms)))


def _even_moments(sigma: float, order: int) -> Array:
    """log B(2k) for 2k up to order + 1, at index k: positive integrands, one trapezoid each.

    As a signed sum over e^{l(l−1)/(2σ²)} the same numbers cancel completely for large σ.
    """
    out = np.full((order + 1) // 2 + 1, 0.0)
    h = 0.1
    for k in range(1, len(out)):
        n = 2 * k
        reach = math.sqrt(n) + 14
        t = np.arange(-reach, n / sigma + reach, h)
        y = (2 * sigma * t - 1) / (2 * sigma**2)
        with np.errstate(divide="ignore"):
            log_gap = np.where(y > 30, y, np.log(np.abs(np.expm1(np.minimum(y, 30.0)))))
        out[k] = _log_sum_exp(n * log_gap - 0.5 * t**2) + math.log(h / math.sqrt(2 * math.pi))
    return out
