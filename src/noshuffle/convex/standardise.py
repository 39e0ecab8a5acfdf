"""Centre and scale of columns from noisy sums of (x, x²), so that what noise hides is not blown up.

    (m, q) = mean of (x, x²)·min(1, C/‖(x, x²)‖),  C = √(0.6 p)       → centre m̂, deviation σ̂
    x' = 3(x − m̂)/(σ̂√p)                                            a row, beside its constant 1

m̂ is shrunk towards the mean of all columns by the share of its spread that is noise (Lindley), and
σ̂² = q − m̂² is floored by its noise. Rows are shorter for that than gradients are clipped for: all
columns grow by one factor, at most 4, until ϱ = 3, where ϱ² = Σ 9v/(σ̂²p) is the mean square of
‖x'‖ and v is the shrunken q − m̂² (that itself, whose noise is in σ̂², too, would be too much).
Post-processing of what was released; no state.

>>> found = scaling(np.array([0.5]), np.array([0.5]), noise=0.0, length=3.0, is_centred=True)
>>> found.centre.tolist(), found.scale.round(2).tolist()
([0.5], [6.0])
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.shrinkage import shrunk

#: Clipping of (x, x²) in units of √p.
TYPICAL = math.sqrt(0.6)
#: Rows that the floor of σ̂ made shorter than 3 are stretched by at most this.
MOST_STRETCH = 4.0
#: Variance below which a column within [−1, 1] counts as constant.
_FLOOR = 1e-4


class Scaling(NamedTuple):
    """Of columns, and the root mean square of the length of a standardised row."""

    centre: Array
    scale: Array
    row_length: float


def typical_norm(columns: int) -> float:
    """Norm of (x, x²) that rows are clipped to."""
    return TYPICAL * math.sqrt(columns)


def column_sums(x: Array, there: Array, *, clip_norm: float) -> Array:
    """Sums of (x, x²) over rows that count by `there` ≤ 1, in units in which a row adds at most
    `clip_norm`."""
    with np.errstate(over="ignore"):
        squares = x * x
        norms = np.sqrt(squared_norms(x) + squared_norms(squares))
    typical = typical_norm(x.shape[1])
    factor = clip_factor(norms, typical, slack=CLIP_SLACK) * (clip_norm / typical)
    squares[~np.isfinite(squares)] = 0.0  # of a row with factor 0
    return np.concatenate([(factor * there) @ x, (factor * there) @ squares])


def scaling(
    mean: Array, square: Array, *, noise: float, length: float, is_centred: bool
) -> Scaling:
    """From released means of x and x² with noise of this deviation."""
    columns = len(mean)
    centre = shrunk(mean, noise) if is_centred else np.zeros(columns)
    variance = np.maximum(square - centre**2, 0.0) + 2.0 * noise + _FLOOR
    scale = length / (np.sqrt(variance) * math.sqrt(columns))
    # The floor leaves rows too short for the clip norm: all columns grow by one factor.
    likely = np.maximum(shrunk(square - centre**2, noise), 0.0)
    found = math.sqrt(scale**2 @ likely)
    stretch = min(max(length / max(found, 1e-9), 1.0), MOST_STRETCH)
    return Scaling(centre, scale * stretch, found * stretch)
