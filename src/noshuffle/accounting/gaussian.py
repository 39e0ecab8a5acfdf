"""The exact privacy curve of one Gaussian mechanism, in both directions.

With μ = sensitivity / (standard deviation of the noise), the smallest δ for a given ε is

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)                       (Balle and Wang, 2018)

Written with x = ε/μ − μ/2, the normal density φ and Mills' ratio R(t) = Φ(−t)/φ(t), the second
exponential disappears because e^ε φ(x + μ) = φ(x):

    δ(ε) = φ(x) · (R(x) − R(x + μ)),      R(x) − R(x + μ) = ∫ 1 − t R(t) dt over [x, x + μ]

so that nothing overflows and, with the integral for small μ, nothing cancels. Every tree or matrix
mechanism without sampling is one such mechanism, and T steps of it compose to μ√T. No state.

>>> round(epsilon(mu=1.0, delta=1e-5), 6)
4.377178
>>> round(1 / mu(epsilon=1.0, delta=1e-5), 6)      # the noise multiplier for epsilon = 1
3.730632
>>> delta(mu=0.0, epsilon=0.0)
0.0
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erf, erfcx, erfinv, log_ndtr

from noshuffle.errors import InvalidInput, non_negative, open_unit

#: Beyond it the squares of a search for μ leave the range of float64.
MOST_EPSILON = 1e300
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


def _mills(t: float) -> float:
    return float(math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2)))


def _mills_slope(t: np.ndarray) -> np.ndarray:
    """1 − t R(t) = −R'(t); the asymptotic series takes over where the difference cancels."""
    near = np.minimum(t, 50.0)
    direct = 1 - near * math.sqrt(math.pi / 2) * erfcx(near / math.sqrt(2))
    y = 1 / np.maximum(t, 50.0) ** 2
    series = y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y * (1 - 9 * y * (1 - 11 * y)))))
    return np.asarray(np.where(t < 50.0, direct, series))


def _goal(delta: float) -> float:
    """log δ less what the evaluation may be wrong by (x² / 2 carries a few units in its last)."""
    return math.log(delta) * (1 + 2e-15) - 2e-13


def _from_above(*, mu: float, epsilon: float) -> float:
    """log δ(ε) and what the rounding of x = ε/μ − μ/2 may have taken off it, at least −1e6.

    The slope of log δ in x is at most |x| + 2; x has lost digits where both of its terms are large.
    """
    lost = 2.0**-51 * (epsilon / mu + mu / 2) * (abs(epsilon / mu - mu / 2) + 2)
    found = log_delta(mu=mu, epsilon=epsilon) + (lost if math.isfinite(lost) else 0.0)
    return max(found, -1e6)


def log_delta(*, mu: float, epsilon: float) -> float:
    """log δ(ε); minus infinity where δ = 0 (μ = 0) or is below any float."""
    non_negative(mu=mu, epsilon=epsilon)
    if mu == 0:
        return -math.inf
    if epsilon == 0:
        return math.log(float(erf(mu / math.sqrt(8))))
    x = epsilon / mu - mu / 2
    if not math.isfinite(x * x):
        return -math.inf if x > 0 else 0.0
    log_phi = -0.5 * x * x - _LOG_SQRT_2PI
    if x < -5:  # then μ > 10 and the second term is small: no cancellation
        first = float(log_ndtr(-x))
        return first + math.log1p(-math.exp(log_phi + math.log(_mills(x + mu)) - first))
    if mu > 0.5 * max(1.0, abs(x)):
        gap = _mills(x) - _mills(x + mu)
    else:
        t = x + 0.5 * mu * (1 + _NODES)
        gap = 0.5 * mu * float(_WEIGHTS @ _mills_slope(t))
    return log_phi + math.log(gap)


def delta(*, mu: float, epsilon: float) -> float:
    """The smallest δ at which a Gaussian mechanism with parameter μ is (ε, δ)-private.

    Guarantees: exact to about 1e-13 relative; 0 for μ = 0; values under 1e-308 come back as 0
    (ask `log_delta`). NaN, infinity and negative arguments are refused.
    """
    return min(1.0, math.exp(log_delta(mu=mu, epsilon=epsilon)))


def epsilon(*, mu: float, delta: float) -> float:
    """The smallest ε at which a Gaussian mechanism with parameter μ is (ε, δ)-private.

    Guarantees: `log_delta(mu=mu, epsilon=result) <= log(delta)` holds as evaluated, so rounding
    never reports less than the truth; 0 where δ already covers ε = 0; δ outside (0, 1) is refused.
    """
    non_negative(mu=mu)
    open_unit(delta=delta)
    goal = _goal(delta)
    if log_delta(mu=mu, epsilon=0.0) <= goal:
        return 0.0
    if mu > 1e150:  # ε ≈ μ²/2 is beyond floating point
        return math.inf

    def excess(e: float) -> float:
        return _from_above(mu=mu, epsilon=e) - goal

    # The zCDP conversion with ρ = μ²/2 is an upper bound, hence the right end of the bracket.
    high = (mu**2 / 2 + mu * math.sqrt(-2 * goal)) * (1 + 1e-9)
    return _safe_root(excess, 0.0, high, step=1 + 2e-16)


def mu(*, epsilon: float, delta: float) -> float:
    """The largest μ that is (ε, δ)-private; the noise multiplier is sensitivity / μ.

    Guarantees: `log_delta(mu=result, epsilon=epsilon) <= log(delta)` holds as evaluated, so
    rounding never allows more than the truth. δ outside (0, 1) is refused.
    """
    non_negative(epsilon=epsilon)
    open_unit(delta=delta)
    if epsilon > MOST_EPSILON:
        raise InvalidInput(f"epsilon must be at most {MOST_EPSILON:g}, got {epsilon!r}")
    goal = _goal(delta)
    if epsilon == 0:
        return math.sqrt(8) * float(erfinv(delta)) * (1 - 1e-15)

    def excess(m: float) -> float:
        return _from_above(mu=m, epsilon=epsilon) - goal

    root = math.sqrt(-2 * goal)
    low = 2 * epsilon / (root + math.sqrt(root**2 + 2 * epsilon)) * (1 - 1e-9)
    high = 2 * low
    while excess(high) <= 0:
        high *= 2
    return _safe_root(excess, high, low, step=1 - 2e-16)


def _safe_root(excess: Callable[[float], float], bad: float, good: float, *, step: float) -> float:
    """A root between `bad` (excess > 0) and `good` (excess ≤ 0), on the good side of it."""
    if excess(good) > 0:  # the bracket itself is at the resolution of the evaluation
        good *= step**1e6
    x = float(brentq(excess, min(bad, good), max(bad, good), xtol=1e-300, rtol=9e-16, maxiter=500))
    ulps = 1.0
    while excess(x) > 0:
        x *= 1 + (step - 1) * ulps
        ulps *= 2
    return x
