"""Sensitivity of two-sided gains with its gradient, for the search only.

    C = diag(a)·T(c)·diag(g),   c(x) = C_BLT(x) / S(x^b),   k epochs of b steps in the same order

    S_j² = Σ_m (2 − [m=0]) Σ_l g_{j+lb} g_{j+(l+m)b} |P_mb[j+(l+m)b]|

with the correlations P_L[i] = Σ_s a²_{i+s} c_s c_{s+L} by Fourier transforms, O(k·n·log n). The
error and the symbols are those of `blt_gains`. State kept: none; the arrays live for one
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from noshuffle.strategies.recipe import Array

#: Lags are transformed in about so many groups: the later ones are shorter.
_GROUPS = 5


def classes_squared(
    c: Array, g: Array, weights: Array, *, epochs: int, smoothing: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """S_j² for every place j of an epoch, weights = a²; pulled back to (c, g, weights).

    Smoothing replaces |x| by √(x² + smoothing²) off the diagonal.
    """
    n = len(c)
    b = n // epochs
    squared = np.zeros(b)
    together = -(-epochs // _GROUPS)
    groups = [range(m, min(m + together, epochs)) for m in range(0, epochs, together)]
    kept = []
    for lags in groups:
        # P_mb[i] is needed for i >= mb alone, so a group forgets the steps before its first lag.
        begin = lags[0] * b
        size = next_fast_len(2 * (n - begin), real=True)
        products = np.zeros((len(lags), n - begin))
        for row, m in zip(products, lags):
            row[: n - m * b] = c[: n - m * b] * c[m * b :]
        f_weights, f_products = rfft(weights[begin:], size), rfft(products, size)
        inner = irfft(f_weights * np.conj(f_products), size)[:, : n - begin]
        length = np.sqrt(inner**2 + smoothing**2)
        if begin == 0:
            length[0] = inner[0]
        for m, row in zip(lags, length):
            both = g[: n - m * b] * g[m * b :] * row[m * b - begin :]
            squared += (2.0 if m else 1.0) * both.reshape(-1, b).sum(axis=0)
        kept.append((size, f_weights, f_products, inner, length))

    def pull(bar: Array) -> tuple[Array, Array, Array]:
        c_bar, g_bar, weights_bar = np.zeros(n), np.zeros(n), np.zeros(n)
        for lags, (size, f_weights, f_products, inner, length) in zip(groups, kept):
            begin = lags[0] * b
            inner_bar = np.zeros_like(inner)
            for m, x, y, x_bar in zip(lags, inner, length, inner_bar):
                early, late, own = slice(0, n - m * b), slice(m * b, n), slice(m * b - begin, None)
                weight = np.tile((2.0 if m else 1.0) * bar, epochs - m)
                by_length = weight * y[own]
                g_bar[early] += by_length * g[late]
                g_bar[late] += by_length * g[early]
                x_bar[own] = weight * g[early] * g[late]
                if m:  # the slope of |·|
                    x_bar[own] *= np.divide(
                        x[own], y[own], out=np.zeros(n - m * b), where=y[own] > 0
                    )
            f_bar = rfft(inner_bar, size)
            weights_bar[begin:] += irfft((f_bar * f_products).sum(axis=0), size)[: n - begin]
            products_bar = irfft(f_weights * np.conj(f_bar), size)
            for m, row in zip(lags, products_bar):
                c_bar[: n - m * b] += row[: n - m * b] * c[m * b :]
                c_bar[m * b :] += row[: n - m * b] * c[: n - m * b]
        return c_bar, g_bar, weights_bar

    return squared, pull
