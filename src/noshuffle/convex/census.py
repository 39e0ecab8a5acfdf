"""Rows that are there, and those of each class, from counts with noise.

One reading may count rows, by class where classes are to be balanced: a row is one unit of one
count. Of n rows n̂_k of class k (n̂ in all) were released; then rows of class k weigh
u_k = min_j n̂_j/n̂_k ≤ 1, and means are multiplied by n/n̂ (rows that were left out) and, for balance,
by n̂/(K min_j n̂_j) but at most 4. Post-processing; no state.

>>> weight, gain = balance(np.array([30.0, 10.0]), deviation=1.0)
>>> weight.round(2).tolist(), gain
([0.33, 1.0], 2.0)
"""

from __future__ import annotations

import numpy as np

from noshuffle.convex.arrays import Array

#: Steps are multiplied by at most this.
MOST_GAIN = 4.0


def filled(counts: Array, *, rows: float, deviation: float, has_many_rows: bool) -> float:
    """Rows for each row that was counted; between 1 and 10 (1,000 where units have several)
    whatever the noise says, of which `deviation` is that of one unit."""
    least = 0.1 * rows
    if has_many_rows:  # of units with a hundred rows each, one counts
        least = min(least, max(1e-3 * rows, 4.0 * deviation))
    return rows / min(max(float(counts.sum()), least), rows)


def balance(counts: Array, *, deviation: float) -> tuple[Array, float]:
    """Weights of the classes, and what to multiply means by."""
    kept = np.maximum(counts, max(2.0 * deviation, 1.0))
    return kept.min() / kept, min(float(kept.mean() / kept.min()), MOST_GAIN)
