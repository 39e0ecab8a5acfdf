"""Sizes of the inner products X = CᵀC of a Toeplitz encoder C = T(c)·diag(g), without the matrix.

    X_{i,i+L} = g_i g_{i+L} P_L[n−1−i−L],      P_L[t] = Σ_{s≤t} c_s c_{s+L}

Every function here bounds or gives Σ_{i,j∈π} |X_ij| over patterns π in O(n) memory; `sensitivity`
says which one serves which participation.

>>> squared_columns(np.array([1.0, 0.5]), np.ones(2)).tolist()
[1.25, 1.0]
"""

from __future__ import annotations

import numpy as np

from noshuffle.strategies import gram
from noshuffle.strategies.base import padded
from noshuffle.strategies.gram import ROUNDING
from noshuffle.strategies.recipe import Array

#: Most epochs for which signs are looked for that would attain a bound from |X|.
SIGN_EPOCHS = 256


def squared_columns(c: Array, g: Array) -> Array:
    """X_ii = g_i² Σ_{s<n−i} c_s² for every column."""
    return np.asarray(g * g * _running(c, 0)[::-1], dtype=np.float64)


def _running(c: Array, lag: int) -> Array:
    """P_L[t] = Σ_{s≤t} c_s c_{s+L}, summed in extended precision where there is any."""
    products = c[: len(c) - lag] * c[lag:]
    return np.cumsum(products, dtype=np.longdouble).astype(np.float64)


def summed_columns(c: Array, *, separation: int, most: int) -> Array:
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
    summed = summed_columns(_envelope(c), separation=separation, most=most)
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


def class_sums(c: Array, g: Array, *, steps_per_epoch: int) -> tuple[Array, Array]:
    """Σ_{l,m} |X_{j+lb,j+mb}| and the same with signs, for every class j < b.

    The entries at lag mb are laid out by their later step i; its class is i mod b, so a reshape to
    b columns and a sum over rows adds them up for all classes at once. The last epoch need not be
    complete. Lags without a common non-zero coefficient are skipped.
    """
    b = steps_per_epoch

    def by_class(entries: Array) -> Array:
        return padded(entries, -(-len(entries) // b) * b).reshape(-1, b)

    sizes = by_class(squared_columns(c, g)).sum(axis=0)
    signed = sizes.copy()
    for lag in range(b, int(np.flatnonzero(c)[-1]) + 1, b):
        entries = by_class(_at_lag(c, g, lag))
        signed += 2.0 * entries.sum(axis=0)
        sizes += 2.0 * np.abs(entries).sum(axis=0)
    return sizes, signed


def toeplitz_epochs(c: Array, g: Array, *, steps_per_epoch: int) -> tuple[float, float]:
    """(max_j Σ_{l,m} |X_{j+lb,j+mb}|, what a unit of the worst class reaches), in O(n·k)."""
    b, epochs = steps_per_epoch, -(-len(c) // steps_per_epoch)
    sizes, signed = class_sums(c, g, steps_per_epoch=b)
    bands = int(np.flatnonzero(c)[-1]) + 1
    j = int(np.argmax(sizes))
    reached = float(signed[j])
    if reached < sizes[j] * (1 - ROUNDING) and epochs <= SIGN_EPOCHS:
        members = len(range(j, len(c), b))
        X = np.zeros((members, members))
        for m, lag in enumerate(range(0, min(bands, len(c) - j), b)):
            entries = _at_lag(c, g, lag)[j::b]
            X[np.arange(members - m), np.arange(m, members)] = entries
            X[np.arange(m, members), np.arange(members - m)] = entries
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
