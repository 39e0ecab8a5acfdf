"""private_search: penalty, passes or any other setting of an estimator, chosen within one ε.

The last part of the table is held out. Settings are fitted to the rest, each within its share of
the budget, and scored on the rows held out: 1 or 0 for a class, 1 − |error|/(high − low) for a
number, with noise. The best leaves, alone, and `noshuffle.tune` says what all of it costs: the
exact Gaussian composition of all runs (law="all"), or the bound of Papernot and Steinke (2022) on a
random number of them. No state.

>>> import numpy as np
>>> from noshuffle.convex import PrivateLogisticRegression
>>> x = np.random.default_rng(0).uniform(-1, 1, size=(4000, 2)); y = (x[:, 0] > 0).astype(int)
>>> model = PrivateLogisticRegression(solver="gd", bounds=(-1, 1), classes=[0, 1])
>>> found = private_search(model, x, y, [{"passes": 8}, {"passes": 32}], epsilon=4.0)
>>> bool(found.result.score(x, y) > 0.9), round(found.statement.epsilon, 3)
(True, 4.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.utils import _safe_indexing, indexable

from noshuffle.budget import Budget, Trial, Tuned, tune
from noshuffle.budget.search import INSIDE
from noshuffle.convex.arrays import Array
from noshuffle.errors import InvalidInput, open_unit

#: What all runs have in common.
_TAKEN = frozenset({"epsilon", "delta", "budget", "neighbours", "test_seed"})


def private_search(
    model: Any,
    X: Any,
    y: Any,
    settings: Sequence[Mapping[str, Any]],
    *,
    epsilon: float,
    delta: float = 1e-6,
    held_out: float = 0.2,
    law: str = "all",
    repeats: float = 20.0,
    budget: Budget | None = None,
) -> Tuned:
    """The best of some settings of an estimator (each a mapping of its parameters).

    `result` is the fitted estimator, whose `privacy_` is the statement of the whole search; the
    order of the rows is public, and the last `held_out` part of them is not learned from.

    Guarantees: everything returned is (ε, δ)-private; a run of more than its share is refused.
    """
    open_unit(held_out=held_out)
    if odd := sorted(_TAKEN.intersection(name for one in settings for name in one)):
        raise InvalidInput(
            f"settings must leave {odd[0]} to the search and its model, got it named"
        )
    indexable(X, y)
    rows = len(y)
    cut = rows - max(1, round(held_out * rows))
    if not 1 <= cut < rows:
        raise InvalidInput(f"{rows} rows cannot be parted; give more rows, or another held_out")
    parts = [(_safe_indexing(X, part), _safe_indexing(y, part)) for part in
             (np.arange(cut), np.arange(cut, rows))]  # fmt: skip

    def run(setting: Mapping[str, Any], trial: Trial) -> tuple[Any, Array]:
        own = clone(model).set_params(
            **setting, epsilon=trial.epsilon, delta=trial.delta, budget=trial
        )
        own.fit(*parts[0])
        # a copy: it has no raw score, and cannot go on under the share of one run
        return copy(own), _scores(own, *parts[1])

    found = tune(
        run,
        settings,
        epsilon=epsilon,
        delta=delta,
        law=law,
        repeats=repeats,
        neighbours=model.neighbours,
        unit="example",
        budget=budget,
    )
    if found.result is not None:
        own = found.result.privacy_.assumptions
        said = found.statement.with_assumptions(*(one for one in own if one != INSIDE))
        found = replace(found, statement=said)
        found.result.set_params(budget=budget)
        found.result.privacy_ = found.statement
    return found


def _scores(model: Any, X: Any, y: Any) -> Array:
    """One number between 0 and 1 for every row."""
    told = model.predict(X)
    if is_classifier(model):
        return np.asarray(told == np.asarray(y), dtype=np.float64)
    low, high = model._limits()
    errors = np.abs(told - np.clip(np.asarray(y, dtype=np.float64), low, high))
    return np.asarray(1.0 - errors / (high - low))
