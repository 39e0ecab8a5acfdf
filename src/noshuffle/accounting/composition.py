"""Composition of (ε, δ) guarantees, groups, and amplification by subsampling.

    basic       (kε, kδ)
    advanced    ε√(2k log(1/δ')) + kε·g(ε), δ' more        (Dwork, Rothblum, Vadhan, 2010)
                g(ε) = e^ε − 1 as first published, tanh(ε/2) in the sharper form
    optimal     the curve of k-fold randomized response    (Kairouz, Oh, Viswanath, 2015)
                δ(E) = Σ_j C(k, j) p^{k−j} (1−p)^j (1 − e^{E−(k−2j)ε})₊,  p = e^ε/(1 + e^ε)
                unequal ε: their randomized responses composed by FFT (`optimal_sequence`)
    group       (gε, δ(e^{gε} − 1)/(e^ε − 1))
    subsample   (log(1 + q(e^ε − 1)), qδ)

For Gaussian noise none of these is needed: its own curves (`gaussian`, `fourier`) are sharper. All
hold for adaptive composition. No state.

>>> round(optimal(epsilon=0.1, count=100, slack=1e-6).epsilon, 3)
4.775
>>> round(advanced(epsilon=0.1, count=100, slack=1e-6).epsilon, 3)
5.756
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from noshuffle.accounting import fourier
from noshuffle.accounting.atoms import randomized_response
from noshuffle.errors import (
    InvalidInput,
    non_negative,
    one_of,
    open_unit,
    record_list,
    unit_rate,
    whole,
)

#: Sums over more terms than this lose digits to the binomials.
_MOST_FOLDS = 10**7
FORMS = ("tanh", "original")


class Guarantee(NamedTuple):
    """ε and δ together."""

    epsilon: float
    delta: float


def _check(epsilon: float, delta: float) -> None:
    non_negative(epsilon=epsilon, delta=delta)
    if delta > 1:
        raise InvalidInput(f"delta must be at most 1, got {delta!r}")


def basic(*, epsilon: float, count: int, delta: float = 0.0) -> Guarantee:
    """k mechanisms in a row: everything adds."""
    _check(epsilon, delta)
    whole(count=count)
    return Guarantee(count * epsilon, min(1.0, count * delta))


def sequence(guarantees: Iterable[tuple[float, float]]) -> Guarantee:
    """Unequal mechanisms in a row: everything adds."""
    total = [0.0, 0.0]
    for epsilon, delta in record_list(2, guarantees=guarantees):
        _check(epsilon, delta)
        total = [total[0] + epsilon, total[1] + delta]
    return Guarantee(total[0], min(1.0, total[1]))


def advanced(
    *, epsilon: float, count: int, slack: float, delta: float = 0.0, form: str = "tanh"
) -> Guarantee:
    """k mechanisms in a row at √k growth; `slack` is the δ paid for it.

    Guarantees: valid for every ε; not always better than `basic` (large ε or small k).
    """
    _check(epsilon, delta)
    whole(count=count)
    open_unit(slack=slack)
    one_of(FORMS, form=form)
    drift = math.tanh(epsilon / 2) if form == "tanh" else _expm1(epsilon)
    total = epsilon * math.sqrt(-2 * count * math.log(slack)) + count * epsilon * drift
    return Guarantee(total, min(1.0, count * delta + slack))


def optimal(*, epsilon: float, count: int, slack: float, delta: float = 0.0) -> Guarantee:
    """The best ε that holds for every k mechanisms that are each (ε, δ)-private.

    Guarantees: exact but for rounding, which is added on the safe side. The δ of the result is
    1 − (1 − δ)^k (1 − slack).
    """
    _check(epsilon, delta)
    whole(at_most=_MOST_FOLDS, count=count)
    open_unit(slack=slack)
    log_p, losses = _response(epsilon, count)
    log_p, losses = log_p[losses >= 0], losses[losses >= 0]
    log_upper = np.logaddexp.accumulate(log_p)
    log_lower = np.logaddexp.accumulate(log_p - losses)
    # δ(E) is the largest of U_i − e^E L_i over the sets of the i largest losses. Logarithms of
    # factorials are wrong by their last bits, so U and L are wrong by this share of them.
    wrong = 2.0**-50 * (2 * count + float(gammaln(count + 1.0)) + count * epsilon)
    room = np.exp(log_upper + wrong) - slack
    needed = np.log(room[room > 0]) - log_lower[room > 0] + wrong
    total = float(np.max(needed, initial=0.0))
    # beyond kε nothing is lost, but below it by a rounding δ may be anything
    total = min(max(0.0, total * (1 + 1e-13)), math.nextafter(count * epsilon, math.inf))
    kept = count * math.log1p(-delta) if delta < 1 else -math.inf
    return Guarantee(total, -math.expm1(kept + math.log1p(-slack)))


def optimal_sequence(guarantees: Iterable[tuple[float, float]], *, slack: float) -> Guarantee:
    """The best ε that holds for mechanisms of unequal (ε_i, δ_i), to about 1e-4.

    Exactly it is hard to count (Murtagh, Vadhan 2016); here it is the composition of their
    randomized responses by their loss distributions, from above. The δ of the result is
    1 − Π(1 − δ_i)(1 − slack).
    """
    open_unit(slack=slack)
    rows: dict[float, int] = {}
    kept = math.log1p(-slack)
    for epsilon, delta in record_list(2, guarantees=guarantees):
        _check(epsilon, delta)
        rows[epsilon] = rows.get(epsilon, 0) + 1
        kept += math.log1p(-delta) if delta < 1 else -math.inf
    releases = [
        fourier.AnyRelease(randomized_response(epsilon=epsilon), steps=count)
        for epsilon, count in rows.items()
        if epsilon > 0
    ]
    if not releases:
        return Guarantee(0.0, -math.expm1(kept))
    found = fourier.compose(releases, direction="remove").epsilon(delta=slack)
    return Guarantee(found, -math.expm1(kept))


def optimal_delta(*, epsilon: float, count: int, total: float) -> float:
    """δ(total) of k-fold randomized response: the best δ for k ε-private mechanisms."""
    non_negative(epsilon=epsilon, total=total)
    whole(at_most=_MOST_FOLDS, count=count)
    log_p, losses = _response(epsilon, count)
    return min(1.0, float(np.sum(np.exp(log_p) * -np.expm1(np.minimum(total - losses, 0.0)))))


def group(*, epsilon: float, delta: float, size: int) -> Guarantee:
    """Protection of `size` units together, from the protection of one."""
    _check(epsilon, delta)
    whole(size=size)
    if epsilon == 0:
        return Guarantee(0.0, min(1.0, size * delta))
    log_ratio = _log_expm1(size * epsilon) - _log_expm1(epsilon)
    log_ratio += 2.0**-50 * (1 + abs(_log_expm1(epsilon)))  # what two large logarithms lose
    worse = math.inf if log_ratio > 700 and delta > 0 else delta * math.exp(min(log_ratio, 700.0))
    return Guarantee(size * epsilon, min(1.0, worse))


def subsample(*, epsilon: float, rate: float, delta: float = 0.0) -> Guarantee:
    """Amplification: the mechanism runs on a secret random sample.

    Guarantees: `rate` is the Poisson rate if neighbours differ by adding or removing a unit, or
    m/n for a uniform m-subset if they differ by replacing one; the (ε, δ) of the mechanism must
    hold for the same neighbours.
    """
    _check(epsilon, delta)
    unit_rate(rate=rate)
    if epsilon > 700:  # q(e^ε − 1) may be any number, small ones too: in logarithms
        return Guarantee(float(np.logaddexp(0.0, epsilon + math.log(rate))), rate * delta)
    return Guarantee(math.log1p(rate * math.expm1(epsilon)), rate * delta)


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def _log_expm1(x: float) -> float:
    return math.log(math.expm1(x)) if x < 30 else x + math.log1p(-math.exp(-x))


def _response(epsilon: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities under the true answer and losses (k − 2j)ε, largest loss first."""
    j = np.arange(count + 1)
    log_p = -float(np.logaddexp(0.0, -epsilon))
    log_binomial = gammaln(count + 1.0) - gammaln(j + 1.0) - gammaln(count - j + 1.0)
    log_mass = log_binomial + (count - j) * log_p + j * (log_p - epsilon)
    return np.asarray(log_mass), np.asarray((count - 2.0 * j) * epsilon)
