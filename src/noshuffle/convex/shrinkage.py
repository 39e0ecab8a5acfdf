"""Released numbers drawn back by the share of their spread that is noise.

    towards zero         θ·max(0, 1 − pσ²/‖θ‖²)                                  James, Stein 1961
    towards their mean   m̄ + (m − m̄)·max(0, 1 − pσ²/‖m − m̄‖²)                         Lindley 1962

for p numbers with noise of deviation σ each. Post-processing, no state.

>>> shrunk(np.array([1.0, 3.0]), 0.5).tolist(), shrunk(np.array([1.0, 3.0]), 5.0).tolist()
([1.25, 2.75], [2.0, 2.0])
"""

from __future__ import annotations

import numpy as np

from noshuffle.convex.arrays import Array


def kept_share(values: Array, deviation: float) -> float:
    """What is left of numbers with noise of this deviation."""
    square = float(np.sum(values**2))
    return max(0.0, 1.0 - values.size * deviation**2 / square) if square > 0 else 0.0


def shrunk(values: Array, deviation: float) -> Array:
    """Numbers with noise, drawn towards their mean."""
    apart = values - values.mean()
    return np.asarray(values.mean() + kept_share(apart, deviation) * apart)
