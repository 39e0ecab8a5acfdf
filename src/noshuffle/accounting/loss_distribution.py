"""The privacy loss of one Gaussian step, put on a grid from above or from below.

A step is a dominating pair of Gaussian mixtures with one σ (a `Pair`): what is seen with the unit
(the upper mixture P) and without it (the lower mixture Q). The loss L(x) = log P(x)/Q(x) grows
with x. The curve H(γ) = Σ (P − γQ)₊ at γ = e^ε is convex, and a grid distribution with losses
ε_j = anchor + jh is a piecewise linear curve with its kinks at γ_j:

    above   the chords of H. In every cell the masses of P and of Q are kept and moved to its
            two ends (`loss_cells`). What lies beyond the last grid point is an atom at infinity.
    below   H lowered at the grid points by at least the largest distance between chord and H in
            the two cells beside, then the greatest convex minorant. The tails are dropped.

Above a `cap` the grid may widen (a thousandth of the loss a cell): those atoms are `jumps`, which
`rare_losses` adds up apart.

A curve above (below) H gives, composed, a curve above (below) the composed one. No state.

>>> from noshuffle.accounting.mixture import remove_pair
>>> g = above(remove_pair(noise_multiplier=1.0, rate=0.1), step=0.01, tail=1e-12)
>>> round(float(g.mass.sum() + g.infinity), 10)
1.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from noshuffle.accounting.atoms import Loss
from noshuffle.accounting.loss_cells import cells_of

Array = np.ndarray


@dataclass(frozen=True)
class GridLoss:
    """Atoms `mass[j]` at losses anchor + (start + j)·step, and one at infinity."""

    anchor: float
    step: float
    start: int
    mass: Array
    infinity: float
    #: Losses and masses above the cap, where one was given.
    jumps: tuple[Array, Array] = (np.zeros(0), np.zeros(0))

    @property
    def losses(self) -> Array:
        return self.anchor + self.step * (self.start + np.arange(len(self.mass)))

    def log_moment(self, t: float) -> float:
        """log Σ mass · e^{t·loss} over the finite atoms."""
        exponent = t * self.losses
        is_there = self.mass > 0
        exponent = exponent[is_there]
        top = float(exponent.max())
        return top + math.log(float(self.mass[is_there] @ np.exp(exponent - top)))


def above(pair: Loss, *, step: float, tail: float, cap: float = math.inf) -> GridLoss:
    """A grid distribution that dominates the pair; P-mass up to `tail` goes to infinity.

    Guarantees: δ(ε) of the result, and of any composition of it, is not below the truth but for
    rounding of the masses (1e-13 relative).
    """
    cells = cells_of(pair, step, tail, cap)
    mass = np.zeros(len(cells.left) + 1)
    mass[:-1] += cells.left
    mass[1:] += cells.right
    mass[0] += cells.below  # raised to the first grid point
    n = cells.fine
    jumps = (cells.points[n:], mass[n:])
    return GridLoss(pair.anchor, step, cells.start, mass[:n], cells.beyond, jumps)


def below(pair: Loss, *, step: float, tail: float) -> GridLoss:
    """A grid distribution that the pair dominates; its masses may sum to less than one.

    Why: with `q` the Q-mass of a cell and f the mean place of it between the ends (0 to 1), the
    chord lies at most q f (1 − f)(γ_{j+1} − γ_j) above H, by Jensen's inequality for the hat
    kernel. At the two ends of the support the lowered curve follows the first and last line of H
    itself until the room between them is wide enough.

    Guarantees: δ(ε) of the result, and of any composition of it, is not above the truth but for
    rounding. A grid too coarse to say anything gives the pair of two equal distributions.
    """
    cells = cells_of(pair, step, tail)
    n, losses = len(cells.left), cells.points
    if losses[-1] > 600:  # e^loss would overflow: drop what lies above, which only lowers δ
        n = max(1, int(np.searchsorted(losses, 600.0)) - 1)
        losses = losses[: n + 1]
    gamma = np.exp(losses)
    width = gamma[:-1] * np.expm1(np.diff(losses))
    left, right = cells.left[:n] / gamma[:-1], cells.right[:n] / gamma[1:]
    q = np.zeros(n + 1)
    q[:-1] += left
    q[1:] += right
    both = left + right
    gap = np.divide(left * right, both, out=np.zeros(n), where=both > 0) * width
    need = np.zeros(n + 1)
    need[:-1] = gap
    need[1:] = np.maximum(need[1:], gap)

    # Distance of H from its first line, and from its last line (zero).
    room_left = np.concatenate([[0.0], np.cumsum(np.cumsum(q)[:-1] * width)])
    after = np.cumsum(q[::-1])[::-1]
    room_right = np.concatenate([np.cumsum((after[1:] * width)[::-1])[::-1], [0.0]])
    tight = np.flatnonzero(room_left < need)
    first = int(tight[-1]) + 1 if len(tight) else 0
    tight = np.flatnonzero(room_right < need)
    last = int(tight[0]) - 1 if len(tight) else n
    is_coarse = first > last or room_right[last] > room_left[last]
    if is_coarse or room_left[first] > room_right[first]:
        return GridLoss(0.0, step, 0, np.ones(1), 0.0)
    drop = need.copy()
    drop[: first + 1] = room_left[: first + 1]
    drop[last:] = room_right[last:]
    slopes = -after[1:] - np.diff(drop) / width
    convex = isotonic_regression(slopes, weights=width).x
    inner = np.maximum(np.diff(convex), 0.0)
    ends = max(0.0, convex[0] + after[0]), max(0.0, -convex[-1])
    mass = np.concatenate([[ends[0]], inner, [ends[1]]]) * gamma
    return GridLoss(pair.anchor, step, cells.start, mass, 0.0)
