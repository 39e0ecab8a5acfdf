"""A quantile by noisy questions, each of which tells the share of targets below a point.

To know a quantile q of n targets within ±1/(nμ) of them, counts of many bins are a bad question:
the noise of as many adds up below q. One question has no bins: the mean of [y < b] − τ, and its
sign says on which side of b the quantile lies, more or less surely: by Φ(z), z = answer/noise. So

    log density of q  =  log prior + Σ_i w_i·log Φ(± z_i),   + for q < b_i, − for q > b_i
    b_{i+1}           =  its median

(probabilistic bisection: Horstein 1963; Waeber, Frazier, Henderson 2013). Without noise it halves
an interval in every step, however narrow the targets are beside their bounds; noise makes it stay
where it is: answers near the quantile say nothing, whatever the density of targets is there, and
no step size is to be chosen. Questions go on while coefficients are learned, about the residuals
of that time: weights w_i = (i/k)^{k'/64} of k questions of k' in all forget early ones as
`mean_first` does, and one answer counts as |z| ≤ 2.5. The prior is uniform, nine tenths of it in
the window that was found. Post-processing of what was released; no state but the answers.

>>> asked = np.zeros((0, 2))
>>> for _ in range(12):
...     b = next_point(asked, window=(-1.0, 1.0), of=12)
...     asked = np.vstack([asked, [b, math.copysign(9.0, b - 0.3)]])
>>> round(next_point(asked, window=(-1.0, 1.0), of=12), 2)
0.3
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from noshuffle.convex.arrays import Array
from noshuffle.convex.mean_first import LONGEST

#: Readings of targets alone, before coefficients are learned.
QUESTIONS = 8
#: One answer counts as this many deviations at most.
_SUREST = 2.5
#: Mass of the prior inside the window.
_INSIDE = 0.9


def next_point(asked: Array, *, window: tuple[float, float], of: int) -> float:
    """The median of the density; `asked` has a row (b, z) for every question of `of` in all."""
    low, high = max(window[0], -1.0), min(window[1], 1.0)
    edges = np.unique(np.concatenate([[-1.0, low, high, 1.0], asked[:, 0]]))
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    inside = (middles > low) & (middles < high)
    density = np.where(inside, _INSIDE / (high - low), 0.0) + (1.0 - _INSIDE) / 2.0
    weights = (np.arange(1, len(asked) + 1) / max(len(asked), 1)) ** (of / LONGEST)
    surely = np.clip(asked[:, 1], -_SUREST, _SUREST)
    sign = np.where(middles[:, None] < asked[:, 0], 1.0, -1.0)
    told = np.log(density * widths) + (weights * log_ndtr(sign * surely)).sum(axis=1)
    mass = np.cumsum(np.exp(told - told.max()))
    mass = np.concatenate([[0.0], mass / mass[-1]])
    at = int(np.searchsorted(mass, 0.5, side="right")) - 1
    return float(edges[at] + widths[at] * (0.5 - mass[at]) / (mass[at + 1] - mass[at]))


def sureness(answer: float, deviation: float) -> float:
    """z of an answer with noise of this deviation."""
    if deviation > 0:
        return answer / deviation
    return math.copysign(_SUREST, answer) if answer else 0.0
