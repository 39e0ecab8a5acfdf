"""How much the shifts of secret positions overlap: K_ij = ⟨m_i, m_j⟩, m_j = Σ_l |C|_{:, j + lb}.

A unit at position j of every epoch moves the noise by m_j at most, row by row, whatever it sends
(`accounting.bins` says why absolute values of the encoder are enough). Found for the first `steps`
rows; for plain Toeplitz encoders every m_j is the first one, moved by j.

>>> from noshuffle.participation import BallsInBins
>>> from noshuffle.strategies.identity import identity
>>> found = overlaps(identity(), BallsInBins(epochs=3, steps_per_epoch=4), 12)
>>> [(m, a, round(d, 6)) for m, a, d in found]
[(1, 0.0, 3.0), (2, 0.0, 3.0), (4, 0.0, 3.0)]
"""

from __future__ import annotations

import numpy as np

from noshuffle.errors import Unsupported
from noshuffle.participation import BallsInBins
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.dense import Dense
from noshuffle.strategies.recipe import Array

#: Most entries of the shifts, and of an encoder that has no Toeplitz form.
MOST_ENTRIES = 2**26


def shifts(strategy: Strategy, part: BallsInBins, steps: int) -> Array:
    """m_j as columns, for the first `steps` rows of the noise."""
    b = part.steps_per_epoch
    if not isinstance(strategy, ToeplitzStrategy | Dense):
        raise Unsupported(
            "secret positions are accounted for built-in strategies with a square encoder, got "
            f"{strategy.name!r}; use blt or banded"
        )
    is_plain = isinstance(strategy, ToeplitzStrategy) and not strategy.has_gains
    if steps * (b if is_plain else steps) > MOST_ENTRIES:
        raise Unsupported(
            f"secret positions of {strategy.name!r} are accounted for fewer steps than {steps:,} "
            f"(with {b:,} an epoch); use larger batches, or Epochs"
        )
    out = np.zeros((steps, b))
    if is_plain:
        assert isinstance(strategy, ToeplitzStrategy)
        first, c = np.zeros(steps), np.abs(strategy.coefficients(steps))
        for start in range(0, steps, b):
            first[start:] += c[: steps - start]
        for j in range(min(b, steps)):
            out[j:, j] = first[: steps - j]
        return out
    C = np.abs(np.tril(strategy.encoder(steps)))
    for start in range(0, steps, b):
        block = C[:, start : start + b]
        out[:, : block.shape[1]] += block
    return out


def overlaps(
    strategy: Strategy, part: BallsInBins, steps: int
) -> tuple[tuple[int, float, float], ...]:
    """`accounting.bins.Overlaps.classes`: positions with equal remainders, for every divisor."""
    b, m = part.steps_per_epoch, shifts(strategy, part, steps)
    K = m.T @ m
    top = float(K.diagonal().max()) * (1 + 1e-12)
    gap = np.abs(np.subtract.outer(np.arange(b), np.arange(b)))
    classes = [(1, 0.0, top)]
    for w in (w for w in range(b // 2, 0, -1) if b % w == 0):
        common = max(0.0, float(K[(gap % w == 0) & (gap > 0)].max())) * (1 + 1e-12)
        classes.append((b // w, min(common, top), top - min(common, top)))
    return tuple(classes)
