"""Units of a regression: coordinates of the descent in which targets and curvature are of order 1.

Targets lie around m, most of them within m ± u/2 (`target_window`, `mean_first`). The descent has
margins s' and slopes r' of its own, beside those of the loss φ,

    s = s₀ + c·s',     r' = κ·φ'(s, y),        predictions s:    s₀ = m,      c = u
                                               predictions e^s:  s₀ = log m,  c = u/m

so that s' is ±½ for most of the targets, and κ = 1/(c·φ''(s₀)) makes the curvature along the
intercept κ·c·φ'' = 1 there: 1/u for squares and Poisson's loss, m/u for gamma's. One schedule,
made for squares in [−1, 1], then does for all. Slopes that are bounded by L have κ ≥ ¼/L, so that
rows as long as 4 fill the clip norm 1: noise would hide a narrow Huber loss. Those of quantiles,
which have kinks, fill any clip norm C by κ = ¼C/L (clipping the slopes of one side alone would be
another quantile), and have steps of 4/C times their length. What r' descends on is (κ/c)·φ, so that
a ridge along coefficients of the data is κ·c times as strong along those of s'.

Noise for targets that are much larger than their mean would hide all others: in models of log y
u ≤ 3m, times √(R/100) where R says that noise is small (`target_window`). But where the mean is one
of few large targets (rare events: at 5m and more lies a bin of a percent of the rows), u is three
times as large as these, or their slopes, all that there is to see, would be clipped. No state.

>>> from noshuffle.convex.losses import poisson
>>> coordinates(PerMargin(poisson()), middle=0.5, unit=0.1, is_log=True, clip_norm=1.0).steep
10.0
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.margins import MarginLoss, PerMargin
from noshuffle.convex.target_window import NOISY

#: Slopes are at least as steep as this, at their largest: times 4, the norm of few rows.
LEAST_SLOPE = 0.25
#: The unit of a model of log y, in means or rare events; means from which on targets are that.
_MEANS, _RARE = 3.0, 5.0
#: One step multiplies or divides the mean of a model of log y by at most this.
_MOST_GROWTH = 4.0


class Coordinates(NamedTuple):
    """s₀, c and κ of the docstring."""

    origin: float
    stretch: float
    steep: float


def coordinates(
    loss: MarginLoss, *, middle: float, unit: float, is_log: bool, clip_norm: float
) -> Coordinates:
    """Of targets around `middle` (positive where `is_log`), as far apart as `unit`."""
    origin, stretch = (math.log(middle), unit / middle) if is_log else (middle, unit)
    bend = bend_at(loss, origin, is_log=is_log)
    most = loss.lipschitz(1)
    steep = clip_norm * LEAST_SLOPE / most
    if bend > 0:
        steep = max(1.0 / (stretch * bend), LEAST_SLOPE / most)
    return Coordinates(origin, stretch, steep)


def bend_at(loss: MarginLoss, margin: float, *, is_log: bool) -> float:
    """φ'' where the target is what is predicted; 0 for kinks."""
    assert isinstance(loss, PerMargin)
    s = np.array([margin])
    return float(loss.phi.curvature_fn(s, np.exp(s) if is_log else s)[0])


def unit_of_log(unit: float, *, mean: float, highest: float, worth: float) -> float:
    """Of targets with this mean, the `highest` that a percent of them has, and R = `worth`."""
    rare = _MEANS * highest if highest > _RARE * mean else 0.0
    most = max(_MEANS * mean, rare) * math.sqrt(max(1.0, worth / NOISY))
    return min(max(unit, rare), most, 0.5)


def moved_log(down: float) -> float:
    """How far a logarithm goes down when its number does by this share of it, within limits."""
    return -math.log(min(max(1.0 - down, 1.0 / _MOST_GROWTH), _MOST_GROWTH))


def mean_slopes(y: Array, at: float, *, level: float | None) -> Array:
    """Slopes within [−1, 1] whose mean is zero where `at` is the mean of y, or its quantile."""
    if level is None:
        return np.asarray(np.clip(at - y, -1.0, 1.0))
    return np.asarray(((y < at) - level) / max(level, 1.0 - level))
