"""Private gradient-boosted trees: PrivateTreesClassifier and PrivateTreesRegressor (`trees_rule`).

How many trees are worth their noise follows from N = nμ, the number of rows in units of the noise,
chosen on Elec2, Bank, Adult and breast cancer while looking at test accuracies; it moves accuracy,
never privacy:

    T = 1.5·√N within [10, 300],   D = log₂(N/√T)/1.7 within [2, 6],   η = 0.3,   T/9 histograms

They beat linear models where columns act together and rows are many (benchmarks/RESULTS.md); on a
few hundred rows take `PrivateLogisticRegression`.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.uniform(-1, 1, size=(20_000, 2)); y = (x[:, 0] * x[:, 1] > 0).astype(int)   # no line
>>> model = PrivateTreesClassifier(epsilon=2.0, bounds=(-1, 1), classes=[0, 1], test_seed=0)
>>> bool(model.fit(x, y).score(x, y) > 0.85)
True
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin

from noshuffle.convex.anew import anew
from noshuffle.convex.arrays import Array
from noshuffle.convex.losses import squared
from noshuffle.convex.margins import MarginLoss, PerMargin, chances, logistic_loss
from noshuffle.convex.readings import PrivateTable
from noshuffle.convex.rows import RowMap
from noshuffle.convex.targets import ClassTargets, NumberTargets
from noshuffle.convex.trees_rule import RandomTree, TreesRule, codes_of
from noshuffle.errors import positive, whole


def trees_for(*, rows: int, mu: float) -> tuple[int, int]:
    """(trees, depth) of the docstring."""
    worth = rows * mu
    trees = int(min(max(1.5 * math.sqrt(worth), 10.0), 300.0))
    depth = math.log2(max(worth / math.sqrt(trees), 2.0)) / 1.7
    return trees, int(min(max(depth, 2.0), 6.0))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTrees(PrivateTable):
    """Boosted trees. See `PrivateTable` for the other parameters.

    Parameters
    ----------
    n_estimators, max_depth : trees and their levels; None: by rule, from public numbers.
    learning_rate : what a tree's leaves are multiplied by.
    random_state : of the splits, which are public.
    """

    n_estimators: int | None = None
    max_depth: int | None = None
    learning_rate: float = 0.3
    random_state: int = 0

    def _fit(self, X: Any, y: Any, loss: MarginLoss, outputs: int, **settings: Any) -> Self:
        trees, depth = trees_for(rows=X.shape[0], mu=min(self._mu(), 1e9))
        trees = trees if self.n_estimators is None else self.n_estimators
        depth = depth if self.max_depth is None else self.max_depth
        whole(n_estimators=trees, max_depth=depth, random_state=self.random_state + 1)
        positive(learning_rate=self.learning_rate)
        readings = max(1, round(trees / 9))
        rule = TreesRule(
            loss=loss,
            features=X.shape[1],
            outputs=outputs,
            depth=min(depth, 12),
            rate=self.learning_rate,
            readings=readings,
            seed=self.random_state,
        )
        self._read(rule, X, y, readings=readings + trees, **settings)
        self._trees: list[RandomTree] = rule.trees
        return self

    def _prepare(self, x: Array, rows: RowMap) -> Array:
        assert rows.low is not None
        assert rows.high is not None
        return codes_of(x, rows.low, rows.high)  # type: ignore[return-value]

    def _margins(self, X: Any) -> Array:
        codes: Any = self._prepare(self._fitted_rows(X), self._rows)
        out = np.zeros((len(codes), self._trees[0].leaves.shape[1]))
        for tree in self._trees:
            out += tree.leaves[tree.leaf_of(codes)]
        return out


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTreesClassifier(ClassTargets, ClassifierMixin, PrivateTrees):  # type: ignore[misc]
    """Boosted trees for classes. `classes`: all that may come, known beforehand."""

    classes: Any = None

    @anew
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Learn from a table; `run` is a folder for the evidence (plan, ledger, statement)."""
        X, y = self._checked(X, y)
        notes = self._take_classes(y)
        codes, classes = self._targets(y), len(self.classes_)
        outputs = 1 if classes == 2 else classes
        return self._fit(X, codes, logistic_loss(classes), outputs, ids=ids, run=run, notes=notes)

    def predict_proba(self, X: Any) -> Array:
        """Probability of every class, in the order of classes_."""
        return chances(self._margins(X))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateTreesRegressor(NumberTargets, RegressorMixin, PrivateTrees):  # type: ignore[misc]
    """Boosted trees for numbers. `target_bounds`: (low, high) of y, known beforehand."""

    target_bounds: tuple[float, float] = (-1.0, 1.0)

    @anew
    def fit(
        self,
        X: Any,
        y: Any,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Learn from a table; `run` is a folder for the evidence (plan, ledger, statement)."""
        X, y = self._checked(X, y)
        loss = PerMargin(squared(radius=np.inf))
        return self._fit(X, self._targets(y), loss, 1, ids=ids, run=run)

    def predict(self, X: Any) -> Array:
        """The expected target of every row, inside the target bounds."""
        return np.asarray(np.clip(self._told(self._margins(X)[:, 0]), *self._limits()))
