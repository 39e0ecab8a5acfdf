"""Huber, quantile, Poisson and gamma regression: losses, what they find, units, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from noshuffle.convex import (
    PrivateGammaRegressor,
    PrivateHuberRegressor,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
    losses,
)
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.margins import PerMargin
from noshuffle.errors import InvalidInput

RNG = np.random.default_rng(3)
X = RNG.uniform(0, 10, size=(4000, 2))
LINE = 0.2 * X[:, 0] - 0.1 * X[:, 1] + 1.0
NEW: list[Any] = [losses.poisson(), losses.gamma(least=0.1), losses.quantile(level=0.8)]
NEW += [losses.huber(width=0.3, least_slope=0.9)]


@pytest.mark.parametrize("loss", NEW, ids=lambda loss: loss.name)
def test_losses_are_what_their_bounds_say(loss: Any) -> None:
    for y in (0.1, 0.35, 1.0):
        at = np.linspace(-4, 2, 61) + 1e-3
        target = np.full(61, y)
        slope = [approx_fprime([s], lambda v, y=y: loss.value_fn(v[0], y), 1e-7)[0] for s in at]
        np.testing.assert_allclose(loss.slope_fn(at, target), slope, atol=1e-5)
        assert np.abs(slope).max() <= loss.slope_bound + 1e-5
        assert (np.diff(slope) >= -1e-5).all()  # convex
        if loss.is_smooth:
            bend = loss.curvature_fn(at, target)
            assert (bend <= loss.curvature_bound).all()
            step = loss.slope_fn(at + 1e-6, target) - loss.slope_fn(at, target)
            np.testing.assert_allclose(step / 1e-6, bend, atol=1e-4)


def fitted(kind: Any, y: Any, **settings: Any) -> Any:
    return kind(epsilon=2.0, bounds=(0, 10), test_seed=0, **settings).fit(X, y)


@pytest.mark.parametrize("solver", ["gd", "objective"])
def test_poisson_finds_log_rates(solver: str) -> None:
    y = RNG.poisson(np.exp(LINE))
    model = fitted(PrivatePoissonRegressor, y, target_bounds=(0, 40), solver=solver)
    off = 0.03 if solver == "gd" else 0.08
    np.testing.assert_allclose(model.coef_, [0.2, -0.1], atol=off)
    np.testing.assert_allclose(model.predict(X), np.exp(X @ model.coef_ + model.intercept_))
    assert abs(model.predict(X).mean() / y.mean() - 1) < 0.2
    assert model.privacy_.epsilon <= 2.0 * (1 + 1e-9)
    if solver == "gd":
        loose = fitted(PrivatePoissonRegressor, y, target_bounds=(0, 400))
        assert abs(loose.predict(X).mean() / y.mean() - 1) < 0.3


def test_gamma_finds_log_means() -> None:
    y = np.exp(LINE) * RNG.gamma(5, 1 / 5, size=4000)
    model = fitted(PrivateGammaRegressor, y, target_bounds=(0.1, 60))
    np.testing.assert_allclose(model.coef_, [0.2, -0.1], atol=0.03)


def test_outliers_are_in_the_mean_of_a_gamma_model() -> None:
    """Without the readings that compare means, clipping predicts 0.5 of it at every ε."""
    y = np.exp(LINE) * np.random.default_rng(1).gamma(5, 1 / 5, size=4000)
    y[:200] *= 30.0
    y = y.clip(0.1, 100)
    for epsilon, off in ((2.0, 0.2), (np.inf, 0.01)):
        model = PrivateGammaRegressor(
            epsilon=epsilon, bounds=(0, 10), target_bounds=(0.1, 100), test_seed=0
        )
        assert model.fit(X, y).predict(X).mean() == pytest.approx(y.mean(), rel=off)


def test_a_row_adds_at_most_the_clip_norm_to_the_comparison_of_means() -> None:
    rng, worst = np.random.default_rng(0), 0.0
    rule = GradientRule(
        loss=PerMargin(losses.gamma(least=0.1)), features=3, outputs=1, clip_norm=0.7, rate=1.0,
        readings=1, is_log=True, lowest=0.1, balances=1, most_weight=2.0,
    )  # fmt: skip
    for size in (1e-3, 1.0, 1e6, 1e200):
        rule._scale = size * rng.normal(size=3)
        rule._theta = size * rng.normal(size=(1, 4))
        for y in (0.0, 0.5, 1.0, 7.0):
            row = np.array([rule._balance_sum(rng.normal(size=(1, 3)), np.array([y]), weight)
                            for weight in (np.array([2.0]), np.array([0.5]))])  # fmt: skip
            assert np.isfinite(row).all()
            worst = max(worst, *np.linalg.norm(row, axis=1))
    assert 0.6 < worst <= 0.7


def test_quantiles_and_robust_means() -> None:
    y = LINE + RNG.exponential(0.5, size=4000)
    for level in (0.5, 0.9):
        model = fitted(PrivateQuantileRegressor, y, target_bounds=(0, 6), quantile=level)
        assert abs(np.mean(y < model.predict(X)) - level) < 0.05
    far = LINE + np.where(RNG.random(4000) < 0.1, 4.0, 0.0)
    settings = {"target_bounds": (-1, 7), "clip_norm": 3.0}
    narrow, wide = (fitted(PrivateHuberRegressor, far, width=w, **settings) for w in (0.2, 8.0))
    off = [abs(float(np.mean(m.predict(X) - LINE))) for m in (narrow, wide)]
    assert off[0] < 0.1
    assert off[1] > 0.25


@pytest.mark.parametrize(("solver", "off"), [("gd", 8.0), ("ftrl", 30.0)])
def test_a_narrow_huber_loss_is_not_hidden_by_noise_of_the_clip_norm(
    solver: str, off: float
) -> None:
    """Slopes of 0.25/500 beside noise for slopes of one: the answer was 500 away, near nothing."""
    far = {"target_bounds": (0, 1000), "solver": solver}
    model = fitted(PrivateHuberRegressor, LINE + 1.0, **far)
    assert np.abs(model.predict(X) - LINE - 1.0).mean() < off


def test_a_stream_of_counts() -> None:
    y = RNG.poisson(np.exp(LINE))
    model = PrivatePoissonRegressor(
        epsilon=4.0, bounds=(0, 10), target_bounds=(0, 20), mechanism="tree", horizon=4000,
        test_seed=0,
    )  # fmt: skip
    for piece in np.array_split(np.arange(4000), 3):
        model.partial_fit(X[piece], y[piece])
    assert model.score(X, y) > 0.2


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (PrivateGammaRegressor, {"target_bounds": (0, 1)}, "> 0"),
        (PrivatePoissonRegressor, {"target_bounds": (-1, 1)}, ">= 0"),
        (PrivateQuantileRegressor, {"quantile": 1.5}, "quantile"),
        (PrivateQuantileRegressor, {"solver": "objective"}, "solver"),
        (PrivateHuberRegressor, {"width": 0.0}, "width"),
    ],
)
def test_refusals(kind: Any, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        kind(test_seed=0, **settings).fit(X[:20], np.ones(20))


EXTREMES: dict[str, Any] = {
    "huber": (PrivateHuberRegressor, {"width": 1e-6}),
    "low quantile": (PrivateQuantileRegressor, {"quantile": 0.01}),
    "high quantile": (PrivateQuantileRegressor, {"quantile": 0.99}),
    "poisson": (PrivatePoissonRegressor, {"target_bounds": (0, 1)}),
    "gamma": (PrivateGammaRegressor, {"target_bounds": (0.01, 1)}),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", EXTREMES)
def test_targets_that_say_nothing_are_predicted_within_their_bounds(name: str) -> None:
    """All equal, at a bound, beyond all bounds; one row, two rows; bounds of any size."""
    make, more = EXTREMES[name]
    low, high = more.get("target_bounds", (-1, 1))
    x = np.random.default_rng(0).uniform(-1, 1, (500, 3))
    far = {"target_bounds": (1e-9 if name == "gamma" else 0.0, 1e140)}
    for epsilon in (0.05, 2.0, np.inf):
        made = {"bounds": (-1, 1), "epsilon": epsilon, "test_seed": 0, **more}
        for y in (low, 0.5, high):
            told = make(**made).fit(x, np.full(500, y)).predict(x)
            assert np.all((told >= low) & (told <= high))
            if epsilon > 1 and "quantile" not in name:  # five rows are a percent: noise hides them
                assert np.abs(told - y).max() < 0.15 * (high - low)
        for rows in (1, 2):
            told = make(**made).fit(x[:rows], np.full(rows, 0.3)).predict(x)
            assert np.all((told >= low) & (told <= high))
        beyond = np.where(np.arange(500) % 2, -1e9, 1e9)
        for settings in (made, {**made, **far}, {**made, "fit_intercept": False}):
            model = make(**settings).fit(x, beyond)
            assert np.isfinite(model.predict(x)).all()
            assert np.isfinite(model.coef_).all()
