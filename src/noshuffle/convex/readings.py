"""PrivateTable: what estimators share that learn a whole table in readings and are no linear model.

A rule says what a row adds to a reading (norm at most its clip norm) and what a noisy mean does to
the model; a `LearningStream` reads the table so many times as one batch each, with independent
noise: exactly μ = √readings/z. Where bounds="private", the first readings find them (`ranges`).
The statement, the ledger, the run folder and the budget are those of all other estimators. No
`partial_fit`: a stream is learned by linear models.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.accounting import gaussian
from noshuffle.convex.arrays import Array, Targets, refuse_complex
from noshuffle.convex.given_bounds import warn_of_targets, words_of_bounds
from noshuffle.convex.phases import PhaseBudget, statement_of
from noshuffle.convex.ranges import RangeRule, is_private
from noshuffle.convex.rows import RowMap
from noshuffle.convex.rule import Rule
from noshuffle.convex.stream import LearningStream
from noshuffle.convex.table_fit import IDS, NO_IDS, SETTINGS
from noshuffle.convex.targets import check_labels
from noshuffle.errors import InvalidInput, Unsupported, open_unit, positive
from noshuffle.noise import test_source
from noshuffle.release.facts import OTHER_RUNS, TEST_SEED
from noshuffle.release.repeated import remember, warn_if_fitted_before
from noshuffle.strategies import identity


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTable(BaseEstimator):  # type: ignore[misc]
    """Parameters of every estimator that reads a whole table.

    Parameters
    ----------
    epsilon, delta : the guarantee of the whole fit.
    bounds : "private" spends readings on finding them; or (low, high) for all columns, a pair for
        each, or {column: pair}, known beforehand. Rows are clamped to them.
    neighbours : "zero-out" or "replace-one".
    budget : a `noshuffle.Budget` that all fits on the same rows draw on.
    test_seed : reproducible noise for tests; the statement then says NOT PRIVATE.
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    bounds: Any = "private"
    neighbours: str = "zero-out"
    budget: Any = None
    test_seed: int | str | None = None

    def _checked(self, X: Any, y: Any) -> tuple[Array, Any]:
        """Rows and targets of `fit` as arrays of real numbers."""
        refuse_complex(X=X, y=y)
        is_numeric = isinstance(self, RegressorMixin)
        X, y = validate_data(self, X, y, y_numeric=is_numeric, dtype=np.float64)
        if isinstance(self, ClassifierMixin):
            check_labels(y)
        return X, y

    def _fitted_rows(self, X: Any) -> Array:
        check_is_fitted(self, "privacy_")
        refuse_complex(X=X)
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def _mu(self) -> float:
        if self.epsilon == math.inf:
            return math.inf
        positive(epsilon=self.epsilon)
        open_unit(delta=self.delta)
        return gaussian.mu(epsilon=self.epsilon, delta=self.delta)

    def _given_bounds(self, columns: int) -> RowMap | None:
        """None where they are to be found."""
        if self.bounds is None:
            raise InvalidInput("bounds=None is not possible here; give bounds or 'private'")
        if is_private(self.bounds):
            return None
        names = getattr(self, "feature_names_in_", None)
        return RowMap.of(self.bounds, feature_bound=None, features=columns, names=names)

    def _prepare(self, x: Array, rows: RowMap) -> Array:
        """What the rule reads, once the bounds of the columns are there."""
        return np.asarray(rows.apply(x))

    def _read(
        self,
        rule: Rule,
        x: Array,
        y: Targets,
        *,
        readings: int,
        ids: Iterable[Hashable] | None,
        run: str | Path | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Find bounds where that is asked for, let the rule read, write what is to be said."""
        if self.neighbours == "add-remove":
            raise Unsupported(
                "the number of rows divides every release, and is public; use neighbours="
                "'zero-out' or 'replace-one'"
            )
        n, p = x.shape
        whole, known = rule, self._given_bounds(p)
        if known is None and not isinstance(rule, RangeRule):
            repeats = max(1, round(readings / 8))
            whole = RangeRule(rule, columns=p, clip_norm=rule.clip_norm, repeats=repeats)
        lead = whole.lead if isinstance(whole, RangeRule) else 0
        own = frozenset[int]()
        if self.test_seed is None and self.epsilon != math.inf:
            if self.budget is None:
                own = warn_if_fitted_before(x)
            warn_of_targets(self)
        seed = None
        if self.test_seed is not None:
            seed = test_source(seed=f"{type(self).__name__} {self.test_seed}")
        stream = LearningStream(
            whole,
            PhaseBudget(self.epsilon, self.delta, identity(), self.neighbours),
            source=seed,
            horizon=n,
            passes=lead + readings,
            batch_size=n,
            run=run,
            account=self.budget,
        )
        stream.admit(n, ids)
        try:
            for index in range(lead + readings):
                if index == lead:
                    self._rows = known or whole.row_map(None)  # type: ignore[attr-defined]
                    x = self._prepare(x, self._rows)
                stream.feed(x, y)
        finally:
            remember(own if stream.steps else frozenset())
        stream.close()
        if not readings:
            self._rows = whole.row_map(None)  # type: ignore[attr-defined]
        self._state(stream, ids, notes)

    def _state(self, stream: LearningStream, ids: Any, notes: tuple[str, ...]) -> None:
        stream.release.settle_budget()
        self.plan_, self.n_rows_, self.n_steps_ = stream.phase.plan, stream.horizon, stream.steps
        is_found = is_private(self.bounds)
        said = [
            *((TEST_SEED,) if stream.is_test else ()),
            NO_IDS if ids is None else IDS,
            words_of_bounds(self, given=() if is_found else ("bounds",), is_found=is_found),
            SETTINGS,
            OTHER_RUNS if stream.charge is None else stream.charge.words(),
            *notes,
        ]
        if stream.is_observed:
            stream.release.write_statement()
            stream.end_run()
        self.privacy_ = statement_of(stream.phases, notes=tuple(said))

    @property
    def bounds_(self) -> Array:
        """(low, high) of every column, given or found."""
        check_is_fitted(self, "privacy_")
        assert self._rows.low is not None
        assert self._rows.high is not None
        return np.column_stack([self._rows.low, self._rows.high])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.test_seed is None
        return tags
