"""Bounds found in private: what a row adds, what is stated, what linear models make of them."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from noshuffle import Budget
from noshuffle.accounting import gaussian
from noshuffle.convex import PrivateLogisticRegression, PrivateScaler
from noshuffle.convex.phases import PhaseBudget, make_phase
from noshuffle.convex.ranges import FIRST_BINS, FOUND, RangeRule
from noshuffle.errors import InvalidInput, NoshuffleError, ParticipationViolation, Unsupported
from noshuffle.release.verify import verify
from noshuffle.strategies import identity

RNG = np.random.default_rng(0)


def phase(rows: int, passes: int) -> Any:
    budget = PhaseBudget(1.0, 1e-6, identity())
    return make_phase(budget, rows=rows, passes=passes, batch_size=rows)


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


@pytest.mark.filterwarnings("ignore")
def test_budget_run_folder_ids_and_refusals(tmp_path: Any) -> None:
    x = RNG.normal(size=(300, 2))
    budget = Budget(tmp_path / "b", epsilon=1.2, delta=1e-6)
    model = PrivateScaler(budget=budget)
    model.fit(x, ids=range(300), run=tmp_path / "run")
    assert verify(tmp_path / "run").is_verified
    with pytest.raises(NoshuffleError, match="the limit is"):
        clone(model).fit(x)
    with pytest.raises(ParticipationViolation, match="twice"):
        PrivateScaler().fit(x, ids=[0] * 300)
    for bad in ({"bounds": None}, {"bounds": (1, 0)}, {"epsilon": -1.0}):
        with pytest.raises(NoshuffleError):
            PrivateScaler(**bad).fit(x)
    with pytest.raises(Unsupported, match="number of rows"):
        PrivateScaler(neighbours="add-remove").fit(x)
    with pytest.raises(ValueError, match="NaN"):
        PrivateScaler().fit(np.where(x > 2, np.nan, x))
    with pytest.raises(InvalidInput, match="real numbers"):
        PrivateScaler().fit(x + 0j)


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


@pytest.mark.filterwarnings("ignore")
def test_frames_pickles_clones_and_searches() -> None:
    x = np.random.default_rng(3).uniform(0, 10, size=(600, 3))
    y = np.where(x[:, 0] > x[:, 1], "yes", "no")
    x[0], x[1] = 1.7e308, -1.7e308  # one row more or less, whatever it holds
    for library in ("pandas", "polars"):
        try:
            frame = __import__(library).DataFrame(dict(zip("abc", x.T)))
        except ImportError:
            continue
        model = PrivateScaler(test_seed=0).fit(frame)
        assert list(model.feature_names_in_) == list("abc")
        found = pickle.loads(pickle.dumps(model)).transform(frame)
        np.testing.assert_array_equal(found, model.transform(frame))
        assert np.isfinite(np.asarray(found)).all()
        assert clone(model).get_params() == model.get_params()
    last = PrivateLogisticRegression(classes=["no", "yes"], bounds=(-4, 4), test_seed=0)
    line = make_pipeline(PrivateScaler(test_seed=0), last)
    search = GridSearchCV(line, {"privatescaler__epsilon": [1.0, 2.0]}, cv=2).fit(x, y)
    assert search.predict(x).shape == (600,)
