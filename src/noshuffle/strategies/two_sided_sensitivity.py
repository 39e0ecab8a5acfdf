"""Sensitivity of gains on both sides, C = diag(a)·T(c)·diag(g) (see `blt`), for epochs.

For k epochs of b steps in the same order a unit of class j touches the columns j + lb:

    X_{i−L,i} = g_{i−L} g_i P_L[i],     P_L[i] = Σ_s a_{i+s}² c_s c_{s+L}        (s < n − i)
    S² ≤ max_j Σ_{l,m} |X_{j+lb,j+mb}|,    with equality where one sign per epoch makes all X ≥ 0.

All P_{mb} are one product of the Hankel matrix (a_{i+s}²) with the k sequences c_s c_{s+mb}, made
for a few rows at a time: O(n²·k) multiplications, O(n·k) memory, and every number is a plain sum
of products, whose rounding has a simple bound (a Fourier transform would be quicker, but smears
the error of the largest entry over all others).

>>> c, ones = np.array([1.0, 0.5]), np.ones(2)
>>> round(largest_column(c, ones, ones), 12)
1.25
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from noshuffle.errors import Unsupported
from noshuffle.strategies import gram
from noshuffle.strategies.recipe import Array

#: Longest run, and most work n²·k, for which the products are made.
MOST_STEPS = 2**15
MOST_WORK = 10**11
#: Rows of the Hankel matrix that are worked on together.
_ROWS = 128
#: Unit roundoff of double precision.
_UNIT = 2.0**-53
#: Largest relative allowance for rounding under which a value still counts as attained.
_ATTAINED = 5e-12


def lag_products(c: Array, a: Array, *, lag: int, count: int) -> tuple[Array, Array]:
    """P_{m·lag}[i] for m < count in row m (zero for i < m·lag), and the same sums of sizes.

    Guarantees. The computed P differ from the exact sums by at most n·2⁻⁵³ (to first order) times
    the second array, whatever the order of summation.
    """
    n = len(c)
    products = np.zeros((count, n))
    for m in range(min(count, -(-n // lag))):
        products[m, : n - m * lag] = c[: n - m * lag] * c[m * lag :]
    weights = np.concatenate([a * a, np.zeros(_ROWS)])
    sums = np.zeros((count, n))
    sizes = np.zeros((count, n)) if np.any(products < 0) else sums
    for first in range(0, n, _ROWS):
        last = min(first + _ROWS, n)
        used = min(count, (last - 1) // lag + 1)  # lags that reach back from these rows
        width = n - first
        hankel = np.array(sliding_window_view(weights[first:], width)[: last - first])
        sums[:used, first:last] = products[:used, :width] @ hankel.T
        if sizes is not sums:
            sizes[:used, first:last] = np.abs(products[:used, :width]) @ hankel.T
    for m in range(1, count):
        sums[m, : m * lag] = 0.0
        sizes[m, : m * lag] = 0.0
    return sums, sizes


def _check_size(n: int, k: int) -> None:
    if n > MOST_STEPS or n * n * k > MOST_WORK:
        raise Unsupported(
            f"the sensitivity of two-sided gains is computed for at most {MOST_STEPS:,} steps and "
            f"steps² × epochs <= {MOST_WORK:.0e}, got {n:,} steps and {k} epochs; use gains on one "
            "side, or fewer, larger steps"
        )


def largest_column(c: Array, a: Array, g: Array) -> float:
    """max_i X_ii with an allowance for rounding: S² for a single participation.

    Guarantees. Not below the exact value for the c, a and g that are given.
    """
    n = len(c)
    _check_size(n, 1)
    sums, _ = lag_products(c, a, lag=n, count=1)
    return float((g * g * sums[0]).max()) * (1 + (n + 16) * _UNIT)


def class_sizes(c: Array, a: Array, g: Array, *, epochs: int) -> tuple[Array, Array]:
    """Σ_{l,m} |X_{j+lb,j+mb}| of every class j, and how much rounding may have taken from it."""
    n = len(c)
    b = n // epochs
    sums, sizes = lag_products(c, a, lag=b, count=epochs)
    total, rounding = np.zeros(b), np.zeros(b)
    for m in range(epochs):
        both = g[: n - m * b] * g[m * b :] * (2.0 if m else 1.0)
        total += (both * np.abs(sums[m, m * b :])).reshape(-1, b).sum(axis=0)
        rounding += (both * sizes[m, m * b :]).reshape(-1, b).sum(axis=0)
    # n additions and four products in every entry, at most 2k additions of entries.
    return total, rounding * ((n + 2 * epochs + 16) * _UNIT)


def worst_class(c: Array, a: Array, g: Array, *, epochs: int) -> tuple[float, bool]:
    """(upper bound on S² for epochs in the same order, whether a unit attains it).

    Guarantees. The bound holds in exact arithmetic for the c, a and g that are given. It counts as
    attained when signs are found under which the worst class reaches it, up to rounding.
    """
    n = len(c)
    _check_size(n, epochs)
    total, rounding = class_sizes(c, a, g, epochs=epochs)
    upper = total + rounding
    j = int(np.argmax(upper))
    reached = gram.attained(_gram_of(c, a, g, range(j, n, n // epochs)))
    return float(upper[j]), bool(reached >= upper[j] * (1 - _ATTAINED))


def _gram_of(c: Array, a: Array, g: Array, columns: range) -> Array:
    """X for a few columns, each written out."""
    written = np.zeros((len(columns), len(c)))
    for row, column in enumerate(columns):
        written[row, column:] = g[column] * a[column:] * c[: len(c) - column]
    return np.asarray(written @ written.T)
