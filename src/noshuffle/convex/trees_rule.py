"""TreesRule: gradient boosting with trees whose splits are random and whose leaves are private.

The first readings release histograms of the columns (64 bins each; a row lies in one bin of each).
They say which splits part the rows: a tree takes D splits (column, edge) at random, in proportion
to q(1 − q) with q the share of rows below the edge, one for each level, so that a row falls in one
of 2^D leaves. The random draws are public: they tell nothing of rows. Then one reading a tree:

    (G_l, H_l) = Σ_{i in leaf l} (r_i, h_i·S)·clip  + noise      r: residual, h: curvature
    margins += −η·G̃_l/(max(H̃_l/S, 0) + σ)                      σ: deviation of the noise

so that leaves which the noise hides stay near zero. Of numbers, what all leaves of a tree share is
a running mean over all trees, and how leaves differ counts by the share of its squares that is no
noise, over the last ten trees or so or in this tree, whichever is less (`_beside_mean`): the noise
of many trees would else add up to more than the targets vary. A row lies in one leaf.

For two classes r = p − y and h = p(1 − p), so |r|² + S²h² = p²(1 + S²(1 − p)²) ≤ 1 wherever
S² ≤ (1+p)/(p²(1−p)), whose minimum over p is at (√5 − 1)/2: ((1+√5)/2)⁵ = 11.09. S = 3.3 leaves all
rows unclipped; for more classes and for numbers (h = 1, S = 1/2) rows are clipped to norm √2.

Random splits with private leaves: Maddock, Cormode, Wang, Maple, Jha 2022 (federated boosted trees
with differential privacy); the histogram that steers them and the free curvature are ours. The
margins of the rows are kept between readings. State: histograms, splits, leaves; margins (secret).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import Phase
from noshuffle.convex.rule import Rule

BINS = 64
#: Quantiles of a column that may become edges.
_EDGES = 16
#: A split that parts fewer rows is not drawn.
_LEAST = 0.001
#: A leaf adds at most this to a margin.
_FAR = 2.0
#: What squares of sums count for one tree later.
_MEMORY = 0.9
Codes = NDArray[np.uint8]


class RandomTree(NamedTuple):
    """Column and edge of every level; a row's leaf is read from its bins."""

    columns: NDArray[np.int64]
    edges: NDArray[np.int64]
    leaves: Array

    def leaf_of(self, codes: Codes) -> NDArray[np.int64]:
        powers = 1 << np.arange(len(self.columns))[::-1]
        return np.asarray((codes[:, self.columns] > self.edges) @ powers, dtype=np.int64)


