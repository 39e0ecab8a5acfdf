"""Products and quotients of power series: what strategies need of linear filters.

    y_t = x_t + λ·y_{t−1}               `decaying`
    y = x(z)/c(z)                        `divided`: c_0·y_t = x_t − Σ_{i>=1} c_i·y_{t−i}
    y = a(z)·b(z)                        `convolve`

A recursion is a banded triangular system, which BLAS solves (dtbsv), as fast as SciPy's lfilter;
that one lives in scipy.signal, whose import takes longer than most questions to a plan. Functions
of one real sequence; blocks of long ones take the outputs before them along.

>>> decaying(np.array([1.0, 0.0, 1.0]), 0.5), divided(np.ones(4), np.array([1.0, -1.0]))
(array([1.  , 0.5 , 1.25]), array([1., 2., 3., 4.]))
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Most entries of a band matrix, and rows that are solved together.
_ENTRIES, _ROWS = 2**21, 4096
#: From this many on, coefficients of both factors are multiplied by Fourier transforms.
_SHORT = 64


def decaying(x: Array, decay: float) -> Array:
    """y_t = x_t + decay·y_{t−1}."""
    from scipy.linalg.blas import dtbsv

    band = np.empty((len(x), 2))
    band[:, 1] = -decay
    return np.asarray(dtbsv(1, band.T, x, lower=1, diag=1), dtype=np.float64)


def divided(x: Array, c: Array) -> Array:
    """The first len(x) coefficients of x(z)/c(z), c_0 ≠ 0.

    Exactly zero once both they and what is left of x are below 1e-100: left to decay further they
    become subnormal numbers, with which processors are very slow.
    """
    from scipy.linalg.blas import dtbsv

    n, c = len(x), np.asarray(c, dtype=np.float64)[: len(x)]
    out, order = np.zeros(n), len(c) - 1
    size = max(1, min(_ROWS, _ENTRIES // (order + 1)))
    for first in range(0, n, size):
        part = np.array(x[first : first + size], dtype=np.float64)
        past = np.zeros(order)
        if order and first:
            past[-first:] = out[max(0, first - order) : first]
            padded = np.concatenate([past, np.zeros(len(part) - 1)])
            part -= np.convolve(padded, c[1:], mode="valid")
        band = np.tile(c, len(part)).reshape(len(part), order + 1)
        part = dtbsv(order, band.T, part, lower=1)
        out[first : first + size] = part
        largest = max(np.abs(part).max(), np.abs(past).max(initial=0.0))
        if largest < 1e-100 and not np.any(x[first + size :]):
            break
    return out


def convolve(a: Array, b: Array, n: int) -> Array:
    """The first n coefficients of the product."""
    a, b = a[:n], b[:n]
    size = len(a) + len(b) - 1
    if min(len(a), len(b)) <= _SHORT:
        found = np.convolve(a, b)
    else:
        from scipy.fft import irfft, next_fast_len, rfft

        fast = next_fast_len(size, real=True)
        found = irfft(rfft(a, fast) * rfft(b, fast), fast)[:size]
    out = np.zeros(n)
    out[: min(n, size)] = found[:n]
    return out
