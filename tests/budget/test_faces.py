"""Every way to a release draws on a budget: estimators and searches, solvers, servers."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from noshuffle import Budget, Plan
from noshuffle.accounting import gaussian
from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression
from noshuffle.convex.losses import logistic
from noshuffle.convex.solvers import dp_gd, ftrl_ls, noisy_max, objective_perturbation
from noshuffle.errors import (
    BudgetExceeded,
    NoshuffleError,
)
from noshuffle.federated import ServerOptimizer
from noshuffle.release.repeated import RepeatedFit, sketch
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


def test_repeated_fits_without_a_budget_warn() -> None:
    x, y = table(seed=int(np.random.SeedSequence().entropy % 2**32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatedFit)
        model().fit(x, y)
        model().fit(*table(seed=99))  # other rows
        model().fit(np.repeat(x[:2], 50, 0), np.tile([0, 1], 50))  # few distinct rows say nothing
    with pytest.warns(RepeatedFit, match="fit 2 of the same rows"):
        model().fit(x, y)
    with pytest.warns(RepeatedFit, match="fit 3"):  # a fold of them
        model().fit(x[::2], y[::2])
    regression = PrivateLinearRegression(epsilon=1.0, target_bounds=(-1, 1), mechanism="tree")
    with pytest.warns(RepeatedFit):
        regression.fit(x[20:], x[20:, 0])


def test_a_fit_that_was_refused_is_not_counted() -> None:
    x, y = table(seed=int(np.random.SeedSequence().entropy % 2**32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatedFit)
        for solver in ("gd", "ftrl"):
            for _ in range(2):
                with pytest.raises(NoshuffleError):
                    model(solver=solver).fit(x, y, ids=[1] * len(y))
        model().fit(x, y)
    with pytest.warns(RepeatedFit, match="fit 2 of the same rows"):
        model().fit(x, y)


@pytest.mark.parametrize("kind", ["numbers", "coins", "one column"])
def test_long_tables_are_known_by_their_first_rows(kind: str) -> None:
    """Also where the two columns that order the rows tell few of them apart, or none."""
    rng = np.random.default_rng(np.random.SeedSequence(7))
    x = rng.standard_normal((6000, 9))
    x[:, : {"numbers": 0, "coins": 8, "one column": 8}[kind]] = 0.0
    x[:, :8] += rng.integers(2, size=(6000, 8)) if kind == "coins" else 0.0
    own = sketch(x)
    assert len(own) == 64
    assert own == sketch(x[::-1]) == sketch(np.asfortranarray(x)) == sketch(np.vstack([x, x[:9]]))
    assert len(own & sketch(x[:4800])) > 24  # a fold
    assert len(own & sketch(x[:800])) < 32  # a seventh of the rows: not the same data
    assert not own & sketch(x + 1.0)
    assert not sketch(np.repeat(x[:2000], 3, axis=0))


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


def test_a_stream_of_unknown_length_is_one_run(budget: Budget) -> None:
    x, y = table(1500)
    stream = model(budget=budget)
    for part in range(0, 1500, 500):
        stream.partial_fit(x[part : part + 500], y[part : part + 500])
    assert len(budget.entries()) == 1
    assert math.isclose(budget.total().mu, gaussian.mu(epsilon=1.0, delta=DELTA), rel_tol=1e-9)


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


def server(budget: Budget, plan: Plan) -> ServerOptimizer:
    return ServerOptimizer(
        {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2, budget=budget,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
