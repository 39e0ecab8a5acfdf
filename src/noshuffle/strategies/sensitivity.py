"""How far one unit can move what is protected: S = max ‖C u‖₂ in units of the clip norm.

    S² = max_π max_{‖u_i‖≤1} Σ_{i,j∈π} ⟨u_i, u_j⟩ X_ij,     X = CᵀC

over the patterns π that the participation allows. For a Toeplitz C = T(c)·diag(g),
X_{i,i+L} = g_i g_{i+L} P_L[n−1−i−L] with the running sums P_L[t] = Σ_{s≤t} c_s c_{s+L}, so nothing
here forms a matrix unless the strategy is one, or the run is short.

    single pass                     the largest column norm
    c ≥ 0, non-increasing           ‖Σ_{j<k} C_{:,jb}‖² for both epochs and min-separation
                                    (Kalinin–Lampert, arXiv 2405.13763, Theorem 2)
    bands ≤ separation              columns of one pattern are orthogonal: a dynamic program
    epochs                          max_j Σ_{l,m} |X_{j+lb,j+mb}| in O(n·k)
    min-separation, short run       branch and bound over |X| (see `gram`)
    min-separation, long run        a bound from the largest |X| at every lag
    trees                           exact counting (see `tree_sensitivity`)
    gains on both sides             no Toeplitz form, paths of its own (see `two_sided_gram`)

Guarantees. `value` is never below the truth (beyond 1e-12 relative, for rounding). `exact` is said
only when some unit is known to reach the value; otherwise the value is an upper bound, which costs
noise but never privacy. What has no proved answer raises `Unsupported`.

>>> from noshuffle.participation import Epochs, SinglePass
>>> from noshuffle.strategies.toeplitz import sqrt_toeplitz
>>> round(sensitivity(sqrt_toeplitz(), SinglePass(steps=64)).value, 8)
1.54558989
>>> four = sensitivity(sqrt_toeplitz(), Epochs(epochs=4, steps_per_epoch=16))
>>> round(four.value, 8), four.exact
(3.96062027, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noshuffle.errors import Unsupported, instance_of
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.strategies import gram
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.dense import Dense
from noshuffle.strategies.gram import ROUNDING
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.tree import Tree
from noshuffle.strategies.tree_sensitivity import tree_squared_sensitivity
from noshuffle.strategies.two_sided import TwoSidedBlt
from noshuffle.strategies.two_sided_gram import largest_column, worst_class

#: Longest run whose coefficients are laid out in memory.
MAX_COEFFICIENTS = 2**26

#: Longest run whose worst min-separation pattern is searched for, if X is not a matrix already.
SEARCH_STEPS = 1024

#: Longest run for which the largest |X| is found at every lag: O(n²) time, O(n) memory.
LAG_STEPS = 2**14

#: Most work, n²·k, that the search over an explicit matrix may begin with.
SEARCH_WORK = 2 * 10**8


#: Most epochs for which signs are looked for that would attain a bound from |X|.
SIGN_EPOCHS = 256


@dataclass(frozen=True)
class Sensitivity:
    """S, S², whether S is attained (`exact`) or an upper bound, and why it is only a bound."""

    value: float
    squared: float
    exact: bool
    notes: str = ""


def sensitivity(strategy: Strategy, participation: Participation) -> Sensitivity:
    """S of the strategy for units that take part as promised."""
    if isinstance(participation, Restarted) and isinstance(participation.participation, SinglePass):
        participation = participation.participation
    instance_of(Strategy, strategy=strategy)
    plain = isinstance(strategy, Identity) and not strategy.has_gains
    if isinstance(participation, Poisson | FixedSize):
        if plain:
            return _record(1.0, 1.0, "per step; the amplified accountant composes the steps")
        raise Unsupported(
            f"{participation.kind} sampling is accounted for independent noise only, got the "
            f"strategy {strategy.name!r}; use identity(), or Epochs or MinSeparation"
        )
    if plain:
        return _record(float(participation.most), float(participation.most))
    if isinstance(strategy, Tree):
        squared = float(tree_squared_sensitivity(strategy, participation))
        if isinstance(participation, Restarted) and isinstance(
            participation.participation, MinSeparation
        ):
            why = "upper bound: separation across the end of a block is not made use of"
            return Sensitivity(math.sqrt(squared), squared, exact=False, notes=why)
        return _record(squared, squared)
    if isinstance(participation, Restarted):
        raise Unsupported(
            f"an order that changes between restarts is proved for trees and identity only, got "
            f"the strategy {strategy.name!r}; use MinSeparation over the whole run"
        )
    if not isinstance(participation, SinglePass | Epochs | MinSeparation):
        raise Unsupported(f"no sensitivity is proved under {type(participation).__name__}")
    if isinstance(strategy, ToeplitzStrategy):
        return _toeplitz(strategy, participation)
    if isinstance(strategy, TwoSidedBlt):
        return _two_sided(strategy, participation)
    if isinstance(strategy, Dense):
        C = strategy.encoder(participation.steps)
        return _explicit(C.T @ C, participation)
    raise Unsupported(f"no sensitivity is proved for the strategy {strategy.name!r}")


def _record(upper: float, reached: float, notes: str = "") -> Sensitivity:
    """Exact if a unit reaches the upper bound, up to rounding."""
    if not math.isfinite(upper):
        raise Unsupported(
            "the encoder grows beyond floating point over this many steps, so its sensitivity is "
            "not known; use smaller coefficients or taps, or fewer steps"
        )
    exact = reached >= upper * (1 - ROUNDING)
    notes = notes if exact else "upper bound: inner products of columns change sign or order"
    return Sensitivity(value=math.sqrt(upper), squared=upper, exact=exact, notes=notes)


def _toeplitz(
    strategy: ToeplitzStrategy, participation: SinglePass | Epochs | MinSeparation
) -> Sensitivity:
    n = participation.steps
    if n > MAX_COEFFICIENTS:
        raise Unsupported(
            f"the sensitivity of {strategy.name!r} is computed for at most {MAX_COEFFICIENTS:,} "
            f"steps, got {n:,}; use a tree or fewer, larger steps"
        )
    c, g = strategy.coefficients(n), strategy.gain_values(n)
    with np.errstate(over="ignore", invalid="ignore"):
        columns = squared_columns(c, g)
    if not np.all(np.isfinite(columns)):
        return _record(math.inf, 0.0)
    if isinstance(participation, SinglePass):
        return _record(float(columns.max()), float(columns.max()))
    if isinstance(participation, Epochs):
        b, k = participation.steps_per_epoch, participation.epochs
    else:
        b, k = min(participation.separation, n), participation.most
    if not strategy.has_gains:
        upper = envelope_squared(c, separation=b, most=k)
        summed = _summed_columns(c, separation=b, most=k)
        reached = float(np.sum(summed * summed))
        if reached >= upper * (1 - ROUNDING):
            return _record(upper, reached)
    if isinstance(participation, Epochs):
        return _record(*toeplitz_epochs(c, g, epochs=k, steps_per_epoch=b))
    if not np.any(c[b:]):  # orthogonal columns; without gains they shrink, so early is worst
        early = float(columns[::b][:k].sum())
        squared = gram.best_sum(columns, separation=b, most=k) if strategy.has_gains else early
        return _record(squared, squared)
    if n <= SEARCH_STEPS and n * n * k <= SEARCH_WORK:
        C = strategy.encoder(n)
        return _explicit(C.T @ C, participation)
    upper = envelope_bound(c, g, separation=b, most=k)
    if n <= LAG_STEPS:
        sizes = lag_sizes(c, g, first=b)
        upper = min(upper, gram.lag_bound(columns, sizes, separation=b, most=k))
    return _record(upper, 0.0)


def _two_sided(
    strategy: TwoSidedBlt, participation: SinglePass | Epochs | MinSeparation
) -> Sensitivity:
    n = participation.steps
    a, g = strategy.draw_gain_values(n), strategy.gain_values(n)
    c = strategy.core.coefficients(n)
    with np.errstate(over="ignore", invalid="ignore"):
        if participation.most == 1:
            squared = largest_column(c, a, g)
            return _record(squared, squared)
        if isinstance(participation, Epochs):
            upper, is_attained = worst_class(c, a, g, epochs=participation.epochs)
            return _record(upper, upper if is_attained else 0.0)
    if n <= SEARCH_STEPS and n * n * participation.most <= SEARCH_WORK:
        C = strategy.encoder(n)
        return _explicit(C.T @ C, participation)
    raise Unsupported(
        f"two-sided gains under min-separation are searched for at most {SEARCH_STEPS} steps, got "
        f"{n:,}; use Epochs if the order is the same in every epoch, or a plain blt"
    )


def _explicit(X: Array, participation: SinglePass | Epochs | MinSeparation) -> Sensitivity:
    if isinstance(participation, SinglePass):
        squared = float(np.diagonal(X).max())
        return _record(squared, squared)
    if isinstance(participation, Epochs):
        upper, pattern_gram = gram.worst_epoch(
            X, epochs=participation.epochs, steps_per_epoch=participation.steps_per_epoch
        )
        return _record(upper, gram.attained(pattern_gram))
    b, k = min(participation.separation, len(X)), participation.most
    if len(X) ** 2 * k > SEARCH_WORK:
        sizes = gram.lag_sizes(X)
        return _record(gram.lag_bound(np.diagonal(X), sizes, separation=b, most=k), 0.0)
    upper, pattern, _ = gram.search(X, separation=b, most=k)
    return _record(upper, gram.attained(X[np.ix_(pattern, pattern)]))


def squared_columns(c: Array, g: Array) -> Array:
    """X_ii = g_i² Σ_{s<n−i} c_s² for every column."""
    return np.asarray(g * g * _running(c, 0)[::-1], dtype=np.float64)


def _running(c: Array, lag: int) -> Array:
    """P_L[t] = Σ_{s≤t} c_s c_{s+L}, summed in extended precision where there is any."""
    products = c[: len(c) - lag] * c[lag:]
    return np.cumsum(products, dtype=np.longdouble).astype(np.float64)


def _summed_columns(c: Array, *, separation: int, most: int) -> Array:
    """Σ_{j<k} of c shifted down by j·b, in O(n): running sums along the steps of one class."""
    n, b = len(c), separation
    blocks = np.zeros((-(-n // b), b), dtype=np.longdouble)
    blocks.ravel()[:n] = c
    total = np.cumsum(blocks, axis=0)
    if most < len(blocks):
        total[most:] -= total[:-most].copy()
    return total.ravel()[:n].astype(np.float64)


def _envelope(c: Array) -> Array:
    """e_i = max_{j≥i} |c_j|: the smallest non-increasing sequence above |c|."""
    return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def envelope_squared(c: Array, *, separation: int, most: int) -> float:
    """‖Σ_{j<k} T(e)_{:,jb}‖², an upper bound on S² without gains, in O(n).

    Guarantees. |X_ij| ≤ (T(e)ᵀT(e))_ij entry by entry, and e ≥ 0 is non-increasing, so Theorem 2 of
    arXiv 2405.13763 gives the S² of T(e), for every pattern of at most k steps that are at least b
    apart. Where c is ≥ 0 and non-increasing itself, e = c and the value is S².
    """
    summed = _summed_columns(_envelope(c), separation=separation, most=most)
    return float(np.sum(summed * summed))


def envelope_bound(c: Array, g: Array, *, separation: int, most: int) -> float:
    """An upper bound on S² for any coefficients and gains under min-separation, in O(n·k).

    Guarantees. Let j be the r-th step of a pattern. Its m-th predecessor i (m < r) is at least m·b
    before it, and P_L[t] of the envelope falls with L, so

        |X_ij| ≤ M_m[j] = g_j · max_{i ≤ j−mb} g_i · P_{mb}[n−1−j]      (P of the envelope).

    Hence Σ_{i,j∈π} |X_ij| ≤ Σ_{j∈π} (X_jj + 2 Σ_{m<r} M_m[j]), which is linear in the pattern once
    the position r is known: a dynamic program over (r, j) finds its maximum.
    """
    n, b = len(c), separation
    envelope, before = _envelope(c), np.maximum.accumulate(g)
    weight = squared_columns(c, g)
    best = np.zeros(n + b)  # best[t + b]: the most that at most r steps, all ≤ t, collect
    for r in range(1, most + 1):
        best[b:] = np.maximum.accumulate(weight + best[:n])
        if (lag := r * b) < n:
            running = _running(envelope, lag)[::-1]
            weight[lag:] += 2.0 * g[lag:] * before[: n - lag] * running
    return float(best[-1])


def toeplitz_epochs(
    c: Array, g: Array, *, epochs: int, steps_per_epoch: int
) -> tuple[float, float]:
    """(max_j Σ_{l,m} |X_{j+lb,j+mb}|, what a unit of the worst class reaches), in O(n·k).

    The entries at lag mb are laid out by their later step i; its class is i mod b, so a reshape to
    (k−m, b) and a sum over rows adds them up for all b classes at once. Lags without a common
    non-zero coefficient are skipped.
    """
    b = steps_per_epoch
    sizes = squared_columns(c, g).reshape(epochs, b).sum(axis=0)
    signed = sizes.copy()
    bands = int(np.flatnonzero(c)[-1]) + 1
    for lag in range(b, bands, b):
        entries = _at_lag(c, g, lag).reshape(-1, b)
        signed += 2.0 * entries.sum(axis=0)
        sizes += 2.0 * np.abs(entries).sum(axis=0)
    j = int(np.argmax(sizes))
    reached = float(signed[j])
    if reached < sizes[j] * (1 - ROUNDING) and epochs <= SIGN_EPOCHS:
        X = np.zeros((epochs, epochs))
        for lag in range(0, bands, b):
            m = lag // b
            entries = _at_lag(c, g, lag)[j::b]
            X[np.arange(epochs - m), np.arange(m, epochs)] = entries
            X[np.arange(m, epochs), np.arange(epochs - m)] = entries
        reached = max(reached, gram.attained(X))
    return float(sizes[j]), reached


def _at_lag(c: Array, g: Array, lag: int) -> Array:
    """X_{i−L,i} for i = L … n−1."""
    n = len(c)
    return np.asarray(g[: n - lag] * g[lag:] * _running(c, lag)[::-1], dtype=np.float64)


def lag_sizes(c: Array, g: Array, *, first: int) -> Array:
    """max_i |X_{i,i+L}| for every lag L ≥ first (zero before), one O(n) pass per lag."""
    out = np.zeros(len(c))
    bands = int(np.flatnonzero(c)[-1]) + 1
    for lag in range(first, bands):
        out[lag] = np.abs(_at_lag(c, g, lag)).max()
    return out
