"""The window that targets of a regression lie in, where it is much smaller than their bounds.

Noise is for the bounds: where targets fill a tenth of them, or a few are outliers that the bounds
were chosen for, even the mean of the others is hidden. So the first readings of "gd" count targets,
scaled to [−1, 1], in 64 equal bins (a row adds one to one bin: norm 1, times the clip norm), and
the shortest run of w = 2, 4, 8 or 16 bins that holds enough of the n rows,

    count ≥ 0.95·n − 2ς√w   (all but a few, as far as noise lets say)
    count ≥ 0.60·n + 2ς√w   (most of them, for sure),       ς = z/√readings: noise of a bin

(with 2ς√w ≤ 0.4·n: no more than there are) becomes the inner half of the new unit:
y' = (y − centre)/unit, unit = (w/32)·max(1, R/100), unless that is above ¾. R = nμ/√(p + 1)
(`schedule`): where R is large, noise is no reason to look away from large targets, whose gradients
are clipped sooner in a smaller unit. Targets that fill their bounds have no such window. Of models
of log y few targets may be most of the mean (counts that are nearly all zero): their window reaches
up to the last bin that is clear of noise, by 3.5ς, and has a percent of the rows.

Where noise would hide every such window, one question is asked instead, once the mean m̂ (or the
quantile) of the targets is known: the share of them that are farther from it than a quarter. It is
one number, not 64 that add up. The unit is halved where that share q̂ with its noise ς says that

    q̂ ≤ 0.05 + 2ς   and   q̂ ≤ 0.40 − 2ς

as above, and m̂ becomes the centre. Post-processing of what was released; no state.

>>> counts = np.zeros(64); counts[40:44] = 250.0
>>> window(counts, rows=1000, deviation=5.0, worth=50.0)
(0.3125, 0.125)
>>> window(np.full(64, 1000 / 64), rows=1000, deviation=5.0, worth=50.0)
(0.0, 1.0)
>>> is_narrow(0.1, deviation=0.05), is_narrow(0.3, deviation=0.05)
(True, False)
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
#: Deviations above which a bin is surely not empty; share of the rows that are few.
CLEAR, FEW = 3.5, 0.01
#: Half of the window that halves the unit.
QUARTER = 0.25


def bins_of(y: Targets) -> NDArray[np.int64]:
    """Which of the bins of [−1, 1] a target lies in."""
    return np.asarray(np.clip((y + 1.0) * (BINS / 2), 0, BINS - 1), dtype=np.int64)


def can_be_seen(*, rows: float, deviation: float) -> bool:
    """Whether the shortest window could ever be sure, all rows being in it."""
    return rows * (1.0 - MOST) > 2.0 * SURE * deviation * math.sqrt(LENGTHS[0])


def highest(counts: Array, *, rows: float, deviation: float) -> int:
    """The last bin that surely holds targets, and not only a few of them; 0 where none does."""
    clear = np.flatnonzero(counts > max(CLEAR * deviation, FEW * rows))
    return int(clear[-1]) if len(clear) else 0


def window(
    counts: Array, *, rows: float, deviation: float, worth: float, least: int = 0
) -> tuple[float, float]:
    """Centre and unit of targets within [−1, 1], from counts with noise; (0, 1) where none is.

    Windows end at the bin `least` or above.
    """
    total = np.concatenate([[0.0], np.cumsum(counts)])
    for length in LENGTHS:
        unit = length / (BINS / 2) * max(1.0, worth / NOISY)
        slack = SURE * deviation * math.sqrt(length)
        if unit > LARGEST or slack > (1.0 - MOST) * rows:  # longer ones have more of both
            break
        held = total[length:] - total[:-length]
        held[: max(least + 1 - length, 0)] = -np.inf
        first = int(held.argmax())
        if held[first] >= max(NEARLY_ALL * rows - slack, MOST * rows + slack):
            return (first + length / 2) / (BINS / 2) - 1.0, unit
    return 0.0, 1.0


def far_slopes(y: Array, at: float) -> Array:
    """1 for targets within [−1, 1] that are farther than a quarter from a number, −1 for others."""
    return np.where(np.abs(y - at) > QUARTER, 1.0, -1.0)


def is_narrow(far: float, *, deviation: float) -> bool:
    """Whether the unit is halved: by a share of targets that are far, with noise."""
    return far <= min(1.0 - NEARLY_ALL + SURE * deviation, 1.0 - MOST - SURE * deviation)
