"""Bounds of columns found in private, by the readings of a table that come first: bounds="private".

A row adds one to one bin of every column, so a reading of p columns has norm √p, which is scaled to
the clip norm of the run; its noise is that of every other reading, and the statement covers it.

    first k readings    bins by sign and power of two, ±[2^e, 2^(e+1)), e = −16 … 31, and zero
    next k readings     64 equal bins between what the first ones found
    noise of a count    z·√(p/k)                                        z: of the plan

A bin counts as filled where its count is above what noise reaches in one of twenty tables,
√(2 ln(20·bins·p)) deviations; the range goes from the lowest filled bin to the highest. The second
histogram takes half a percent off each end where it is clear of noise (half of the rows lie in bins
above two deviations); it also answers `quantile`. A range that is wrong costs accuracy, never
privacy: everything after the noise is post-processing. Dyadic histograms: Wilson et al. 2020
("Differentially private SQL with bounded user contribution"), here with Gaussian noise.

State: the two released histograms.

>>> rule = RangeRule(None, columns=1, clip_norm=1.0, repeats=1)
>>> x = np.array([[3.0], [3.5], [-0.4]])
>>> rule.first_bins(x).ravel().tolist()                      # zero is bin 48
[66, 66, 33]
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.phases import Phase
from noshuffle.convex.rows import RowMap
from noshuffle.convex.rule import Rule
from noshuffle.errors import Unsupported, open_unit

PRIVATE = "private"
FOUND = "Bounds of columns were found in private, in readings that the guarantee covers."
_LEAST, _MOST = -16, 32
_HALF = _MOST - _LEAST
FIRST_BINS, BINS = 2 * _HALF + 1, 64
#: Share of the rows that is cut off at each end.
TAIL = 0.005


def is_private(bounds: Any) -> bool:
    return isinstance(bounds, str) and bounds == PRIVATE


class RangeRule(Rule):
    """Finds ranges, then hands everything to the rule inside, which sees rows within them.

    Guarantees: a row's part of a reading has norm at most `clip_norm`; rows of weight 0 add
    nothing. Numbers that are not finite are refused before they come here.
    """

    _STATE: ClassVar[tuple[str, ...]] = ("_first", "_second", "_count")

    def __init__(
        self,
        rule: Rule | None,
        *,
        columns: int,
        clip_norm: float,
        repeats: int,
        share: float | None = None,
        known: RowMap | None = None,
    ) -> None:
        #: Bounds that are known: then there are no readings of the first kind.
        self._known = known
        #: Where a unit has several rows: what their weights add up to at most.
        self._share = share
        self.inner, self.columns, self.clip_norm, self.repeats = rule, columns, clip_norm, repeats
        self.size = max(0 if rule is None else rule.size, columns * FIRST_BINS)
        self._first, self._second = np.zeros((columns, FIRST_BINS)), np.zeros((columns, BINS))
        self._count = 0

    @property
    def learning_rate(self) -> float:  # type: ignore[override]
        return 1.0 if self.inner is None else self.inner.learning_rate

    @property
    def weights(self) -> Array:
        assert self.inner is not None
        return self.inner.weights

    @property
    def lead(self) -> int:
        """Readings before the rule inside begins."""
        return self.repeats if self._known is not None else 2 * self.repeats

    def start(self, phase: Phase) -> None:
        self._deviation = phase.plan.noise_multiplier * math.sqrt(self.columns / self.repeats)
        self._rows = phase.rows
        if self.inner is not None:
            self.inner.start(phase)

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        out = np.zeros(self.size)
        if self._count >= self.lead:
            assert self.inner is not None
            out[: self.inner.size] = self.inner.clipped_sum(x, y, weight)
            return out
        if not isinstance(x, np.ndarray):
            raise Unsupported("bounds='private' needs dense rows; give bounds as numbers")
        is_first = self._count < self.lead - self.repeats
        bins = FIRST_BINS if is_first else BINS
        codes = (self.first_bins(x) if is_first else self._second_bins(x)) + bins * np.arange(
            self.columns
        )
        there = None
        if weight is not None:
            own = weight > 0 if self._share is None else weight / self._share
            there = np.repeat(own, self.columns)
        counts = np.bincount(codes.ravel(), there, self.columns * bins)
        out[: counts.size] = counts * (self.clip_norm / math.sqrt(self.columns) * (1 - CLIP_SLACK))
        return out

    @staticmethod
    def first_bins(x: Array) -> NDArray[np.int64]:
        """0 … 96, from −2^32 and below to 2^32 and above; 48 is zero."""
        with np.errstate(divide="ignore"):
            power = np.floor(np.log2(np.abs(x))) - _LEAST
        size = np.where(power < 0, 0, np.minimum(power, _HALF - 1) + 1)
        return (_HALF + np.sign(x) * size).astype(np.int64)

    def _second_bins(self, x: Array) -> NDArray[np.int64]:
        low, high = self._coarse
        share = (np.clip(x, low, high) - low) / (high - low)
        return np.minimum((share * BINS).astype(np.int64), BINS - 1)

    def update(self, mean: Array, *, step: int) -> None:
        self._count += 1
        if self._count > self.lead:
            assert self.inner is not None
            self.inner.update(mean[: self.inner.size], step=step)
            return
        to = self._first if self._count <= self.lead - self.repeats else self._second
        # Counts that many rows give; the divisor of the plan is the number of rows.
        unit = self._rows * math.sqrt(self.columns) / (self.clip_norm * self.repeats)
        to += mean[: to.size].reshape(to.shape) * unit

    @property
    def _coarse(self) -> tuple[Array, Array]:
        """Of each column, the edges of the first and last bin of the first kind that is filled."""
        if self._known is not None and self._known.low is not None:
            assert self._known.high is not None
            return self._known.low, self._known.high
        clear = self._deviation * math.sqrt(2 * math.log(20 * FIRST_BINS * self.columns))
        filled = self._first > max(clear, 0.5)
        filled[np.arange(self.columns), self._first.argmax(1)] = True
        places = np.arange(FIRST_BINS)
        last = np.where(filled, places, -1).max(1)
        return _edge(np.where(filled, places, FIRST_BINS).min(1), upper=False), _edge(
            last, upper=True
        )

    @property
    def bounds(self) -> Array:
        """(low, high) of every column."""
        low, high = self._coarse
        width = (high - low) / BINS
        kept = self._kept
        is_clear = kept.sum(1) > self._rows / (2 * (self._share or 1.0))
        share = np.cumsum(kept, 1) / np.maximum(kept.sum(1), 1e-300)[:, None]
        first, last = (share <= TAIL).sum(1), (share < 1 - TAIL).sum(1)
        fine = np.column_stack([low + width * first, low + width * (last + 1)])
        return np.where(is_clear[:, None], fine, np.column_stack([low, high]))

    @property
    def _kept(self) -> Array:
        """Counts of the second kind that are clear of noise."""
        return np.where(self._second > max(2 * self._deviation, 0.5), self._second, 0.0)

    def quantile(self, q: float) -> Array:
        """Of every column, linear within a bin."""
        open_unit(q=q)
        low, high = self._coarse
        kept = self._kept + 1e-300
        share = np.cumsum(kept, 1) / kept.sum(1, keepdims=True)
        at = (share < q).sum(1)
        rows = np.arange(self.columns)
        before = np.where(at > 0, share[rows, np.maximum(at - 1, 0)], 0.0)
        inside = (q - before) / np.maximum(share[rows, at] - before, 1e-300)
        return np.asarray(low + (high - low) * (at + np.clip(inside, 0.0, 1.0)) / BINS)

    def row_map(self, feature_bound: float | None) -> RowMap:
        return RowMap.of(self.bounds, feature_bound=feature_bound, features=self.columns)

    def state(self) -> dict[str, Any]:
        inner = {} if self.inner is None else {"inner": self.inner.state()}
        return {**super().state(), **inner}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.inner is not None:
            self.inner.load(state["inner"])


def _edge(place: NDArray[np.int64], *, upper: bool) -> Array:
    """An edge of bins of the first kind; zero's are ±2^−16."""
    away = place - _HALF
    size = np.abs(away) - 1 + (away > 0 if upper else away < 0)  # the end further up or down
    found = np.sign(away) * np.exp2(_LEAST + size.astype(np.float64))
    tiny = 2.0**_LEAST
    return np.asarray(np.where(away == 0, tiny if upper else -tiny, found))
