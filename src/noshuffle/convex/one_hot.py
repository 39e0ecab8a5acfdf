"""PrivateOneHot: indicators of the categories of text columns, which it finds in private.

The categories that rows happen to have are no public knowledge: a rare one names its row. Those of
every column are counted, normal noise is added, and the ones above a threshold are kept
(`accounting.sparse_histogram` has the proof and the exact δ); a cell of any other category, or an
empty one, has no indicator. Categories that are known beforehand are given and cost nothing. Cells
that are equal are one value in one form, made of each cell alone (`_value`): of 1, True and 1.0, or
0.0 and −0.0, the one to be shown would else be the form of the first row that has it.
Where units have several rows (`rows_per_unit`, `ids`), units are counted: each has in a column at
most k values, once each, the most frequent of its own rows. Together that is one row of k·m
columns, so δ is that of `SparseHistogram(columns=k·m)`, as exact.
Indicators lie in [0, 1], so bounds=(0, 1) is public for the model after it. One release, of
everything kept and its noisy count; a budget is charged (μ, s), a Gaussian that fails with
probability s.

>>> rng = np.random.default_rng(0)
>>> x = rng.choice(["Oslo", "Rome"], size=(2000, 1)).astype(object); x[0, 0] = "Ys"
>>> found = PrivateOneHot(test_seed=0).fit(x)
>>> found.get_feature_names_out().tolist(), found.transform(x[:2]).sum(axis=1).tolist()
(['x0=Oslo', 'x0=Rome'], [0.0, 1.0])
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from noshuffle.accounting.sparse_histogram import SparseHistogram
from noshuffle.convex.anew import anew
from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.base import guarantee
from noshuffle.convex.solvers.problem import source_of
from noshuffle.convex.stream_units import one_id_each
from noshuffle.convex.weighting import NEEDS_IDS
from noshuffle.errors import InvalidInput, NoshuffleError, instance_of, whole
from noshuffle.noise.grid import grid_step
from noshuffle.noise.laws import KeyedDraws
from noshuffle.release.facts import OTHER_RUNS
from noshuffle.release.repeated import remember, warn_if_fitted_before
from noshuffle.release.unit_ids import as_ids
from noshuffle.statement import PrivacyStatement

PRIVATE = "private"
#: How pandas writes cells that are empty.
_MISSING = ("<NA>", "NaT", "")
_GIVEN = "The categories that were given are public knowledge, known without looking at the data."
_MANY_ROWS = (
    "A unit is a user, told by the ids given with the rows; each counts for at most {} of its "
    "values in a column, and the guarantee covers all of its rows. All settings were chosen "
    "without the data."
)
_Value = str | int | float


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateOneHot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Indicators of categories.

    Parameters
    ----------
    epsilon, delta : the guarantee of the choice of categories.
    categories : "private" finds them; or public ones, a list for each column, or {column: list}
        for some of them (by name or place), the others being found.
    neighbours : "zero-out" or "replace-one".
    rows_per_unit : units (users) may have several rows, told by `ids` of `fit`; each counts for at
        most so many values of a column. None: a unit has one row, and an id that comes twice is
        refused.
    budget : a `noshuffle.Budget` that all fits on the same rows draw on.
    test_seed : reproducible noise for tests; the statement then says NOT PRIVATE.

    After `fit`: `categories_` (of every column, sorted), `counts_` (noisy, beside them; of given
    categories None), `privacy_`, and `law_`, the noise and threshold.
    """

    epsilon: float = 0.5
    delta: float = 1e-6
    categories: Any = PRIVATE
    neighbours: str = "zero-out"
    rows_per_unit: int | None = None
    budget: Any = None
    test_seed: int | str | None = None

    @anew
    def fit(self, X: Any, y: Any = None, *, ids: Iterable[Hashable] | None = None) -> Self:
        """Release the categories of a table; `ids` say whose the rows are.

        Guarantees: (ε, δ) of everything that is kept, as `law_` has it, for all rows of a unit;
        cells that are empty (None, NaN, "") add nothing.
        """
        x = self._cells(X, reset=True)
        units = self._units(ids, rows=len(x))
        given = self._given(x.shape[1])
        open_columns = [i for i, listed in enumerate(given) if listed is None]
        self.law_: SparseHistogram | None = None
        self.privacy_: PrivacyStatement | None = None
        self.categories_: list[list[Hashable]] = [list(listed or ()) for listed in given]
        self.counts_: list[Array | None] = [None] * len(given)
        if open_columns:
            self._find(x, open_columns, units)
        return self

    def _units(self, ids: Iterable[Hashable] | None, *, rows: int) -> list[int] | None:
        """The unit of every row by number; None where each row is its own."""
        if self.rows_per_unit is not None:
            whole(rows_per_unit=self.rows_per_unit)
            if ids is None:
                raise InvalidInput(NEEDS_IDS)
        if ids is None:
            return None
        firsts, place = np.unique(as_ids(list(ids)), return_inverse=True)
        one_id_each(place, rows)
        if self.rows_per_unit is None and len(firsts) < rows:
            raise InvalidInput(
                "an id came twice, and a unit has one row; give rows_per_unit= for units of several"
            )
        return None if self.rows_per_unit is None else place.tolist()

    def _find(self, x: NDArray[Any], columns: list[int], units: list[int] | None) -> None:
        law = SparseHistogram.fit(
            epsilon=self.epsilon,
            delta=self.delta,
            columns=len(columns) * (self.rows_per_unit or 1),
            neighbours=self.neighbours,
        )
        if self.budget is None and self.test_seed is None:
            codes = [[hash(cell) % 2**50 for cell in row] for row in x[:, columns].tolist()]
            remember(warn_if_fitted_before(np.array(codes, dtype=np.float64)))
        source = source_of(self.test_seed)
        said: dict[str, Any] = {
            "sensitivity": law.squared_sensitivity**0.5,
            "noise": law.sigma,
            "rows": len(x) if units is None else None,
            "notes": () if units is None else (_MANY_ROWS.format(self.rows_per_unit),),
            "neighbours": self.neighbours,
            "is_test": source.is_test,
            "mechanism": f"counts of the categories of {len(columns)} columns, normal noise of "
            f"deviation {law.sigma:.6g}, shown above {law.threshold:.6g}",
        }
        # What a budget adds up: a Gaussian mechanism, and the chance that it fails.
        told = [
            guarantee(epsilon=self.epsilon, delta=self.delta, **said),
            guarantee(mu=law.mu, delta=self.delta, **said),
            guarantee(epsilon=0.0, delta=law.slack, **said),
        ]
        unit = "example" if units is None else "user"
        statement, *parts = (replace(one, unit=unit) for one in told)
        charges: list[Any] = []
        try:
            for part in () if self.budget is None else parts:
                charges.append(self.budget.open("one-hot", part))
        except NoshuffleError:
            for charge in charges:  # what was reserved before the refusal is not spent
                charge.settle(replace(parts[0], epsilon=0.0, mu=0.0, rho=0.0))
            raise
        draws = KeyedDraws(source, name="categories")
        step = grid_step(law.sigma)
        for i in columns:
            cells = x[:, i].tolist()
            if units is not None:
                cells = _counted_values(cells, units, most=self.rows_per_unit or 1)
            counted = Counter(cell for cell in cells if cell is not None)
            names = sorted(counted, key=_order)
            raw = np.array([counted[name] for name in names], dtype=np.float64)
            noise = law.sigma * draws.standard_normal(len(names))
            noisy = draws.release(raw, noise, scale=law.sigma)
            kept = noisy > law.threshold + step  # rounding moves a count by one step at most
            self.categories_[i] = [name for name, is_kept in zip(names, kept) if is_kept]
            self.counts_[i] = noisy[kept]
        for charge, part in zip(charges, parts):
            charge.settle(part)
        if charges:
            statement = statement.counted_in(charges[0].words(), OTHER_RUNS)
        if len(columns) < x.shape[1]:
            statement = statement.with_assumptions(_GIVEN)
        self.law_, self.privacy_ = law, statement

    def transform(self, X: Any) -> Array:
        """One column of 0 and 1 for every category."""
        check_is_fitted(self, "categories_")
        x = self._cells(X, reset=False)
        out, start = np.zeros((len(x), sum(map(len, self.categories_)))), 0
        for i, names in enumerate(self.categories_):
            places = {_value(name): start + k for k, name in enumerate(names)}
            found = np.array([places.get(cell, -1) for cell in x[:, i].tolist()])
            rows = np.flatnonzero(found >= 0)
            out[rows, found[rows]] = 1.0
            start += len(names)
        return out

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """column=category for every indicator."""
        check_is_fitted(self, "categories_")
        names = getattr(self, "feature_names_in_", input_features)
        if names is None:
            names = [f"x{i}" for i in range(self.n_features_in_)]
        told = [f"{n}={value}" for n, values in zip(names, self.categories_) for value in values]
        return np.array(told, dtype=object)

    def _cells(self, X: Any, *, reset: bool) -> NDArray[Any]:
        """The value of every cell; as objects, or one cell would decide on the type of others."""
        if getattr(getattr(X, "dtype", None), "kind", "") == "c":
            raise InvalidInput(
                "X must hold categories, got complex numbers; Complex data not supported"
            )
        found = validate_data(self, X, dtype=object, ensure_all_finite=False, reset=reset)
        out = np.empty(found.shape, dtype=object)
        out.ravel()[:] = [_value(cell) for cell in found.ravel().tolist()]
        return out

    def _given(self, columns: int) -> list[Sequence[Hashable] | None]:
        """Of every column the categories that are public; None: to be found."""
        told = self.categories
        if isinstance(told, str):
            if told != PRIVATE:
                raise InvalidInput(f"categories must be lists or 'private', got {told!r}")
            return [None] * columns
        instance_of((Mapping, Sequence), categories=told)
        if not isinstance(told, Mapping):
            if len(told) != columns:
                raise InvalidInput(f"categories need a list for each of {columns} columns")
            return [list(listed) for listed in told]
        names = list(getattr(self, "feature_names_in_", range(columns)))
        unknown = [name for name in told if name not in names]
        if unknown:
            raise InvalidInput(f"categories name {unknown[0]!r}, which is no column: {names}")
        return [list(told[name]) if name in told else None for name in names]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.test_seed is None
        tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan = True
        return tags


def _order(value: _Value) -> tuple[bool, _Value]:
    """Numbers come before text."""
    return isinstance(value, str), value


def _counted_values(
    cells: list[_Value | None], units: list[int], *, most: int
) -> list[_Value | None]:
    """Of every unit the `most` values that its cells have most often (ties: the first in order).

    Guarantees: a unit adds `most` values at most, all different, which depend on its cells alone.
    """
    own: dict[int, Counter[_Value]] = defaultdict(Counter)
    for unit, cell in zip(units, cells):
        if cell is not None:
            own[unit][cell] += 1
    return [
        value
        for counts in own.values()
        for value in sorted(counts, key=lambda v: (-counts[v], _order(v)))[:most]
    ]


def _value(cell: Any) -> _Value | None:
    """What a cell counts as: text, a number, or None where it is empty.

    Guarantees: values that are equal look alike, to the last bit.
    """
    if isinstance(cell, str):
        return str.__str__(cell) or None
    if isinstance(cell, bool | int | float | np.bool_ | np.integer | np.floating):
        if cell != cell:
            return None
        return int(cell) if math.isfinite(cell) and cell == int(cell) else float(cell)
    return None if cell is None or str(cell) in _MISSING else str(cell)
