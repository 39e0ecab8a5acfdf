"""Amplification by shuffling: n local reports of privacy ε₀, in an order that nobody knows.

Whoever swaps one report for another meets (Feldman, McMillan, Talwar 2021, arXiv 2012.12803)

    C ~ Binomial(n − 1, e^−ε₀),   A ~ Binomial(C, 1/2),   Δ = 1 with probability e^ε₀/(1 + e^ε₀)
    P = (A + Δ, C − A + 1 − Δ)   against   Q = (A + 1 − Δ, C − A + Δ)

each of the others being a clone of one of the two with probability e^−ε₀. Given C = c, so that
a + b = c + 1, the ratio P/Q = (e^ε₀ a + b)/(a + e^ε₀ b) grows with a: it exceeds e^ε above a point
a*, and δ(ε) = E_C [P(a > a*) − e^ε Q(a > a*)] is a sum over c of binomial tails.

`bound` is their closed form (theorem 3.1), for comparison. Reports may be chosen one after another,
by looking at those before; each must be ε₀-private for every pair of inputs. No state.

>>> round(epsilon(local=1.0, count=10_000, delta=1e-6), 3)
0.053
>>> round(bound(local=1.0, count=10_000, delta=1e-6), 3)
0.214
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import bdtr, bdtrc, betainc, gammaln, xlog1py

from noshuffle.accounting.bisection import bracket
from noshuffle.errors import Unsupported, non_negative, open_unit, positive, whole

Array = np.ndarray

#: What sums of binomial tails may be wrong by, and the tails of n coins, relative: r + s √n (beside
#: 120 bits, up to 10⁷: 2e-12 at most).
_ROUNDING, _TAIL, _TAIL_EACH = 1e-14, 1e-13, 4e-15


def delta(*, local: float, count: int, epsilon: float) -> float:
    """δ at ε of `count` shuffled reports that are `local`-private each.

    Guarantees: an upper bound; what is left out of the sum is added, and so is what rounding can
    take away: logarithms of factorials are wrong by their last bits, which count for large n.
    """
    positive(local=local)
    whole(count=count)
    non_negative(epsilon=epsilon)
    if epsilon >= local:
        return 0.0
    n, clone = count - 1, math.exp(-local)
    spread = 10 * math.sqrt(n * clone * (1 - clone)) + 50
    low, high = max(0, math.floor(n * clone - spread)), min(n, math.ceil(n * clone + spread))
    c = np.arange(low, high + 1)
    terms = (
        gammaln(n + 1),
        -gammaln(c + 1),
        -gammaln(n - c + 1),
        -local * c,
        xlog1py(n - c, -clone),
    )
    log_mass = np.sum(np.broadcast_arrays(*terms), axis=0)
    slack = 4 * 2.0**-52 * float(np.max(sum(np.abs(term) for term in terms)))
    outside = (float(bdtr(low - 1, n, clone)) if low else 0.0) + (
        float(bdtrc(high, n, clone)) if high < n else 0.0
    )
    more, gamma = 1 / (1 + clone), math.exp(epsilon)
    # P > e^ε Q where a (e^ε₀ − e^ε) > b (e^{ε₀+ε} − 1), both divided by e^ε₀
    mine, other = 1 - gamma * clone, gamma - clone
    first = np.floor((c + 1) * other / (mine + other)) + 1
    one_less, itself = _at_least(first - 1, c), _at_least(first, c)
    upper = more * one_less + (1 - more) * itself
    lower = (1 - more) * one_less + more * itself
    wrong = (_TAIL + _TAIL_EACH * np.sqrt(c)) * (upper + gamma * lower)
    total = float(np.exp(log_mass) @ np.maximum(upper - gamma * lower + wrong, 0.0))
    return min(1.0, total * (1 + 1e-9 + slack) + outside + _ROUNDING)


def _at_least(m: Array, c: Array) -> Array:
    """P(Binomial(c, 1/2) ≥ m)."""
    inside = (m >= 1) & (m <= c)
    k = np.where(inside, m, 1.0)
    tail = betainc(k, np.where(inside, c - k + 1, 1.0), 0.5)
    return np.asarray(np.where(m < 1, 1.0, np.where(m > c, 0.0, tail)))


def epsilon(*, local: float, count: int, delta: float) -> float:
    """The least ε at δ, to 1e-6; never above the local one."""
    open_unit(delta=delta)
    if _delta(local=local, count=count, epsilon=0.0) <= delta:
        return 0.0

    def fits(own: float) -> bool:
        return _delta(local=local, count=count, epsilon=own) <= delta

    return bracket(fits, 0.0, float(local), tolerance=1e-6)[1]


_delta = delta  # `epsilon` has an argument of that name


def bound(*, local: float, count: int, delta: float) -> float:
    """The closed form; refused beyond the local ε that it is proved for."""
    positive(local=local)
    whole(count=count)
    open_unit(delta=delta)
    if local > math.log(count / (16 * math.log(2 / delta))):
        raise Unsupported(
            f"the closed form needs local ε up to log(n/(16 log(2/δ))), got {local!r} for "
            f"{count} reports; use epsilon()"
        )
    grown = math.exp(local)
    spread = 8 * math.sqrt(grown * math.log(4 / delta) / count) + 8 * grown / count
    return math.log1p(math.expm1(local) / (grown + 1) * spread)
