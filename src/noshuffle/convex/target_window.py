"""The window that targets of a regression lie in, where it is much smaller than their bounds.

Noise is for the bounds: where targets fill a tenth of them, or a few are outliers that the bounds
were chosen for, even the mean of the others is hidden. So the first readings of "gd" count targets
in 64 equal bins (a row adds one to one bin: norm 1, times the clip norm), and the shortest run of
w = 2, 4, 8 or 16 bins that holds enough of the n rows,

    count ≥ 0.95·n − 2ς√w   (all but a few, as far as noise lets say)
    count ≥ 0.60·n + 2ς√w   (most of them, for sure),       ς = z/√readings: noise of a bin

(with 2ς√w ≤ 0.4·n: no more than there are) becomes the inner half of the new unit:
y' = (y − centre)/unit, unit = (w/32)·max(1, R/100), unless that is above ¾. R = nμ/√(p + 1)
(`schedule`): where R is large, noise is no reason to look away from large targets, whose gradients
are clipped sooner in a smaller unit. Targets that fill their bounds have
no such window.

The same counts tell where a quantile regression starts: at the bin for which the noisy pinball risk
Σ_j count_j·ρ_τ(y_j − b) is least (which averages the noise of the sums below b), and within it by
interpolation. Post-processing of what was released; no state.

>>> counts = np.zeros(64); counts[40:44] = 250.0
>>> window(counts, rows=1000, deviation=5.0, worth=50.0)
(0.3125, 0.125)
>>> window(np.full(64, 1000 / 64), rows=1000, deviation=5.0, worth=50.0)
(0.0, 1.0)
>>> quantile(counts, rows=1000, level=0.5)
0.3125
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from noshuffle.convex.arrays import Array, Targets

BINS = 64
#: Runs of bins that are tried.
LENGTHS = (2, 4, 8, 16)
#: Share of the rows that a window holds as far as noise lets say, and for sure; deviations of that.
NEARLY_ALL, MOST, SURE = 0.95, 0.6, 2.0
#: R up to which a unit is as small as the window; the largest unit worth changing to.
NOISY, LARGEST = 100.0, 0.75


def bins_of(y: Targets) -> NDArray[np.int64]:
    """Which of the bins of [−1, 1] a target lies in."""
    return np.asarray(np.clip((y + 1.0) * (BINS / 2), 0, BINS - 1), dtype=np.int64)


def can_be_seen(*, rows: float, deviation: float) -> bool:
    """Whether the shortest window could ever be sure, all rows being in it."""
    return rows * (1.0 - MOST) > 2.0 * SURE * deviation * math.sqrt(LENGTHS[0])


def window(counts: Array, *, rows: float, deviation: float, worth: float) -> tuple[float, float]:
    """Centre and unit of targets within [−1, 1], from counts with noise; (0, 1) where none is."""
    total = np.concatenate([[0.0], np.cumsum(counts)])
    for length in LENGTHS:
        unit = length / (BINS / 2) * max(1.0, worth / NOISY)
        slack = SURE * deviation * math.sqrt(length)
        if unit > LARGEST or slack > (1.0 - MOST) * rows:  # longer ones have more of both
            break
        held = total[length:] - total[:-length]
        first = int(held.argmax())
        if held[first] >= max(NEARLY_ALL * rows - slack, MOST * rows + slack):
            return (first + length / 2) / (BINS / 2) - 1.0, unit
    return 0.0, 1.0


def quantile(counts: Array, *, rows: float, level: float) -> float:
    """Of targets within [−1, 1], from counts of so many rows with noise."""
    edges = np.linspace(-1.0, 1.0, BINS + 1)
    below = np.concatenate([[0.0], np.cumsum(counts)])
    # The slope of the risk between two edges is what lies below less its share: its sums are risks.
    slope = (below[1:] + below[:-1]) / 2 - level * rows
    risk = np.concatenate([[0.0], np.cumsum(slope)])
    best = int(risk.argmin())  # an edge; the crossing lies in one of the two bins beside it
    first = min(max(best - int(below[best] >= level * rows), 0), BINS - 1)
    inside = (level * rows - below[first]) / max(float(counts[first]), 1e-9)
    return float(edges[first] + min(max(inside, 0.0), 1.0) * (edges[1] - edges[0]))
