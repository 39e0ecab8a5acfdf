"""TableFit: which solver `fit` takes for a table, and the solvers that answer once.

"auto" is decided by public settings alone: a setting that only the stream has (a horizon, passes,
batches, a mechanism, averaging, a learning rate, a penalty or set of its own)
takes "ftrl"; two classes with bounds and so many columns that noise of √p would hide them take
"frank_wolfe" (`schedule.takes_vertices`), unless a setting is given that it has not; everything
else takes "gd", which is ahead of the others on most tables (benchmarks/RESULTS.md). Evidence for a
run folder is kept by solvers that read rows in steps.
State: none of its own; it writes the attributes of the estimator.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.utils.validation import check_is_fitted

from noshuffle.accounting import gaussian
from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.given_bounds import warn_of_columns, warn_of_targets, words_of_bounds
from noshuffle.convex.gradient_fit import GradientFit
from noshuffle.convex.losses import Loss, by_label
from noshuffle.convex.one_shot import chosen_vertices, tilted
from noshuffle.convex.ranges import is_private
from noshuffle.convex.rows import RowMap
from noshuffle.convex.schedule import LENGTH, WIDE_RADIUS, takes_vertices
from noshuffle.convex.shape import constraint_of
from noshuffle.convex.weighting import by_class
from noshuffle.errors import InvalidInput, Unsupported, one_of
from noshuffle.optim.constraints import Constraint, L1Ball
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.units import as_ids

#: Solvers that answer once, outside of the stream.
ONE_SHOT = ("objective", "frank_wolfe")
NO_IDS = "No ids were given: every row is taken to be a unit of its own."
IDS = "Units were told apart by the ids given with the rows; an id that came twice was refused."
MANY_ROWS = (
    "A unit is a user, told by the ids given with the rows; the rows of one user count for at most "
    "{} together, and the guarantee covers all of them, but not how many rows there are in all, "
    "which is taken to be public."
)
SETTINGS = (
    "All other settings are taken to have been chosen without the data, too, and every row to be "
    "made of its own unit alone: a scaler, imputer or encoder that was fitted to the rows before "
    "is not covered here."
)
#: Numbers of a table that "auto" puts into memory at once, if need be from sparse rows.
_MOST_NUMBERS = 100_000_000


class TableFit(GradientFit):
    """What estimators need to learn a table as a whole."""

    _SOLVERS: ClassVar[tuple[str, ...]] = ("auto", "ftrl", "gd", "objective", "frank_wolfe")
    _BOUNDS: ClassVar[tuple[str, ...]] = ()
    #: Whether "auto" may take "frank_wolfe".
    _VERTICES: ClassVar[bool] = False

    if TYPE_CHECKING:  # of the estimator
        solver: str
        solver_: str
        horizon: int | None
        batch_size: int | None
        mechanism: Any
        averaging: str | None
        constraint: Any
        radius: float
        feature_bound: float | None
        neighbours: str
        budget: Any
        test_seed: int | str | None
        privacy_: PrivacyStatement
        _weights: Array
        _SCORE: ClassVar[Any]
        _progress: Any

        def _record(self, **bounds: Any) -> Loss: ...
        def _publish(self) -> None: ...

    def _stream_settings(self) -> tuple[str, ...]:
        """Settings that were given and that only a stream has."""
        given = {
            "horizon": self.horizon is not None,
            "batch_size": self.batch_size is not None,
            "passes": self.passes != 1,
            "mechanism": self.mechanism is not None,
            "averaging": self.averaging is not None,
            "learning_rate": self.learning_rate is not None,
            "penalty": self.penalty not in (None, "l2"),
            "constraint": self.constraint is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def _takes_vertices(self, X: Any, *, run: str | Path | None) -> bool:
        """Whether "auto" takes "frank_wolfe": from settings and the shape of the table."""
        is_possible = (
            self._VERTICES
            and len(getattr(self, "classes_", ())) == 2
            and self.bounds is not None
            and not is_private(self.bounds)
            and self.epsilon != math.inf
            and X.shape[0] * X.shape[1] <= _MOST_NUMBERS
        )
        is_plain = (
            run is None
            and self.penalty is None
            and self.rows_per_unit is None
            and self._most_weight == 1.0
        )
        if not (is_possible and is_plain):
            return False
        mu = gaussian.mu(epsilon=self.epsilon, delta=self.delta)
        return takes_vertices(rows=X.shape[0], columns=X.shape[1], mu=mu)

    def _choose(self, X: Any, *, run: str | Path | None, is_weighted: bool = False) -> str:
        """Set `solver_` and how often it reads the table; says why where it was chosen here."""
        one_of(self._SOLVERS, solver=self.solver)
        given, why = self._stream_settings(), ""
        self.solver_ = self.solver
        if self.solver == "auto":
            self.solver_ = "ftrl" if given else "gd"
            reason = f"{', '.join(given)} given" if given else "the table is there as a whole"
            if not given and not is_weighted and self._takes_vertices(X, run=run):
                self.solver_, reason = "frank_wolfe", f"{X.shape[1]} columns"
            why = f"Solver {self.solver_} was taken, from public settings alone: {reason}."
        if self.solver_ in ("gd", *ONE_SHOT):
            keeps = self.solver_ == "frank_wolfe" and isinstance(self._constraint(), L1Ball)
            taken = ("passes", "learning_rate", "constraint" if keeps else "")
            odd = [name for name in given if name not in taken]
            if odd:
                is_ball = self.solver_ == "frank_wolfe" and odd[0] == "constraint"
                lack = "constraint but 'l1_ball'" if is_ball else odd[0]
                raise Unsupported(
                    f"solver={self.solver_!r} has no {lack}; use solver='ftrl', or leave it out"
                )
        if self.solver_ in ONE_SHOT and run is not None:
            raise Unsupported(
                f"solver={self.solver_!r} answers once and keeps no log for a run folder; use "
                "'gd', 'ftrl' or 'auto'"
            )
        if self.solver_ != "gd":
            self._refuse_private_bounds()
            self._refuse_many_rows()
        if self.solver_ == "gd":
            self._passes = self._plan_readings(*X.shape, is_sparse=sparse.issparse(X))
        elif self.solver_ == "sums":
            self._passes = 1
        return why

    def _constraint(self) -> Constraint | None:
        return constraint_of(self.constraint, radius=self.radius)

    def _refuse_many_rows(self) -> None:
        if self.rows_per_unit is not None:
            raise Unsupported(
                f"solver={self.solver_!r} has one row for each unit; fit with solver='gd', or "
                "leave rows_per_unit out"
            )

    def _refuse_private_bounds(self) -> None:
        if is_private(self.bounds):
            raise Unsupported(
                f"solver={self.solver_!r} does not find bounds in private; fit with solver='gd', "
                "or give bounds as numbers"
            )

    def _is_batch(self) -> bool:
        """Whether a table is one batch of every reading."""
        if self.solver_ == "sums":
            return not self._stream_settings()
        return self.solver_ == "gd"

    def _answer(
        self,
        X: Any,
        y: Targets,
        ids: Iterable[Hashable] | None,
        *notes: str,
    ) -> None:
        """A solver that answers once; every row is a unit."""
        if len(classes := getattr(self, "classes_", ())) > 2:
            raise Unsupported(
                f"solver={self.solver_!r} has two classes, got {len(classes)}; use 'gd'"
            )
        if ids is not None:
            given = as_ids(ids)
            if len(given) != X.shape[0] or len(np.unique(given)) != len(given):
                raise InvalidInput("ids must hold one id for each row, and none of them twice")
        if self.epsilon == math.inf:
            raise Unsupported(f"solver={self.solver_!r} needs a finite epsilon; use 'gd'")
        self._rows = self._row_map(X.shape[1])
        labels = np.asarray(y if self._RATE is None else 2.0 * y - 1.0, dtype=np.float64)
        settings: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "fit_intercept": self.fit_intercept,
            "neighbours": self.neighbours,
            "budget": self.budget,
            "test_seed": self.test_seed,
        }
        rows = self._rows.apply(X)
        if self.solver_ == "objective":
            settings["mu"] = gaussian.mu(epsilon=self.epsilon, delta=self.delta)
            reach = 1.0 if self._RATE is not None else math.hypot(1.0, LENGTH)
            record = self._weighted(self._record(feature_bound=reach))
            self._weights, found = tilted(record, rows, labels, **settings)
        else:
            record = self._weighted(self._record(order=math.inf))
            ball = self._constraint()
            settings["radius"] = ball.radius if isinstance(ball, L1Ball) else self.radius
            if self.solver == "auto":
                settings["radius"] = WIDE_RADIUS
            self._weights, found = chosen_vertices(record, rows, labels, **settings)
        self.__dict__.pop("_stream", None)
        self.n_steps_, self.n_rows_ = int(found.details.get("steps", 1)), X.shape[0]
        self.learning_rate_, self.batch_size_ = 1.0, X.shape[0]
        self._progress = self._SCORE()
        self._publish()
        self._notes = notes
        said = (NO_IDS if ids is None else IDS, self._words_of_bounds(), SETTINGS, *self._notes)
        self.privacy_ = found.statement.with_assumptions(*said)

    def _weighted(self, record: Loss) -> Loss:
        """The loss with the weights of two classes, which are a function of the label."""
        table = by_class(getattr(self, "class_weight", None), getattr(self, "classes_", None))
        return record if table is None else by_label(record, *table.tolist())

    def _row_map(self, features: int) -> RowMap:
        return RowMap.of(
            None if is_private(self.bounds) else self.bounds,  # until they are found
            feature_bound=self.feature_bound,
            features=features,
            names=getattr(self, "feature_names_in_", None),
        )

    @property
    def bounds_(self) -> Array | None:
        """(low, high) of every column, given or found in private; None where there are none."""
        check_is_fitted(self, "privacy_")
        low, high = self._rows.low, self._rows.high
        return None if low is None or high is None else np.column_stack([low, high])

    def _warn_without_bounds(self) -> None:
        warn_of_targets(self)
        if not self._bounded_by():
            warn_of_columns()

    def _words_of_bounds(self) -> str:
        if is_private(self.bounds):
            return words_of_bounds(self, given=(), is_found=True)
        return words_of_bounds(self, given=self._bounded_by())

    def _bounded_by(self) -> list[str]:
        return [name for name in self._BOUNDS if getattr(self, name) is not None]
