"""What all private estimators share: parameters, the readings of the rows, the statement, pickling.

The parameters are those of scikit-learn where there is one of that meaning. Everything that the
mechanism depends on is given, nothing is measured: columns have `bounds`, rows a `feature_bound` or
their gradients a `clip_norm`, and the number of rows is a public `horizon`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.convex.arrays import Array, Targets, refuse_complex
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import OTHER_FITS, UNKNOWN_HORIZON, PhaseBudget, statement_of
from noshuffle.convex.progress import NOT_COVERED, Accuracy, RSquared, ScoredRule
from noshuffle.convex.repeated import warn_if_fitted_before
from noshuffle.convex.saved import Saveable
from noshuffle.convex.shape import composite_of, constraint_of, groups_of, makes_zeros
from noshuffle.convex.stream import LearningStream, Rule
from noshuffle.convex.table_fit import IDS, NO_IDS, ONE_SHOT, SETTINGS, TableFit
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    Unsupported,
    instance_of,
    one_of,
    positive,
)
from noshuffle.noise import test_source
from noshuffle.optim.composite import Composite
from noshuffle.optim.constraints import Constraint
from noshuffle.release.facts import TEST_SEED
from noshuffle.strategies import Strategy, identity

#: Rows that are brought inside their bounds together; all memory beyond the model's is this.
_BLOCK = 4096
#: Tables of up to this many numbers are brought inside their bounds once for all readings.
_KEPT = 20_000_000
_RELEASED = "progress_ holds the progressive score with noise; the guarantee covers it."
_FLOATS = [np.float64, np.float32]


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearModel(TableFit, Saveable, BaseEstimator):  # type: ignore[misc]
    """A linear model: of a table by the solver that suits it, of a stream by DP-FTRL.

    Parameters
    ----------
    solver : of `fit`. "auto" takes "ftrl" where a setting is given that only it has, else "gd", and
        says so in `solver_` and in the statement. "gd": full-batch descent on columns that are
        standardised in private (`gradient_rule`); "ftrl": passes over batches in the given order,
        every iterate private; "objective" and "frank_wolfe": one answer (`one_shot`).
        `partial_fit` is always "ftrl".
    epsilon, delta : the guarantee for the whole stream and every iterate. math.inf: no noise.
    horizon : number of rows that will come. None: `fit` takes the number of rows it is given (it is
        public under zero-out neighbours), `partial_fit` doubles (see `phases`).
    batch_size : rows per step; None aims at five hundred steps of at most 256 rows.
    passes : passes of `fit` over the rows, in the same order; for "gd" readings, 1 means by rule.
    clip_norm : bound on the gradient of one row, clipped to it. None: derived from feature_bound.
    feature_bound : rows are shortened to this norm.
    bounds : (low, high) for all columns, one pair per column, or {column: pair} with None for the
        rest; clamped and scaled (see `rows`).
    penalty : None, "l2", "l1", "elasticnet", "group", or a `noshuffle.optim.composite` record.
    alpha, l1_ratio, groups : its strength; the share of l1; one label per feature for "group".
    constraint : None, "ball", "box", "simplex", "l1_ball" of size `radius`, or a record of
        `noshuffle.optim.constraints`. Neither penalty nor constraint touch the intercept.
    radius : size of the constraint set, and of the weights that the learning rate aims at.
    mechanism : a name that `Plan.fit` knows, or a Strategy.
    averaging : "linear", "uniform" or "last"; None takes "last" under a penalty that makes zeros
        (an average is zero only where every iterate was), "linear" otherwise.
    learning_rate : None takes it from theory (see `linear_rule`).
    neighbours : "zero-out" or "replace-one". Not "add-remove": batches are cut by place, so rows
        behind one that is added or removed would move to other batches.
    release_score : also release the progressive score with noise, as `progress_` (rows, score,
        deviation), covered by the same statement for 3 % more noise (see `progress`).
    budget : a `noshuffle.Budget` that this and all other fits on the same rows draw on; it
        survives `clone`, so a grid search pays for every fit. Without one, a second fit of the
        same rows warns.
    test_seed : reproducible noise for tests; the statement then says NOT PRIVATE.
    """

    solver: str = "auto"
    epsilon: float = 1.0
    delta: float = 1e-6
    horizon: int | None = None
    batch_size: int | None = None
    passes: int = 1
    clip_norm: float | None = 1.0
    feature_bound: float | None = None
    bounds: Any = None
    penalty: str | Composite | None = None
    alpha: float = 1e-4
    l1_ratio: float = 0.5
    groups: Any = None
    constraint: str | Constraint | None = None
    radius: float = 10.0
    mechanism: str | Strategy = "blt"
    averaging: str | None = None
    learning_rate: float | None = None
    fit_intercept: bool = True
    neighbours: str = "zero-out"
    release_score: bool = False
    budget: Any = None
    test_seed: int | str | None = None

    #: Parameters that bound columns or targets.
    _BOUNDS: ClassVar[tuple[str, ...]] = ("bounds", "feature_bound")
    #: The progressive score, and (`each`) what `release_score` releases the running mean of.
    _SCORE: ClassVar[type[Accuracy] | type[RSquared]] = Accuracy

    if TYPE_CHECKING:  # what a kind of model adds

        def _loss(self, classes: int) -> MarginLoss: ...
        def _targets(self, y: Any) -> Targets: ...

    def _score_unit(self) -> float:
        """What a score of one means in the units of the data."""
        return 1.0

    def _publish(self) -> None:
        self.coef_: Array
        self.intercept_: Any
        self.coef_, self.intercept_ = self._original_coordinates()

    def _take_classes(self, y: Any) -> tuple[str, ...]:
        """What `fit` learns from y before it begins, in words."""
        return ()

    def _name_classes(self, classes: Any, *, goes_on: bool) -> None:
        """What the caller of `partial_fit` said of y beforehand."""

    def _rule(self, features: int, classes: int) -> Rule:
        """The rule of `solver_`, one of those that read rows in steps."""
        loss, outputs = self._loss(classes), 1 if classes <= 2 else classes
        clip_norm = self._clip(loss, outputs)
        if self.solver_ == "gd":
            return self._gradient_rule(loss, features, outputs, clip_norm)
        composite = composite_of(self.penalty, alpha=self.alpha, l1_ratio=self.l1_ratio)
        averaging = "last" if makes_zeros(composite) else "linear"
        return LinearRule(
            loss=loss,
            features=features,
            outputs=outputs,
            clip_norm=clip_norm,
            radius=self.radius,
            fixed_rate=self.learning_rate,
            fit_intercept=self.fit_intercept,
            averaging=averaging if self.averaging is None else self.averaging,
            composite=composite,
            constraint=constraint_of(self.constraint, radius=self.radius),
            groups=groups_of(self.groups, features=features),
            watch=self._watch,
        )

    def _clip(self, loss: MarginLoss, outputs: int) -> float:
        """The given clip norm, else the bound that follows from Lipschitz loss and bounded rows."""
        if self.clip_norm is not None:
            positive(clip_norm=self.clip_norm)
            return float(self.clip_norm)
        slope = loss.lipschitz(outputs)
        if self.feature_bound is None or not np.isfinite(slope):
            raise InvalidInput(
                "clip_norm=None needs a feature_bound and a loss of bounded slope; give clip_norm"
            )
        return slope * float(np.sqrt(self.feature_bound**2 + float(self.fit_intercept)))

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Rows and targets as arrays of real numbers (classes may be anything with an order)."""
        refuse_complex(X=X, y=y)
        numeric = isinstance(self, RegressorMixin)
        return validate_data(  # type: ignore[no-any-return]
            self, X, y, accept_sparse="csr", dtype=_FLOATS, y_numeric=numeric, reset=reset
        )

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Learn from a table in the order of its rows; anything learned before is forgotten.

        `run`: a folder for the evidence (plan, ledger, statement), which `verify` reads.
        """
        X, y = self._checked(X, y, reset=True)
        notes = self._take_classes(y)
        targets = self._targets(y)  # refuses unknown classes before anything begins
        instance_of((bool, np.bool_), fit_intercept=self.fit_intercept)
        why = self._choose(X, run=run)
        if self.budget is None and self.test_seed is None and self.epsilon != math.inf:
            warn_if_fitted_before(X)
        if self.solver_ in ONE_SHOT:
            self._answer(X, targets, ids, why, *notes)
            return self
        self._begin(X.shape[1], rows=X.shape[0], run=run)
        self._learn(X, targets, ids, passes=self._stream.passes)
        self._stream.close()
        self._finish(*((why,) if why else ()), *notes)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Predict these rows, then learn from them."""
        return self._partial_fit(X, y, None, ids, run)

    def _partial_fit(
        self, X: Any, y: Any, classes: Any, ids: Iterable[Hashable] | None, run: str | Path | None
    ) -> Self:
        goes_on = self._continued()
        X, y = self._checked(X, y, reset=not goes_on)
        if not goes_on:
            one_of(self._SOLVERS, solver=self.solver)
            self.solver_ = "sums" if self.solver == "sums" else "ftrl"
        self._name_classes(classes, goes_on=goes_on)
        if not goes_on:
            self._begin(X.shape[1], rows=None, run=run)
        elif run is not None:
            raise Unsupported("a run folder goes with the first partial_fit of a stream")
        self._learn(X, self._targets(y), ids)
        self._finish(*(self._notes if goes_on else ()))
        return self

    def _watch(self, margins: Array, y: Targets) -> None:
        self._progress(margins, y)

    def _begin(self, features: int, *, rows: int | None, run: str | Path | None) -> None:
        """A new stream; `rows` is the length of a table, None when rows come piece by piece."""
        # A number would be read as the square of the constant column, and half of one bounds less.
        instance_of((bool, np.bool_), fit_intercept=self.fit_intercept)
        is_batch = rows is not None and self._is_batch(rows)
        horizon = self.horizon if self.horizon is not None else rows
        if self.passes != 1 and horizon != rows:
            raise Unsupported(
                f"{self.passes} passes are made by fit over all {horizon} rows of the horizon, got "
                f"{'a stream' if rows is None else rows}; use passes=1, or leave horizon out"
            )
        self._rows = self._row_map(features)
        self._progress = self._SCORE()
        self._stream = self._new_stream(
            features,
            horizon=horizon,
            passes=self._passes if is_batch else self.passes,
            run=run,
            account=self.budget,
        )

    def _new_stream(
        self,
        features: int,
        *,
        horizon: int | None,
        passes: int,
        run: str | Path | None = None,
        account: Any = None,
    ) -> LearningStream:
        if self.neighbours == "add-remove":
            raise Unsupported(
                "rows behind one that is added or removed would move to other batches, which no "
                "bound covers; use neighbours='zero-out' or 'replace-one'"
            )
        source = None  # keys of the operating system
        if self.test_seed is not None:
            source = test_source(seed=f"{type(self).__name__} {self.test_seed}")
        rule = self._rule(features, len(getattr(self, "classes_", ())))
        is_batch = horizon is not None and self._is_batch(horizon)
        mechanism = identity() if is_batch else self.mechanism
        return LearningStream(
            ScoredRule(rule, self._SCORE.each) if self.release_score else rule,
            PhaseBudget(self.epsilon, self.delta, mechanism, self.neighbours),
            source=source,
            horizon=horizon,
            passes=passes,
            batch_size=horizon if is_batch else self.batch_size,
            run=run,
            account=account,
        )

    def _learn(
        self, x: Any, y: Targets, ids: Iterable[Hashable] | None, *, passes: int = 1
    ) -> None:
        """Admit, then feed block by block; later passes bring the same rows in the same order."""
        stream = self._stream
        stream.admit(x.shape[0], ids)
        if passes > 1 and x.shape[0] * x.shape[1] <= _KEPT:
            x, apply_fn = self._rows.apply(x), None
        else:
            apply_fn = self._rows.apply
        for index in range(passes):
            # A second look at a row is no validation.
            if self.solver_ != "gd":
                stream.rule.watch = None if index else self._watch
            for first in range(0, x.shape[0], _BLOCK):
                block = slice(first, first + _BLOCK)
                stream.feed(x[block] if apply_fn is None else apply_fn(x[block]), y[block])

    def _finish(self, *notes: str) -> None:
        stream = self._stream
        self._weights = stream.rule.weights.copy()
        self.n_steps_ = stream.steps
        self.n_rows_ = stream.rows
        self.learning_rate_ = stream.rule.learning_rate
        self.batch_size_ = stream.phase.batch_size
        self.progressive_score_ = self._progress.value
        self._publish()
        self._notes = notes
        ids = IDS if stream.has_ids else NO_IDS
        if stream.is_closed:
            stream.release.settle_budget()
        others = OTHER_FITS if stream.charge is None else stream.charge.words()
        said = [ids, self._words_of_bounds(), SETTINGS, others, *notes]
        if self.solver_ != "gd":
            said.insert(1, NOT_COVERED)
        self.__dict__.pop("progress_", None)
        if isinstance(stream.rule, ScoredRule):
            curve = np.array(stream.rule.curve).reshape(-1, 3)
            self.progress_: Array = curve * [1.0, self._score_unit(), self._score_unit()]
            said.append(_RELEASED)
        if stream.horizon is None:
            said.append(UNKNOWN_HORIZON)
        if stream.is_test:
            said.insert(0, TEST_SEED)
        self.plan_ = stream.phase.plan
        if stream.is_observed:
            stream.release.write_statement()
            if stream.release.released == self.plan_.steps:
                stream.end_run()
        self.privacy_ = statement_of(stream.phases, notes=tuple(said))

    def _continued(self) -> bool:
        """Whether partial_fit goes on with an earlier stream."""
        if not hasattr(self, "privacy_"):
            return False
        if self.solver_ in ("gd", *ONE_SHOT):
            raise InvalidInput(
                f"fit learned this model from a whole table (solver {self.solver_}); for a stream "
                "call partial_fit from the first row on, or fit with solver='ftrl'"
            )
        if not hasattr(self, "_stream"):
            raise InvalidInput(
                "this model was pickled or copied, which leaves its noise key behind; to go on "
                "elsewhere use save(folder) and load(folder), or a fresh model on new rows"
            )
        if self._stream.is_closed:
            if self.horizon is not None:
                raise HorizonExceeded(
                    "fit has used its plan up; for a stream call partial_fit from the first row on"
                )
            self._stream.extend()
        return True

    def _revive(self, path: Path, state: dict[str, Any]) -> None:
        horizon, passes = state["phases"][0]
        stream = self._new_stream(self.n_features_in_, horizon=horizon, passes=passes)
        stream.load(state, path, account=self.budget)
        self._stream, self._progress = stream, self._SCORE()
        vars(self._progress).update(state["progress"])
        self._finish(*self._notes)

    def _margins(self, x: Any) -> Array:
        check_is_fitted(self, "privacy_")
        refuse_complex(X=x)
        x = validate_data(self, x, accept_sparse="csr", dtype=_FLOATS, reset=False)
        out = [np.zeros((0, len(self._weights)))]
        for first in range(0, x.shape[0], _BLOCK):
            rows = self._rows.apply(x[first : first + _BLOCK])
            out.append(rows @ self._weights[:, :-1].T + self._weights[:, -1])
        return np.concatenate(out)

    def _original_coordinates(self) -> tuple[Array, NDArray[np.float64]]:
        """Weights and intercepts for rows as they came, while those lie within their bounds."""
        coef = self._weights[:, :-1] * self._rows.scale
        return coef, self._weights[:, -1] - coef @ self._rows.shift

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = self.test_seed is None
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """What is released and nothing else: no key, no unfinished sums, no raw scores.

        Two copies that went on with the same key would put the same noise on different rows, and
        the difference of their answers would be free of noise; so copies cannot go on. `save`
        keeps a stream alive across processes.
        """
        state = dict(super().__getstate__())
        for secret in ("_stream", "_progress", "progressive_score_"):
            state.pop(secret, None)
        return state
