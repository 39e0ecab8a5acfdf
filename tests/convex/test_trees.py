"""Boosted trees and bounds found in private: what a row adds, what is stated, what is learned."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_regression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from noshuffle import Budget
from noshuffle.accounting import gaussian
from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePCA,
    PrivateScaler,
    PrivateTreesClassifier,
    PrivateTreesRegressor,
)
from noshuffle.convex.losses import logistic, squared
from noshuffle.convex.margins import PerMargin, Softmax
from noshuffle.convex.pca import SecondMoments
from noshuffle.convex.phases import PhaseBudget, make_phase
from noshuffle.convex.ranges import FIRST_BINS, FOUND, RangeRule
from noshuffle.convex.trees_rule import BINS, TreesRule
from noshuffle.errors import InvalidInput, NoshuffleError, ParticipationViolation, Unsupported
from noshuffle.release.verify import verify
from noshuffle.strategies import identity

RNG = np.random.default_rng(0)


def crossed(n: int = 6000) -> tuple[Any, Any]:
    """No line parts these classes: y says whether two columns have one sign."""
    x = RNG.uniform(-1, 1, size=(n, 3)) * [1.0, 40.0, 1.0] + [0.0, 0.0, 7.0]
    return x, np.where(x[:, 0] * x[:, 1] > 0, "same", "other")


def phase(rows: int, passes: int) -> Any:
    budget = PhaseBudget(1.0, 1e-6, identity())
    return make_phase(budget, rows=rows, passes=passes, batch_size=rows)


KINDS = {
    "two": (PerMargin(logistic()), 1, lambda n: RNG.integers(2, size=n)),
    "four": (Softmax(), 4, lambda n: RNG.integers(4, size=n)),
    "numbers": (PerMargin(squared(radius=np.inf)), 1, lambda n: RNG.uniform(-1, 1, n)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_adds_at_most_the_clip_norm(kind: str) -> None:
    """Each row alone, at margins near and far; some row reaches nearly all of the bound."""
    loss, outputs, draw = KINDS[kind]
    made: dict[str, Any] = {"loss": loss, "features": 3, "outputs": outputs, "depth": 2}
    rule = TreesRule(**made, rate=0.3, readings=1)
    rule.start(phase(200, 5))
    x, y = RNG.integers(BINS, size=(200, 3)).astype(np.uint8), draw(200)
    first = [np.linalg.norm(rule.clipped_sum(x[i : i + 1], y[i : i + 1])) for i in range(5)]
    np.testing.assert_allclose(first, rule.clip_norm)
    rule.update(rule.clipped_sum(x, y) / 200, step=0)
    norms = []
    for i in range(200):
        rule._margins = RNG.normal(size=(1, outputs)) * 10.0 ** RNG.uniform(-1, 2)
        norms.append(np.linalg.norm(rule.clipped_sum(x[i : i + 1], y[i : i + 1])))
    assert 0.9 * rule.clip_norm < max(norms) <= rule.clip_norm


def test_two_classes_are_never_clipped() -> None:
    """S² is below the least (1 + p)/(p²(1 − p)), the fifth power of the golden ratio."""
    p = np.linspace(0.001, 0.999, 2000)
    assert np.min((1 + p) / (p**2 * (1 - p))) == pytest.approx(((1 + 5**0.5) / 2) ** 5, rel=1e-5)
    assert 3.3**2 < ((1 + 5**0.5) / 2) ** 5


def test_trees_learn_what_no_line_can() -> None:
    x, y = crossed()
    held, told = crossed(2000)
    made: dict[str, Any] = {"epsilon": 4.0, "classes": ["other", "same"], "test_seed": 0}
    model = PrivateTreesClassifier(**made).fit(x, y)
    assert model.score(held, told) > 0.8
    assert PrivateLogisticRegression(bounds=(-40, 40), **made).fit(x, y).score(held, told) < 0.6
    low, high = model.bounds_.T
    assert (low <= [-0.9, -36, 6.2]).all()
    assert (low >= [-1, -64, 0]).all()
    assert (high >= [0.9, 36, 7.8]).all()
    assert (high <= [1, 64, 8]).all()
    np.testing.assert_allclose(model.predict_proba(held).sum(axis=1), 1.0)
    steps = model.plan_.noise_multiplier / math.sqrt(model.n_steps_)
    assert gaussian.epsilon(mu=1 / steps, delta=1e-6) == pytest.approx(4.0, rel=1e-3)
    assert FOUND in model.privacy_.assumptions
    assert "NOT PRIVATE" in model.privacy_.words()


@pytest.mark.slow
def test_numbers_and_more_classes() -> None:
    x = RNG.uniform(0, 1, size=(4000, 2))
    z = np.sin(6 * x[:, 0])
    numbers = PrivateTreesRegressor(epsilon=4.0, bounds=(0, 1), test_seed=0).fit(x, z)
    assert numbers.score(x, z) > 0.8
    classes = np.floor(3 * x[:, 0]).astype(int)
    three = PrivateTreesClassifier(epsilon=4.0, bounds=(0, 1), test_seed=0).fit(x, classes)
    assert three.score(x, classes) > 0.85
    assert three.decision_function(x[:2]).shape == (2, 3)


def test_noise_of_many_trees_is_not_learned() -> None:
    """Targets off the middle of their bounds: the mean alone was twice as near as the trees."""
    x = RNG.uniform(-1, 1, size=(3000, 3))
    z = np.sin(3 * x[:, 0]) * x[:, 1]
    settings = {"epsilon": 4.0, "bounds": (-1, 1), "target_bounds": (-1, 8), "test_seed": 0}
    assert PrivateTreesRegressor(**settings).fit(x, z).score(x, z) > 0.1


def test_of_many_rows_a_tree_that_found_nothing_adds_nothing() -> None:
    """By the squares of the last trees alone the error is 0.17 of the variance."""
    x, y = make_regression(8000, 5, n_informative=3, noise=20.0, random_state=0)
    settings = {"epsilon": 16.0, "bounds": (-3, 3), "target_bounds": (-500, 500)}
    model = PrivateTreesRegressor(**settings, test_seed=0).fit(x, y)
    assert np.mean((y - model.predict(x)) ** 2) / np.var(y) < 0.155


def test_where_nothing_can_be_seen_trees_are_near_the_mean() -> None:
    """Noise of 30 trees had twice the spread of such targets, and nine times that of the others."""
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(1500, 2)), rng.standard_t(2, size=1500).clip(-50, 50)
    flat, errors = 8 + 0.3 * rng.normal(size=1500), []
    for y, high in ((z, 50), (flat, 10)):
        model = PrivateTreesRegressor(bounds=(-3, 3), target_bounds=(-high, high), test_seed=0)
        errors.append(np.mean((y - model.fit(x, y).predict(x)) ** 2) / np.var(y))
    assert errors[0] < 1.1
    assert errors[1] < 1.7


def test_the_noise_of_a_leaf_is_that_of_the_plan() -> None:
    """Leaves of rows that pull to neither side, against what the noise says; 3/2 would fail."""
    x, y = np.zeros((4000, 1)), np.arange(4000) % 2
    found = []
    for seed in range(40):
        model = PrivateTreesClassifier(
            bounds=(-1, 1), classes=[0, 1], n_estimators=1, max_depth=1, learning_rate=1.0
        ).set_params(test_seed=seed)
        model.fit(x, y)
        tree, hidden = model._trees[0], model.plan_.noise_multiplier
        at = tree.leaf_of(np.full((1, 1), BINS // 2, dtype=np.uint8))  # where all rows are
        found.append(tree.leaves[at, 0] * (1000.0 + hidden) / hidden)  # H = 4000/4
    assert 0.75 < np.std(found) < 1.25


def test_ranges_of_private_bounds() -> None:
    """Without noise: zeros, one sign, heavy tails; rows of weight 0 are not counted."""
    n = 4000
    x = np.column_stack(
        [np.zeros(n), RNG.uniform(5, 7, n), -RNG.uniform(100, 120, n), RNG.standard_cauchy(n)]
    )
    rule = RangeRule(None, columns=4, clip_norm=1.0, repeats=1)
    plan = phase(n, 2)
    rule.start(plan)
    rule._deviation = 0.0
    for step in range(2):
        sums = rule.clipped_sum(x, np.zeros(n))
        assert np.linalg.norm(rule.clipped_sum(x[:1], np.zeros(1))) == pytest.approx(1.0)
        assert not rule.clipped_sum(x, np.zeros(n), np.zeros(n)).any()
        rule.update(sums / n, step=step)
    low, high = rule.bounds.T
    assert low[0] <= 0 < high[0] < 1e-4
    np.testing.assert_allclose([low[1], high[1]], [5, 7], atol=0.15)
    np.testing.assert_allclose([low[2], high[2]], [-120, -100], atol=3)
    np.testing.assert_allclose(rule.quantile(0.5)[1:3], np.median(x, 0)[1:3], rtol=0.01)
    assert rule.first_bins(np.array([[1e300], [-1e300], [0.0]])).ravel().tolist() == [
        *(FIRST_BINS - 1, 0, FIRST_BINS // 2)
    ]


def test_linear_models_find_their_bounds() -> None:
    """As good as with known bounds, at columns of unlike size; the same ε covers it."""
    x = RNG.normal(size=(4000, 3)) * [0.1, 1.0, 1e4] + [5.0, 0.0, -1e5]
    y = ((x - x.mean(0)) / x.std(0)).sum(1) > 0
    made: dict[str, Any] = {"classes": [False, True], "test_seed": 0}
    found = PrivateLogisticRegression(bounds="private", **made).fit(x, y)
    known = PrivateLogisticRegression(bounds=np.quantile(x, [0, 1], 0).T, **made).fit(x, y)
    assert found.score(x, y) > known.score(x, y) - 0.03 > 0.85
    assert found.privacy_.epsilon == pytest.approx(known.privacy_.epsilon, rel=1e-6)
    assert found.plan_.noise_multiplier > known.plan_.noise_multiplier
    assert FOUND in found.privacy_.assumptions
    assert found.bounds_ is not None
    assert (found.bounds_[:, 0] > [4.0, -8, -(2**18)]).all()
    for solver in ("ftrl", "objective"):
        with pytest.raises(Unsupported, match="private"):
            clone(found).set_params(solver=solver).fit(x, y)
    with pytest.raises(Unsupported, match="private"):
        clone(found).partial_fit(x, y)
    again = PrivateLinearRegression(bounds="private", inference=True, test_seed=0, epsilon=4.0)
    wide = np.clip(x[:, 1] / 4, -1, 1)
    told = again.fit(x, wide).intervals()
    assert told.estimate[1] == pytest.approx(0.25, abs=0.03)  # half a percent is clamped
    assert 0 < told.deviation[1] < 0.01


@pytest.mark.filterwarnings("ignore")
def test_budget_run_folder_ids_and_refusals(tmp_path: Any) -> None:
    x, y = crossed(300)
    budget = Budget(tmp_path / "b", epsilon=1.2, delta=1e-6)
    model = PrivateTreesClassifier(budget=budget, n_estimators=10)
    model.fit(x, y, ids=range(300), run=tmp_path / "run")
    assert verify(tmp_path / "run").answer == "PROVED"
    with pytest.raises(NoshuffleError, match="the limit is"):
        clone(model).fit(x, y)
    with pytest.raises(ParticipationViolation, match="twice"):
        PrivateTreesClassifier().fit(x, y, ids=[0] * 300)
    for bad in ({"bounds": None}, {"bounds": (1, 0)}, {"n_estimators": 0}, {"epsilon": -1.0}):
        with pytest.raises(NoshuffleError):
            PrivateTreesClassifier(**bad).fit(x, y)
    with pytest.raises(ValueError, match="NaN"):
        PrivateTreesClassifier().fit(np.where(x > 7, np.nan, x), y)
    with pytest.raises(InvalidInput, match="real numbers"):
        PrivateTreesClassifier().fit(x + 0j, y)


def test_components_of_second_moments() -> None:
    """A row adds at most one; the noise of an entry is that of the plan, whatever the data."""
    rule = SecondMoments(3)
    for size in (0.1, 1.0, 50.0):
        x = RNG.normal(size=(1, 3)) * size
        norm = np.linalg.norm(rule.clipped_sum(x, np.zeros(1)))
        assert norm <= 1
        assert size < 50 or norm > 0.999
    x = RNG.normal(size=(5000, 2)) @ [[0.4, 0.4, 0, 0], [0, 0, 0.1, -0.1]] + [0, 0.2, 0, 0]
    model = PrivatePCA(n_components=2, bounds=(-1, 1), epsilon=4.0, test_seed=0).fit(x)
    assert abs(model.components_[0] @ [0.5**0.5, 0.5**0.5, 0, 0]) > 0.99
    np.testing.assert_allclose(model.mean_, x.mean(0), atol=0.05)
    assert model.transform(x).shape == (5000, 2)
    assert np.abs(model.inverse_transform(model.transform(x)) - np.clip(x, -1, 1)).mean() < 0.05
    none, found = np.zeros((1000, 30)), []
    for seed in range(4):
        empty = PrivatePCA(bounds=(-1, 1), test_seed=seed).fit(none)
        found.append(np.sqrt(2 * np.mean(empty.explained_variance_**2)))
    unit = empty.plan_.noise_multiplier * 11 / 1000  # C² = 1 + 30/3; a semicircle of radius s√(2p)
    assert 0.8 < np.mean(found) / (unit * math.sqrt(15)) < 1.25
    with pytest.raises(InvalidInput, match="at most the 4 columns"):
        PrivatePCA(n_components=5).fit(x)


def test_quantiles_and_scales(tmp_path: Any) -> None:
    x = RNG.normal(size=(8000, 2)) * [3.0, 200.0] + [40.0, 0.0]
    for bounds in ("private", [(0, 100), (-1000, 1000)]):
        budget = Budget(tmp_path / str(len(bounds)), epsilon=3.0, delta=1e-5)
        scaler = PrivateScaler(bounds=bounds, budget=budget)
        line = make_pipeline(scaler, PrivateLogisticRegression(bounds=(-4, 4), budget=budget))
        line.fit(x, x[:, 0] > 40)
        assert line.score(x, x[:, 0] > 40) > 0.9
        np.testing.assert_allclose(scaler.center_, [40, 0], atol=12)
        np.testing.assert_allclose(scaler.scale_, [3, 200], rtol=0.25)
        np.testing.assert_allclose(scaler.quantile(0.9)[1], 256, rtol=0.15)
        each = gaussian.mu(epsilon=1.0, delta=1e-6)
        assert budget.total().mu == pytest.approx(math.sqrt(2) * each, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_contract_of_trees() -> None:
    model = PrivateTreesClassifier(epsilon=80.0, delta=1e-3, test_seed=0, n_estimators=20)
    results = check_estimator(model, on_fail=None, on_skip=None)
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []


def test_tables_of_a_private_number_of_rows_are_refused() -> None:
    """The number of rows is a divisor, and decides how many trees there are."""
    x, y = crossed(50)
    for model in (PrivateScaler(), PrivatePCA(), PrivateTreesClassifier(classes=["same", "other"])):
        with pytest.raises(Unsupported, match="number of rows"):
            model.set_params(neighbours="add-remove").fit(x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_and_trees_in_frames_pickles_clones_and_searches() -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(0, 10, size=(600, 3))
    y = np.where(x[:, 0] > x[:, 1], "yes", "no")
    x[0], x[1] = 1.7e308, -1.7e308  # one row more or less, whatever it holds
    kinds: list[Any] = [
        PrivateScaler(test_seed=0),
        PrivatePCA(n_components=2, test_seed=0),
        PrivateTreesClassifier(classes=["no", "yes"], test_seed=0),
    ]
    for library in ("pandas", "polars"):
        try:
            frame = __import__(library).DataFrame(dict(zip("abc", x.T)))
        except ImportError:
            continue
        for kind in kinds:
            model = clone(kind).fit(frame, y)
            assert list(model.feature_names_in_) == list("abc")
            apply = "predict_proba" if hasattr(model, "predict_proba") else "transform"
            found = getattr(pickle.loads(pickle.dumps(model)), apply)(frame)
            np.testing.assert_array_equal(found, getattr(model, apply)(frame))
            assert np.isfinite(np.asarray(found)).all()
            assert clone(model).get_params() == model.get_params()
    last = PrivateTreesClassifier(classes=["no", "yes"], test_seed=0)
    line = make_pipeline(*(clone(kind) for kind in kinds[:2]), last)
    search = GridSearchCV(line, {"privatepca__n_components": [1, 2]}, cv=2).fit(x, y)
    assert search.predict(x).shape == (600,)
