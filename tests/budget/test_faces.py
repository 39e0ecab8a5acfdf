"""Estimators, searches over them and solvers draw on a budget."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from noshuffle import Budget
from noshuffle.accounting import gaussian
from noshuffle.convex import PrivateLogisticRegression
from noshuffle.convex.losses import logistic
from noshuffle.convex.solvers import dp_gd, ftrl_ls, noisy_max, objective_perturbation
from noshuffle.errors import BudgetExceeded
from noshuffle.rounding import up

DELTA = 1e-5


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path / "budget", epsilon=6.0, delta=DELTA)


def table(rows: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(seed)
    x = made.uniform(-1, 1, (rows, 3))
    return x, (x[:, 0] + 0.3 * made.standard_normal(rows) > 0).astype(int)


def model(**more: Any) -> PrivateLogisticRegression:
    return PrivateLogisticRegression(
        epsilon=1.0, delta=DELTA, classes=[0, 1], feature_bound=2.0, mechanism="tree", **more
    )


def test_a_grid_search_of_seven_fits_states_what_seven_fits_cost(budget: Budget) -> None:
    search = GridSearchCV(model(budget=budget), {"radius": [1.0, 2.0, 4.0]}, cv=2)
    search.fit(*table())  # 3 settings × 2 folds, and the best once more
    entries = budget.entries()
    assert len(entries) == 7
    mu = math.sqrt(sum(entry.cost.mu**2 for entry in entries))
    alone = gaussian.mu(epsilon=1.0, delta=DELTA)
    assert math.isclose(mu, alone * math.sqrt(7), rel_tol=1e-9)
    wanted = gaussian.epsilon(mu=mu, delta=DELTA)
    said = search.best_estimator_.privacy_.words()
    assert "This is run 7 of 7 on this data" in said
    assert f"cost ε = {up(wanted)} at δ = 1e-05, exact" in said
    assert "are not counted here" not in said
    assert wanted > 2.5 * search.best_estimator_.privacy_.epsilon


def test_a_search_stops_where_the_budget_ends(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.5, delta=DELTA)
    scores = cross_val_score(model(budget=budget), *table(), cv=4, error_score=np.nan)
    assert np.isnan(scores).sum() == 2  # two fits of ε = 1 fit into ε = 1.5
    assert len(budget.entries()) == 2
    with pytest.raises(BudgetExceeded):
        model(budget=budget).fit(*table())


def test_a_budget_survives_clone_and_pickle(budget: Budget, tmp_path: Path) -> None:
    assert clone(model(budget=budget)).budget is budget
    fitted = model(budget=budget, horizon=120)
    x, y = table()
    fitted.partial_fit(x[:40], y[:40])
    fitted.save(tmp_path / "stream")
    again = PrivateLogisticRegression.load(tmp_path / "stream")
    assert again.budget.folder == budget.folder.resolve()
    again.partial_fit(x[40:], y[40:])
    assert len(budget.entries()) == 1  # the same stream, moved and loaded


def test_copies_of_a_stream_pay_for_themselves_in_later_phases_too(
    budget: Budget, tmp_path: Path
) -> None:
    x, y = table(1700)
    stream = model(budget=budget, batch_size=50).partial_fit(x[:1500], y[:1500])
    stream.save(tmp_path / "saved")
    assert (tmp_path / "saved/phase-2").exists()
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    del stream  # and with it the lock of the folder

    def goes_on(name: str, *, rows: int) -> None:
        again = PrivateLogisticRegression.load(tmp_path / name)
        part = slice(again.n_rows_, again.n_rows_ + rows)
        again.partial_fit(x[part], y[part]).save(tmp_path / name)

    one = gaussian.mu(epsilon=1.0, delta=DELTA)
    for name, runs in (("saved", 1), ("copy", 2), ("saved", 2), ("copy", 2)):
        goes_on(name, rows=50)
        assert len(budget.entries()) == runs
        assert math.isclose(budget.total().mu, one * math.sqrt(runs), rel_tol=1e-9)


def test_solvers_are_charged_for_their_proof(budget: Budget) -> None:
    x, y = table()
    x, y = x / np.linalg.norm(x, axis=1, keepdims=True), 2.0 * y - 1
    found = dp_gd(logistic(), x, y, epsilon=1.0, delta=DELTA, steps=4, budget=budget)
    assert "This is run 1 of 1" in found.statement.words()
    assert math.isclose(budget.total().mu, found.statement.mu)
    ftrl_ls(x, y, epsilon=0.5, delta=DELTA, radius=1.0, budget=budget)
    assert len(budget.entries()) == 2
    with pytest.raises(BudgetExceeded):  # a direct proof of (ε, δ) is dearer than a Gaussian one
        objective_perturbation(logistic(), x, y, epsilon=2.0, delta=1e-6, ridge=0.1, budget=budget)
    assert len(budget.entries()) == 3  # its reservation stays


def test_pure_choices(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=0.0)
    scores = np.array([0.0, 5.0])
    choice = noisy_max(scores, epsilon=0.6, sensitivity=1.0, budget=budget)
    assert "run 1 of 1" in choice.statement.words()
    with pytest.raises(BudgetExceeded):
        noisy_max(scores, epsilon=0.6, sensitivity=1.0, budget=budget)
