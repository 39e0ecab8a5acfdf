"""PrivateScaler: bounds, quantiles, centre and spread of columns, by noisy histograms (`ranges`).

    x' = (clamp(x) − median)/spread,      spread = (q₇₅ − q₂₅)/1.349, a normal column's deviation

One run of its own, with a statement and, where it is given, the budget that the model after it
draws on, too. Each histogram is one reading of the whole table as one batch, with independent
noise: exactly μ = √readings/z. Estimators with bounds="private" need no scaler: they find bounds
within their own ε.

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
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.convex.anew import anew
from noshuffle.convex.arrays import Array, refuse_complex
from noshuffle.convex.given_bounds import words_of_bounds
from noshuffle.convex.phases import PhaseBudget, statement_of
from noshuffle.convex.ranges import RangeRule, is_private
from noshuffle.convex.rows import RowMap
from noshuffle.convex.stream import LearningStream
from noshuffle.convex.table_fit import IDS, NO_IDS, SETTINGS
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source
from noshuffle.release.spending import OTHER_RUNS, TEST_SEED
from noshuffle.strategies import identity

#: Between the quartiles of a normal law lie this many deviations.
_QUARTILES = 1.349


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns clamped to their bounds, centred and scaled.

    Parameters
    ----------
    epsilon, delta : the guarantee of the whole fit.
    bounds : "private" spends readings on finding them; or (low, high) for all columns, a pair for
        each, or {column: pair}, known beforehand. Rows are clamped to them.
    neighbours : "zero-out" or "replace-one".
    budget : a `noshuffle.Budget` that all fits on the same rows draw on.
    test_seed : reproducible noise for tests; the statement then says NOT PRIVATE.

    After `fit`: `bounds_`, `center_`, `scale_`, and `quantile(q)` of every column.
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    bounds: Any = "private"
    neighbours: str = "zero-out"
    budget: Any = None
    test_seed: int | str | None = None

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
        self._read(rule, X, ids=ids, run=run)
        self._ranges = rule
        self._rows = rule.row_map(None) if known is None else known
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
        check_is_fitted(self, "privacy_")
        refuse_complex(X=X)
        rows = np.asarray(validate_data(self, X, dtype=np.float64, reset=False))
        return np.asarray((np.clip(rows, *self.bounds_.T) - self.center_) / self.scale_)

    @property
    def bounds_(self) -> Array:
        """(low, high) of every column, given or found."""
        check_is_fitted(self, "privacy_")
        assert self._rows.low is not None
        assert self._rows.high is not None
        return np.column_stack([self._rows.low, self._rows.high])

    def _given_bounds(self, columns: int) -> RowMap | None:
        """None where they are to be found."""
        if self.bounds is None:
            raise InvalidInput("bounds=None is not possible here; give bounds or 'private'")
        if is_private(self.bounds):
            return None
        names = getattr(self, "feature_names_in_", None)
        return RowMap.of(self.bounds, feature_bound=None, features=columns, names=names)

    def _read(
        self,
        rule: RangeRule,
        x: Array,
        *,
        ids: Iterable[Hashable] | None,
        run: str | Path | None,
    ) -> None:
        """Let the rule read the table, and write the statement."""
        if self.neighbours == "add-remove":
            raise Unsupported(
                "the number of rows divides every release, and is public; use neighbours="
                "'zero-out' or 'replace-one'"
            )
        seed = None
        if self.test_seed is not None:
            seed = test_source(seed=f"{type(self).__name__} {self.test_seed}")
        stream = LearningStream(
            rule,
            PhaseBudget(self.epsilon, self.delta, identity(), self.neighbours),
            source=seed,
            horizon=len(x),
            passes=rule.lead,
            batch_size=len(x),
            run=run,
            account=self.budget,
            is_table=True,
        )
        stream.admit(len(x), ids)
        for _ in range(rule.lead):
            stream.feed(x, np.zeros(len(x)))
        stream.close()
        self._state(stream, ids)

    def _state(self, stream: LearningStream, ids: Any) -> None:
        stream.end_run()
        self.plan_, self.n_rows_, self.n_steps_ = stream.phase.plan, stream.horizon, stream.steps
        is_found = is_private(self.bounds)
        notes = [
            *((TEST_SEED,) if stream.is_test else ()),
            NO_IDS if ids is None else IDS,
            words_of_bounds(self, given=() if is_found else ("bounds",), is_found=is_found),
            SETTINGS,
            OTHER_RUNS if stream.charge is None else stream.charge.words(),
        ]
        self.privacy_ = statement_of(stream.phases, notes=tuple(notes))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.test_seed is None
        return tags
