"""RowMap: rows brought inside public bounds. Nothing here looks at a statistic of the data.

    1. every column is clamped to its given [low, high]
    2. and scaled: x / max(|low|, |high|) where zero lies within the bounds (zero stays zero, so
       sparse rows stay sparse), else (x − low) / (high − low)
    3. with a feature bound R every row is shortened to norm at most R:  x ← x·min(1, R/‖x‖)

Guarantees: the result of a row is a function of that row and of the given numbers alone, so the
map can be applied before any mechanism without touching its guarantee. Input must be finite.

>>> import numpy as np
>>> made = RowMap.of([(0, 10), (20, 30)], feature_bound=None, features=2)
>>> made.apply(np.array([[5.0, 26.0], [99.0, 20.0]]))
array([[0.5, 0.6],
       [1. , 0. ]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import Array, check_ranges
from noshuffle.errors import InvalidInput, Unsupported, positive


@dataclass(frozen=True, eq=False)
class RowMap:
    """Clamp, shift, scale, shorten; `low` is None where no bounds were given."""

    low: Array | None
    high: Array | None
    shift: Array
    scale: Array
    feature_bound: float | None

    @classmethod
    def of(
        cls,
        bounds: Any,
        *,
        feature_bound: float | None,
        features: int,
        names: Sequence[str] | None = None,
    ) -> RowMap:
        """From one (low, high) pair for all columns, a pair for each, {column: pair}, or None.

        Columns of a mapping are names where the table has some, else numbers from 0; None stands
        for all that are not named.
        """
        if feature_bound is not None:
            positive(feature_bound=feature_bound)
        if bounds is None:
            zeros, ones = np.zeros(features), np.ones(features)
            return cls(None, None, zeros, ones, feature_bound)
        if isinstance(bounds, Mapping):
            bounds = by_column(
                list(range(features)) if names is None else list(names), bounds=bounds
            )
        try:
            pairs = np.asarray(bounds, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(
                f"bounds must be one pair (low, high), {features} pairs, one per column, a mapping "
                f"of columns to pairs, or 'private'; got {bounds!r:.80}"
            ) from None
        if pairs.shape == (2,):
            pairs = np.tile(pairs, (features, 1))
        if pairs.shape != (features, 2):
            turned = "; lows and highs are rows here: give numpy.transpose(bounds)"
            raise InvalidInput(
                f"bounds must be one pair (low, high) or {features} pairs, one per column; got "
                f"an array of shape {pairs.shape}{turned if pairs.T.shape == (features, 2) else ''}"
            )
        check_ranges(bounds=pairs)
        low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
        keeps_zero = (low <= 0) & (high >= 0)
        shift = np.where(keeps_zero, 0.0, low)
        scale = 1.0 / np.where(keeps_zero, np.maximum(-low, high), high - low)
        return cls(low, high, shift, scale, feature_bound)

    def apply(self, x: Any) -> Any:
        """The rows inside their bounds, as float64; dense stays dense, CSR stays CSR."""
        if sparse.issparse(x):
            return self._shorten(self._sparse(x))
        if self.low is None or self.high is None:
            return self._shorten(np.asarray(x, dtype=np.float64))
        # One copy and two vectorised passes: np.clip with an array of bounds takes four times as
        # long. NaN stays NaN; zeros may change their sign, which no sum of rows shows.
        out = np.array(x, dtype=np.float64)
        np.maximum(out, self.low, out=out)
        np.minimum(out, self.high, out=out)
        if self.has_shift:
            out -= self.shift
        out *= self.scale
        return self._shorten(out)

    @cached_property
    def has_shift(self) -> bool:
        return bool(self.shift.any())

    def _sparse(self, x: Any) -> Any:
        out = x.tocsr().astype(np.float64)
        if not out.has_canonical_format:  # an entry in several parts is clamped once, not by part
            out = out.copy()
            out.sum_duplicates()
        if self.low is None or self.high is None:
            return out
        if self.has_shift:
            raise Unsupported(
                "bounds that leave out zero would make sparse rows dense; widen them to include "
                "zero, or give a dense array"
            )
        out = out.copy()
        data = np.clip(out.data, self.low[out.indices], self.high[out.indices])
        out.data = data * self.scale[out.indices]
        return out

    def _shorten(self, x: Any) -> Any:
        if self.feature_bound is None:
            return x
        factor = clip_factor(np.sqrt(squared_norms(x)), self.feature_bound, slack=0.0)
        if sparse.issparse(x):
            return sparse.csr_array(x.multiply(factor[:, None]))
        return x * factor[:, None]


def by_column(names: list[Any], **mapping: Mapping[Any, Any]) -> list[Any]:
    """The entries of one mapping in the order of the columns; None stands for those not named."""
    ((what, given),) = mapping.items()
    unknown = [name for name in given if name is not None and name not in names]
    if unknown:
        raise InvalidInput(f"{what} name {unknown[0]!r}, which is no column of the table")
    missing = [name for name in names if name not in given]
    if missing and None not in given:
        raise InvalidInput(
            f"{what} must cover column {missing[0]!r}: name it, or give None: … for all columns "
            "that are not named"
        )
    return [given[name] if name in given else given[None] for name in names]


def squared_norms(x: Any) -> Array:
    """‖x‖² of every row. A row too long for float64 counts as infinitely long."""
    with np.errstate(over="ignore"):
        if sparse.issparse(x):
            return np.asarray(x.multiply(x).sum(axis=1), dtype=np.float64).ravel()
        return np.asarray(np.einsum("ij,ij->i", x, x))
