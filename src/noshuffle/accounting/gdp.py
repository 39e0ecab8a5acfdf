"""Every mechanism in one currency: a Gaussian mechanism that fails with a small probability.

A mechanism whose privacy curve lies below that of N(μ, 1) against N(0, 1) with an additional event
of probability s that shows everything,

    δ(ε) ≤ s + (1 − s)·δ_μ(ε)      for all ε ≥ 0, in both directions,

is a function of the outcome of that pair (Blackwell; Dong, Roth, Su 2022). Such costs add up as
μ² = Σ μ_i², s = Σ s_i, also if each mechanism is chosen by looking at the outcomes of all before
it: a sum of squares that never passes a bound fixed beforehand is a privacy filter (Smith and
Thakurta 2022; Koskela, Tobaben, Honkela 2023). What s costs is the chance that any of the events
happens, whoever chose them. Beside it, mechanisms of pure ε whose ε_i never add up to more than a
bound E fixed beforehand add E to ε: their part of the privacy loss is at most E on every path,
and the steps of the others are bounded given everything that came before.

    Gaussian        itself: exact, s = 0
    pure ε          μ = 2Φ⁻¹(e^ε/(1 + e^ε)), s = 0. The trade-off curve of ε-DP consists of two
                    chords; that of N(μ, 1) is convex and passes through their three ends.
    (ε, δ)          the same, s = δ (Kairouz, Oh, Viswanath 2015)
    any curve       the least μ for a chosen s, on a grid of ε

No state.

>>> round(of_pure(1.0), 4)
1.232
>>> from noshuffle.accounting import gaussian
>>> grid = np.linspace(0, 4, 400)
>>> curve = np.array([gaussian.delta(mu=0.5, epsilon=e) for e in grid])
>>> round(dominating(grid, curve, slack=1e-8), 3)
0.5
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri_exp

from noshuffle.accounting import gaussian
from noshuffle.accounting.bisection import ratio_bracket
from noshuffle.errors import InvalidInput, non_negative, open_unit

Array = np.ndarray
#: What evaluations of normal tails may be wrong by, absolutely.
_ROUNDING = 1e-15


def of_pure(epsilon: float) -> float:
    """The least μ such that every ε-private mechanism is μ-GDP; rounded up."""
    non_negative(epsilon=epsilon)
    return float(-2 * ndtri_exp(-np.logaddexp(0.0, epsilon))) * (1 + 1e-12)


def dominating(epsilons: Array, deltas: Array, *, slack: float) -> float:
    """The least μ whose curve, with failure probability `slack`, lies above a given one.

    `deltas` are upper bounds of a curve at the increasing points `epsilons`, the first of which is
    0; the last must be at most `slack`.

    Guarantees: holds between the points too. Both curves are convex in e^ε, so in a cell the given
    one lies below its chord and the Gaussian's above its tangent at the right end: two lines, that
    are compared at both ends. Infinite where no μ is found below 1e4.
    """
    open_unit(slack=slack)
    if epsilons[0] != 0 or deltas[-1] > slack:
        raise InvalidInput("a curve must begin at ε = 0 and end below the slack")
    ends, widths = epsilons[1:], -np.expm1(-np.diff(epsilons))

    def is_above(mu: float) -> bool:
        second = np.exp(ends + log_ndtr(-mu / 2 - ends / mu))  # e^ε Φ(−μ/2 − ε/μ), minus the slope
        right = slack + (1 - slack) * (ndtr(mu / 2 - ends / mu) - second) - _ROUNDING
        left = right + (1 - slack) * second * widths
        is_right = (deltas[1:] <= right) | (deltas[1:] <= slack)
        return bool(np.all(is_right & ((deltas[:-1] <= left) | (deltas[:-1] <= slack))))

    return ratio_bracket(is_above, 0.0, 1e4, tolerance=1e-7)[1] if is_above(1e4) else math.inf


def epsilon(*, mu: float, slack: float, delta: float) -> float:
    """ε at δ of a cost (μ, s); infinite where s alone uses δ up."""
    non_negative(slack=slack)
    open_unit(delta=delta)
    if slack >= delta or not math.isfinite(mu):
        return math.inf
    return gaussian.epsilon(mu=mu, delta=(delta - slack) / (1 - slack))


def capacity(*, epsilon: float, delta: float, slack: float = 0.0) -> float:
    """The largest μ that fits into (ε, δ) beside a failure probability; 0 where none does."""
    if slack >= delta:
        return 0.0
    return gaussian.mu(epsilon=epsilon, delta=(delta - slack) / (1 - slack))
