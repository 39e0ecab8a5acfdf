"""The P-mass of one step in the cells of a grid of losses, and where its support ends.

Between the grid points ε_j and ε_{j+1} lies the P-mass p of a cell and the Q-mass q = Σ e^{−L} p.
Both are kept, and sent to the two ends:

    right = Σ p · (1 − e^{ε_j − L}) / (1 − e^{ε_j − ε_{j+1}})        left = p − right

("connect the dots", Doroshenko et al., 2022). Sums over a cell are Gauss–Legendre sums over
positive densities, so that the far tails keep their digits. Above a cap the cells widen. A `Joined`
or `Blend` loss puts its cells together from those of its parts; an atom is sent to the ends of the
one cell it lies in. `loss_distribution` makes bounds of them. No state.

>>> from noshuffle.accounting.mixture import remove_pair
>>> cells = cells_of(remove_pair(noise_multiplier=1.0, rate=0.1), 0.01, 1e-12)
>>> round(float((cells.left + cells.right).sum() + cells.below + cells.beyond), 10)
1.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri_exp

from noshuffle.accounting.atoms import Atoms, Blend, Loss
from noshuffle.accounting.mixture import Joined, Pair
from noshuffle.errors import InvalidInput

Array = np.ndarray

#: Smaller tails than this cannot be told from zero in a float.
SMALLEST_TAIL = 1e-300
#: A finer grid is refused: it would not fit in memory.
_MOST_CELLS = 2**24
_NARROW = np.polynomial.legendre.leggauss(3)
_WIDE = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class Cells:
    """P-mass that each cell sends to its left and right end, and what lies outside the cells.

    The first `fine` of the points are anchor + (start + j)·step.
    """

    start: int
    left: Array
    right: Array
    below: float
    beyond: float
    points: Array
    fine: int


def support(pair: Pair, tail: float) -> tuple[float, float]:
    """x-interval outside which P has at most `tail` on either side."""
    z = -float(ndtri_exp(math.log(max(tail, SMALLEST_TAIL))))
    means = [m for _, m in pair.upper]
    return min(means) - z * pair.sigma, max(means) + z * pair.sigma


def loss_range(pair: Loss, tail: float) -> tuple[float, float]:
    """The losses at the ends of what is put on the grid."""
    if isinstance(pair, Joined):
        return loss_range(pair.under, tail)[0], loss_range(pair.over, tail)[1]
    if isinstance(pair, Blend):
        found = [loss_range(part, tail) for _, part in pair.parts]
        return min(low for low, _ in found), max(high for _, high in found)
    if isinstance(pair, Atoms):
        return float(pair.losses.min()), float(pair.losses.max())
    ends = pair.loss(np.clip(support(pair, tail), *pair.within))
    return float(ends[0]), float(ends[1])


def _joined_cells(pair: Joined, step: float, tail: float, cap: float) -> Cells:
    """Cells below 0 of one part, cells above of the other, and the atom at 0 between them."""
    over, under = cells_of(pair.over, step, tail, cap), cells_of(pair.under, step, tail)
    left, right = (
        np.concatenate([below[: -under.start], above[-over.start :]])
        for below, above in ((under.left, over.left), (under.right, over.right))
    )
    atom = 1 - under.below - over.beyond - float(left.sum() + right.sum())
    left[-under.start] += max(atom, 0.0)
    points = np.append(under.points[: -under.start], over.points[-over.start :])
    fine = over.fine + over.start - under.start
    return Cells(under.start, left, right, under.below, over.beyond, points, fine)


def _blended_cells(pair: Blend, step: float, tail: float) -> Cells:
    """All parts on the grid of the first, with their weights."""
    parts = [
        (weight, cells_of(replace(part, anchor=pair.anchor), step, tail))
        for weight, part in pair.parts
    ]
    start = min(cells.start for _, cells in parts)
    size = max(cells.start + len(cells.left) for _, cells in parts) - start
    left, right = np.zeros(size), np.zeros(size)
    for weight, cells in parts:
        at = slice(cells.start - start, cells.start - start + len(cells.left))
        left[at] += weight * cells.left
        right[at] += weight * cells.right
    # raised to the first point of the part itself, which is not below the first of all
    for weight, cells in parts:
        left[cells.start - start] += weight * cells.below
    beyond = sum(weight * cells.beyond for weight, cells in parts)
    points = pair.anchor + step * (start + np.arange(size + 1))
    return Cells(start, left, right, 0.0, beyond, points, size + 1)


def _atom_cells(pair: Atoms, step: float) -> Cells:
    """Every atom sends its P and its Q to the two ends of its cell."""
    place = np.floor(pair.losses / step).astype(np.int64)
    start, size = int(place.min()), int(place.max() - place.min()) + 1
    if size > _MOST_CELLS:
        raise InvalidInput(f"grid must be at least {size * step / _MOST_CELLS:.3g}, got {step!r}")
    share = np.clip(np.expm1(place * step - pair.losses) / np.expm1(-step), 0.0, 1.0)
    left = np.bincount(place - start, pair.masses * (1 - share), size)
    right = np.bincount(place - start, pair.masses * share, size)
    points = step * (start + np.arange(size + 1))
    return Cells(start, left, right, 0.0, pair.infinity, points, size + 1)


def cells_of(pair: Loss, step: float, tail: float, cap: float = math.inf) -> Cells:
    """The cells of a pair, from the first to the last loss whose tail is above `tail`."""
    if isinstance(pair, Joined):
        return _joined_cells(pair, step, tail, cap)
    if isinstance(pair, Blend):
        return _blended_cells(pair, step, tail)
    if isinstance(pair, Atoms):
        return _atom_cells(pair, step)
    x_low, x_high = (float(x) for x in np.clip(support(pair, tail), *pair.within))
    ends = pair.loss(np.array([x_low, x_high]))
    start = math.floor((ends[0] - pair.anchor) / step)
    stop = max(start + 1, math.ceil((min(ends[1], cap) - pair.anchor) / step))
    if stop - start > _MOST_CELLS:
        raise InvalidInput(
            f"grid must be at least {(ends[1] - ends[0]) / _MOST_CELLS:.3g} here (memory), "
            f"got {step!r}"
        )
    grid = pair.anchor + step * np.arange(start, stop + 1)
    fine, last = len(grid), float(grid[-1])
    if last < ends[1]:  # cells widen above the cap
        wide = max(step, 1e-3 * last)
        count = math.ceil(math.log1p((ends[1] - last) * 1e-3 / wide) / math.log1p(1e-3))
        widths = wide * np.expm1(np.arange(1, count + 1) * math.log1p(1e-3)) * 1e3
        grid = np.append(grid, last + widths)
    edges = np.clip(pair.inverse(grid[1:-1], x_low, x_high), x_low, x_high)
    edges = np.maximum.accumulate(np.concatenate([[x_low], edges, [x_high]]))
    gaps = np.diff(grid)
    total = np.zeros(len(grid) - 1)
    right = np.zeros(len(grid) - 1)

    a, b = edges[:-1] / pair.sigma, edges[1:] / pair.sigma
    speed = (b - a) * (2 + np.maximum(np.abs(a), np.abs(b))) * (1 + 1 / pair.sigma)
    wide = speed > 0.06
    for which, (nodes, weights) in ((~wide, _NARROW), (wide, _WIDE)):
        cell = np.flatnonzero(which)
        if not len(cell):
            continue
        parts = np.maximum(1, np.ceil(speed[cell])).astype(int) if which is wide else 1
        owner = np.repeat(cell, parts)
        place = np.arange(len(owner)) - np.repeat(
            np.concatenate([[0], np.cumsum(np.broadcast_to(parts, len(cell)))[:-1]]),
            np.broadcast_to(parts, len(cell)),
        )
        size = np.repeat((edges[cell + 1] - edges[cell]) / parts, parts)
        origin = edges[owner] + place * size
        for node, weight in zip(nodes, weights):
            x = origin + size * (0.5 + 0.5 * node)
            density = pair.density(x) * size * (0.5 * weight)
            share = -np.expm1(np.minimum(grid[owner] - pair.loss(x), 0.0)) / -np.expm1(-gaps[owner])
            total += np.bincount(owner, density, len(total))
            right += np.bincount(owner, density * np.minimum(share, 1.0), len(total))
    weights_up = np.array([w for w, _ in pair.upper])
    means = np.array([m for _, m in pair.upper])
    beyond = float(weights_up @ np.exp(log_ndtr((means - x_high) / pair.sigma)))
    under = float(weights_up @ ndtr((x_low - means) / pair.sigma))
    return Cells(start, np.maximum(total - right, 0.0), right, under, beyond, grid, fine)