@dataclass(eq=False, kw_only=True)
class TreesRule(Rule):
    """Histograms first (`readings`), then trees. Rows come as bins (`codes_of`).

    Guarantees: a row's part of a reading has norm at most `clip_norm`. Splits depend on released
    histograms and on `seed`, which is public, alone.
    """

    loss: MarginLoss
    features: int
    outputs: int
    depth: int
    rate: float
    readings: int
    seed: int = 0

    def __post_init__(self) -> None:
        self._is_binary = self.loss.is_classifier and self.outputs == 1
        self.clip_norm = 1.0 if self._is_binary else math.sqrt(2.0)
        self._share = 3.3 if self._is_binary else 1.0 if self.loss.is_classifier else 0.5
        self.size = max(self.features * BINS, 2 * self.outputs << self.depth)
        self.histogram, self.trees = np.zeros((self.features, BINS)), list[RandomTree]()
        self._rng, self._count = np.random.default_rng(self.seed), 0
        self.learning_rate, self._margins = self.rate, np.zeros((0, self.outputs))
        # The running mean, what of it is shown, and squares: of sums, of noise, their number.
        self._mean, self._shown, self._squares = 0.0, 0.0, np.zeros(3)

    @property
    def weights(self) -> Array:
        raise NotImplementedError("trees have leaves")

    def start(self, phase: Phase) -> None:
        self._noise, self._rows = phase.plan.noise_multiplier, phase.rows

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        out = np.zeros(self.size)
        if self._count < self.readings:
            places = x.astype(np.int64) + BINS * np.arange(self.features)
            counts = np.bincount(places.ravel(), minlength=self.features * BINS)
            unit = self.clip_norm / math.sqrt(self.features) * (1 - CLIP_SLACK)
            out[: counts.size] = counts * unit
            return out
        if not len(self._margins):
            self._margins = np.zeros((len(y), self.outputs))
        columns, edges = self._drawn()
        self._tree = RandomTree(columns, edges, np.zeros((1 << self.depth, self.outputs)))
        self._leaf = self._tree.leaf_of(x)
        r = self.loss.residual(self._margins, y)
        size = np.abs(r)
        h = self._share * (size * (1.0 - size) if self.loss.is_classifier else np.ones_like(r))
        both = np.hstack([r, h])
        norms = np.sqrt(np.einsum("ij,ij->i", both, both))
        both *= clip_factor(norms, self.clip_norm, slack=CLIP_SLACK)[:, None]
        both[~np.isfinite(both).all(axis=1)] = 0.0
        sums = [np.bincount(self._leaf, column, 1 << self.depth) for column in both.T]
        out[: 2 * self.outputs << self.depth] = np.concatenate(sums)
        return out

    def update(self, mean: Array, *, step: int) -> None:
        self._count += 1
        if self._count <= self.readings:
            unit = self._rows * math.sqrt(self.features) / (self.clip_norm * self.readings)
            self.histogram += mean[: self.histogram.size].reshape(self.histogram.shape) * unit
            if self._count == self.readings:
                self._list_splits()
            return
        sums = mean[: 2 * self.outputs << self.depth].reshape(2, self.outputs, -1) * self._rows
        hidden = self._noise * self.clip_norm
        slope, rows = sums[0], np.maximum(sums[1] / self._share, 0.0)
        step_of_mean = 0.0
        if not self.loss.is_classifier:
            slope, step_of_mean = self._beside_mean(slope, rows, hidden)
        leaves = slope / (rows + hidden + 1e-9)
        self._tree.leaves[:] = np.clip(step_of_mean - self.rate * leaves, -_FAR, _FAR).T
        self.trees.append(self._tree)
        self._margins += self._tree.leaves[self._leaf]

    def _beside_mean(self, slope: Array, rows: Array, hidden: float) -> tuple[Array, float]:
        """How the sums of leaves differ, as far as it is no noise, and the next step of the mean.

        Both are kept by James and Stein's (1961) share, of a noise that is one or two deviations
        larger than on average: noise alone would else pass in every second tree. Where rows are
        many, trees differ in what they find, and one that found nothing adds nothing.
        """
        trees = len(self.trees) + 1
        off = float(slope.sum()) / self._rows
        self._mean += (self._shown - off - self._mean) / trees
        unsure = hidden * math.sqrt(slope.size / trees) / self._rows
        shown = self._mean * _share(self._mean**2, (1.0 + 2.0 * math.sqrt(2.0)) * unsure**2)
        step, self._shown = shown - self._shown, shown
        slope = slope - off * rows
        noise = hidden**2 * (1.0 + (off / self._share) ** 2)  # of rows, too
        now = np.array([np.sum(slope**2), slope.size * noise, slope.size])
        self._squares = _MEMORY * self._squares + now
        square, noise, many = self._squares.tolist()
        recent = _share(square, (1.0 + math.sqrt(2.0 / many)) * noise)
        return slope * min(recent, _share(now[0], now[1])), step

    def _list_splits(self) -> None:
        """Edges near quantiles of every column, and how likely each is drawn."""
        noise = self._noise * math.sqrt(self.features / self.readings)
        counts = np.where(self.histogram > max(2.0 * noise, 0.5), self.histogram, 0.0)
        whole = np.maximum(counts.sum(1, keepdims=True), 1e-300)
        below = np.cumsum(counts, 1) / whole
        parts = below * (1.0 - below)
        step = np.floor(below * _EDGES)
        is_edge = np.diff(step, axis=1, prepend=-1.0) > 0  # the first bin past each quantile
        is_edge |= (counts > 0) & (np.cumsum(counts > 0, 1) == 1)
        parts = np.where(is_edge & (parts > _LEAST), parts, 0.0)
        # All edges of a column together are as likely as its best one.
        parts *= parts.max(1, keepdims=True) / np.maximum(parts.sum(1, keepdims=True), 1e-300)
        if not parts.sum() > 0:
            parts[:, BINS // 2] = 1.0
        self._chances = (parts / parts.sum()).ravel()

    def _drawn(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = self._rng.choice(len(self._chances), size=self.depth, p=self._chances)
        return places // BINS, places % BINS


def _share(square: float, noise: float) -> float:
    """What of a square is no noise."""
    return max(0.0, 1.0 - noise / square) if square > 0 else 0.0


def codes_of(x: Array, low: Array, high: Array) -> Codes:
    """The bin of every number between its bounds."""
    share = (np.clip(x, low, high) - low) / (high - low)
    return np.minimum(share * BINS, BINS - 1).astype(np.uint8)
