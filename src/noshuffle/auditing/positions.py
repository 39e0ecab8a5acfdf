"""ε of secret, uniform positions, by Monte Carlo of the likelihood ratio.

A unit is at one of several positions, whose shifts of the whitened rows have inner products K:

    dP/dQ = (1/b) Σ_j e^{X_j − K_jj/2},       X ~ N(0, K) in Q,       X ~ N(K_j, K) at position j

Positions that are drawn anew in every epoch, with shifts that share no rows, multiply. Samples come
from positions whose shift is made larger (from Q: less likely) by one factor in all epochs, the
best of some by a short run. No state.

>>> found = epsilon_of_positions([np.array([[1.0]])], delta=1e-5, numbers=10**5)
>>> found.low < 4.3772 < found.high < 4.5
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from noshuffle.auditing.emitted import Array
from noshuffle.auditing.likelihood import (
    NUMBERS,
    EpsilonRange,
    Samples,
    count_of,
    error,
    interval,
    samples,
    widest,
)

_SCALES = (1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
#: Samples by which one of them is chosen.
_SHORT = 4000
#: losses and logarithms of weights of one epoch, from K, its root, the factor and a generator
Law = Callable[[Array, Array, float, int], tuple[Array, Array]]


def epsilon_of_positions(
    epochs: Sequence[Array], *, delta: float, numbers: int = NUMBERS
) -> EpsilonRange:
    """ε of one secret position in each of these independent epochs; K of every one is given."""
    each = sum(len(K) for K in epochs)
    roots: dict[bytes, Array] = {}
    known = [(K, roots.setdefault(K.tobytes(), _root(K))) for K in epochs]
    found = []
    for law in (_remove, _add):
        short = min(_SHORT, count_of(numbers, each))
        errors = [error(_drawn(law, known, scale, short), delta) for scale in _SCALES]
        scale = _SCALES[int(np.argmin(errors))]
        found.append(interval(_drawn(law, known, scale, count_of(numbers, each)), delta))
    return widest(found)


def _drawn(law: Law, known: Sequence[tuple[Array, Array]], scale: float, count: int) -> Samples:
    parts = [law(K, root, scale, count) for K, root in known]
    return samples(sum(part[0] for part in parts), sum(part[1] for part in parts))  # type: ignore[arg-type]


def _remove(K: Array, root: Array, scale: float, count: int) -> tuple[Array, Array]:
    """From the world with the unit: a position, whose shift is made larger by `scale`."""
    rng = np.random.default_rng()
    X = rng.standard_normal((count, len(K))) @ root + scale * K[rng.integers(len(K), size=count)]
    log_ratio = _log_mean(X - np.diag(K) / 2)
    return log_ratio, log_ratio - _log_mean(scale * X - scale**2 * np.diag(K) / 2)


def _add(K: Array, root: Array, scale: float, count: int) -> tuple[Array, Array]:
    """From the world without it: all positions are made less likely."""
    mean = K.mean(axis=0)
    X = np.random.default_rng().standard_normal((count, len(K))) @ root - scale * mean
    return -_log_mean(X - np.diag(K) / 2), scale * X.mean(axis=1) + scale**2 * mean.mean() / 2


def _root(K: Array) -> Array:
    """Symmetric square root."""
    values, vectors = np.linalg.eigh(K)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T)


def _log_mean(X: Array) -> Array:
    top = X.max(axis=1)
    return np.asarray(top + np.log(np.exp(X - top[:, None]).mean(axis=1)))
