"""PrivateScaler: bounds, quantiles, centre and spread of columns, by noisy histograms (`ranges`).

    x' = (clamp(x) − median)/spread,      spread = (q₇₅ − q₂₅)/1.349, a normal column's deviation

One run of its own, with a statement and, where it is given, the budget that the model after it
draws on, too. Estimators with bounds="private" need none: they find bounds within their own ε.

>>> import numpy as np
>>> x = np.random.default_rng(0).normal(50.0, 10.0, size=(20_000, 1))
>>> found = PrivateScaler(test_seed=0).fit(x)
>>> found.quantile(0.5).round(), found.scale_.round()
(array([50.]), array([10.]))
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.convex.anew import anew
from noshuffle.convex.arrays import Array, refuse_complex
from noshuffle.convex.ranges import RangeRule
from noshuffle.convex.readings import PrivateTable

#: Between the quartiles of a normal law lie this many deviations.
_QUARTILES = 1.349


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateScaler(OneToOneFeatureMixin, TransformerMixin, PrivateTable):  # type: ignore[misc]
    """Columns clamped to their bounds, centred and scaled. Parameters are those of `PrivateTable`.

    After `fit`: `bounds_`, `center_`, `scale_`, and `quantile(q)` of every column.
    """

    @anew
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Release the histograms of a table."""
        refuse_complex(X=X)
        X = validate_data(self, X, dtype=np.float64)
        known = self._given_bounds(X.shape[1])
        rule = RangeRule(None, columns=X.shape[1], clip_norm=1.0, repeats=1, known=known)
        self._read(rule, X, np.zeros(len(X)), readings=0, ids=ids, run=run)
        self._ranges = rule
        if known is not None:
            self._rows = known
        self.center_ = rule.quantile(0.5)
        low, high = self.bounds_.T
        spread = (rule.quantile(0.75) - rule.quantile(0.25)) / _QUARTILES
        self.scale_ = np.where(spread > 1e-3 * (high - low), spread, high - low)
        return self

    def quantile(self, q: float) -> Array:
        """Of every column; post-processing of what was released."""
        check_is_fitted(self, "privacy_")
        return self._ranges.quantile(q)

    def transform(self, X: Any) -> Array:
        """Rows clamped, centred and scaled."""
        rows = self._fitted_rows(X)
        return np.asarray((np.clip(rows, *self.bounds_.T) - self.center_) / self.scale_)
