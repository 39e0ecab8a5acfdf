"""Calibration in the large: the intercept of a model of log y grows until ŷ is y on average.

    Δb = log(mean of y / mean of ŷ),      ŷ = e^s,      from noisy sums of (y − ŷ, ŷ/2)

Clipping cuts the slopes of rows with y > ŷ, and the others are bounded: ŷ is too small if anything,
so the intercept only grows. No state.
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.shrinkage import kept_share

#: Predictions are multiplied by at most this.
MOST_SHIFT = 8.0
#: Deviations that a difference of means is above where it counts.
CLEAR = 2.5
#: Largest norm of (y − ŷ, ŷ/2) for y and ŷ in [0, 1].
LARGEST = math.sqrt(1.25)


def calibration_sum(y: Targets, margins: Array, weight: Array | None) -> Array:
    """Σ w·(y − ŷ, ŷ/2) for weights w ≤ 1; y and ŷ are clamped to [0, 1], a margin that is no number
    counts as ŷ = 0."""
    told = np.where(np.isnan(margins), 0.0, np.exp(np.minimum(margins, 0.0)))
    there = np.ones(len(y)) if weight is None else weight
    return np.array([there @ (np.clip(y, 0.0, 1.0) - told), there @ told / 2.0])


def growth(mean: Array, *, intercept: float, deviation: float) -> float:
    """Δb from the released mean of (y − ŷ, ŷ/2) with noise of this deviation.

    Rows are centred, so that by Jensen's inequality the mean of ŷ is not below e^b.
    """
    told = max(2.0 * float(mean[1]), math.exp(max(min(intercept, 0.0), -700.0)))  # not 0
    seen = kept_share(mean[:1], CLEAR * deviation)
    ratio = 1.0 + seen * max(float(mean[0]), 0.0) / told
    return math.log(min(ratio, MOST_SHIFT))
