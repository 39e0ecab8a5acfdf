"""What all private estimators share: parameters, the readings of the rows, the statement, pickling.

The parameters are those of scikit-learn where there is one of that meaning. Everything that the
mechanism depends on is given, nothing is measured: columns have `bounds`, rows a `feature_bound` or
their gradients a `clip_norm`, and the number of rows is a public `horizon`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.convex.anew import anew, forget, note_learned
from noshuffle.convex.arrays import Array, Targets, refuse_complex
from noshuffle.convex.given_bounds import warn_of_targets
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.saved import Saveable
from noshuffle.convex.stream_fit import BLOCK, StreamFit
from noshuffle.convex.table_fit import ONE_SHOT
from noshuffle.convex.weighting import by_class, given_weights, unit_weights
from noshuffle.errors import InvalidInput, Unsupported, instance_of, one_of
from noshuffle.one_owner import in_turn
from noshuffle.optim.composite import Composite
from noshuffle.optim.constraints import Constraint
from noshuffle.strategies import Strategy

_FLOATS = [np.float64, np.float32]
_NOTHING: frozenset[str] = frozenset()


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearModel(StreamFit, Saveable, BaseEstimator):  # type: ignore[misc]
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
        rest; clamped and scaled (see `rows`). "private": "gd" finds them in its first readings,
        paid from the same epsilon (see `ranges`).
    penalty : None, "l2", "l1", "elasticnet", "group", or a `noshuffle.optim.composite` record.
    alpha, l1_ratio, groups : its strength; the share of l1; one label per feature for "group".
    constraint : None, "ball", "box", "simplex", "l1_ball" of size `radius`, or a record of
        `noshuffle.optim.constraints`. Neither penalty nor constraint touch the intercept.
    radius : size of the constraint set, and of the weights that the learning rate aims at.
    mechanism : a name that `Plan.fit` knows, or a Strategy; None takes "blt" for "ftrl", and
        independent noise where a table is one batch.
    averaging : "linear", "uniform" or "last"; None takes "last" under a penalty that makes zeros
        (an average is zero only where every iterate was), "linear" otherwise.
    learning_rate : None takes it from theory (see `linear_rule`).
    neighbours : "zero-out" or "replace-one". Not "add-remove": batches are cut by place, so rows
        behind one that is added or removed would move to other batches.
    max_weight : the largest weight that a row may have, for `sample_weight` of `fit` and
        `partial_fit`; noise grows by it. None: weights of `fit` are public (see `weighting`).
    rows_per_unit : "gd": units (users) may have several rows, told by `ids`; those of one count for
        this many at most, together, and the guarantee is for all of them. Noise grows by it.
    budget : a `noshuffle.Budget` that this and all other fits on the same rows draw on; it
        survives `clone`, so a grid search pays for every fit.
    test_seed : reproducible noise for tests; the statement then says NOT PRIVATE.
    verbose : tell on standard error, once a second at most, how many steps are done.
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
    mechanism: str | Strategy | None = None
    averaging: str | None = None
    learning_rate: float | None = None
    fit_intercept: bool = True
    neighbours: str = "zero-out"
    max_weight: float | None = None
    rows_per_unit: int | None = None
    budget: Any = None
    test_seed: int | str | None = None
    verbose: bool = False

    #: Parameters that bound columns or targets.
    _BOUNDS: ClassVar[tuple[str, ...]] = ("bounds", "feature_bound")

    if TYPE_CHECKING:  # what a kind of model adds

        def _loss(self, classes: int) -> MarginLoss: ...
        def _targets(self, y: Any) -> Targets: ...

    def _publish(self) -> None:
        self.coef_: Array
        self.intercept_: Any
        self.coef_, self.intercept_ = self._in_data_units(self._weights)

    def _in_data_units(self, weights: Array) -> tuple[Array, Any]:
        """Coefficients and intercepts in the units of the data."""
        return self._original_coordinates(weights)

    def _take_classes(self, y: Any) -> tuple[str, ...]:
        """What `fit` learns from y before it begins, in words."""
        return ()

    def _name_classes(self, classes: Any, *, goes_on: bool) -> None:
        """What the caller of `partial_fit` said of y beforehand."""

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Rows and targets as arrays of real numbers (classes may be anything with an order)."""
        if not reset and self._is_plain(X, y):
            return X, y
        refuse_complex(X=X, y=y)
        checks: dict[str, Any] = {"accept_sparse": "csr", "dtype": _FLOATS, "reset": reset}
        numeric = isinstance(self, RegressorMixin)
        try:
            return validate_data(self, X, y, y_numeric=numeric, **checks)  # type: ignore[no-any-return]
        except (ValueError, TypeError) as error:
            if "Input X contains NaN" not in str(error):  # scikit-learn would name other models
                if column := _column_of_no_numbers(X):
                    raise InvalidInput(
                        f"X must hold numbers, got column {column}; make numbers of it (text: "
                        "OneHotEncoder with categories that are given), or leave it out"
                    ) from None
                raise
            raise InvalidInput(
                "X contains NaN; fill the gaps with numbers that are known beforehand"
            ) from None

    def _is_plain(self, X: Any, y: Any) -> bool:
        """Whether a further piece of a stream is as scikit-learn would hand it back.

        Its checks take ten times as long as to learn from one row.
        """
        return (
            type(X) is type(y) is np.ndarray
            and X.dtype == np.float64
            and y.dtype.kind in ("f" if isinstance(self, RegressorMixin) else "biuU")
            and X.ndim == 2
            and X.shape == (len(y), self.n_features_in_)
            and y.ndim == 1
            and len(y) > 0
            and not hasattr(self, "feature_names_in_")
            and bool(np.isfinite(X).all())
            and (y.dtype.kind != "f" or bool(np.isfinite(y).all()))
        )

    def _weigh(self, sample_weight: Any, y: Targets) -> tuple[Array | None, float, tuple[str, ...]]:
        """Weights of rows (None: all 1), the largest possible one, and what to state of them."""
        values, most, notes = given_weights(sample_weight, rows=len(y), max_weight=self.max_weight)
        table = by_class(getattr(self, "class_weight", None), getattr(self, "classes_", None))
        if table is not None:
            most *= float(table.max())
            values = table[y] if values is None else values * table[y]
        return values, most, notes

    @property
    def _turn(self) -> Any:
        """Held by the thread that fits; a forked process has a lock of its own."""
        name = f"_turn{os.getpid()}"
        return self.__dict__.get(name) or self.__dict__.setdefault(name, threading.RLock())

    @in_turn
    @anew
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Learn from a table in the order of its rows; anything learned before is forgotten.

        `sample_weight`: one number for each row (see `weighting`). `run`: a folder for the evidence
        (plan, log, statement), which `verify` reads.
        """
        X, y = self._checked(X, y, reset=True)
        notes = self._take_classes(y)
        targets = self._targets(y)  # refuses unknown classes before anything begins
        instance_of((bool, np.bool_), fit_intercept=self.fit_intercept)
        weight, self._most_weight, more = self._weigh(sample_weight, targets)
        if self.rows_per_unit is not None:
            ids = None if ids is None else list(ids)
            own = unit_weights(ids, self.rows_per_unit, rows=len(targets))
            weight = own if weight is None else weight * own
            self._most_weight *= self.rows_per_unit
        why = self._choose(X, run=run, is_weighted=weight is not None)
        if self.test_seed is None and self.epsilon != math.inf:
            self._warn_without_bounds()
        notes = (*((why,) if why else ()), *notes, *more)
        if self.solver_ in ONE_SHOT:
            if sample_weight is not None:
                raise Unsupported(f"solver={self.solver_!r} has no sample_weight; use 'gd'")
            self._answer(X, targets, ids, *notes)
            return self
        self._begin(X.shape[1], rows=X.shape[0], run=run)
        self._learn(X, targets, ids, weight, passes=self._stream.passes)
        self._stream.close()
        self._finish(*notes)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Predict these rows, then learn from them."""
        return self._partial_fit(X, y, None, sample_weight, ids, run)

    @in_turn
    def _partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any,
        sample_weight: Any,
        ids: Iterable[Hashable] | None,
        run: str | Path | None,
    ) -> Self:
        before = self.__dict__.copy()
        try:
            return self._go_on(X, y, classes, sample_weight, ids, run)
        except BaseException:  # the stream knows what it has taken; nothing else has changed
            self.__dict__ = before
            raise

    def _go_on(
        self,
        X: Any,
        y: Any,
        classes: Any,
        sample_weight: Any,
        ids: Iterable[Hashable] | None,
        run: str | Path | None,
    ) -> Self:
        goes_on = self._continued()
        if sample_weight is not None and self.max_weight is None:
            raise InvalidInput(
                "sample_weight of a stream needs max_weight=, the largest that will ever come"
            )
        kept = _NOTHING if goes_on else forget(self)
        X, y = self._checked(X, y, reset=not goes_on)
        if not goes_on:
            one_of(self._SOLVERS, solver=self.solver)
            self.solver_ = "sums" if self.solver == "sums" else "ftrl"
            self._refuse_private_bounds()
            self._refuse_many_rows()
            if self.test_seed is None and self.epsilon != math.inf:
                warn_of_targets(self)
        self._name_classes(classes, goes_on=goes_on)
        targets = self._targets(y)
        weight, most, more = self._weigh(sample_weight, targets)
        if not goes_on:
            self._most_weight = most
            self._begin(X.shape[1], rows=None, run=run)
        elif most != self._most_weight:  # rows are clipped, and noised, for that one
            raise InvalidInput(
                f"the largest weight of this stream is {self._most_weight:g} since its first row, "
                f"got {most:g} now; set max_weight and class_weight back, or begin a new stream"
            )
        elif run is not None and not self._stream.lives_in(run):
            raise Unsupported("a run folder goes with the first partial_fit of a stream")
        self._learn(X, targets, ids, weight)
        said = self._notes if goes_on else ()
        self._finish(*said, *(note for note in more if note not in said))
        if not goes_on:
            note_learned(self, kept)
        return self

    def _margins(self, x: Any) -> Array:
        check_is_fitted(self, "privacy_")
        refuse_complex(X=x)
        x = validate_data(self, x, accept_sparse="csr", dtype=_FLOATS, reset=False)
        out = [np.zeros((0, len(self._weights)))]
        for first in range(0, x.shape[0], BLOCK):
            rows = self._rows.apply(x[first : first + BLOCK])
            out.append(rows @ self._weights[:, :-1].T + self._weights[:, -1])
        return np.concatenate(out)

    def _original_coordinates(self, weights: Array) -> tuple[Array, Array]:
        """Weights and intercepts for rows as they came, while those lie within their bounds."""
        coef = weights[:, :-1] * self._rows.scale
        return coef, weights[:, -1] - coef @ self._rows.shift

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
        secret = ("_stream", "_progress", "_finished", "_said")
        own = dict(super().__getstate__())
        return {k: v for k, v in own.items() if k not in secret and not k.startswith("_turn")}


def _column_of_no_numbers(X: Any) -> str | None:
    """The first column of a data frame of pandas that is none of numbers: 'city' (object)."""
    for i, kind in enumerate(X.dtypes if hasattr(X, "iloc") and X.ndim == 2 else ()):
        try:
            if getattr(kind, "kind", "O") in "mM":  # days are numbers to NumPy, alone
                raise TypeError
            np.asarray(X.iloc[:, i], dtype=np.float64)
        except (ValueError, TypeError):
            return f"{X.columns[i]!r} ({kind})"
    return None
