"""The intercept as a running mean: its weights, its noise, and that no fit loses to a constant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from noshuffle.accounting import gaussian
from noshuffle.convex import (
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
    losses,
)
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.margins import PerMargin
from noshuffle.convex.mean_first import hides_mean, mean_steps, share


@pytest.mark.parametrize("steps", [1, 8, 30, 64])
def test_steps_of_that_share_are_a_weighted_mean(steps: int) -> None:
    told = np.random.default_rng(steps).normal(size=steps)
    b = 0.0
    for t, one in enumerate(told, start=1):
        b -= share(t, of=steps) * (b - one)
    a = steps / 64
    weights = np.array([math.gamma(t + a) / math.gamma(t) for t in range(1, steps + 1)])
    assert b == pytest.approx(float(weights @ told / weights.sum()))
    # Noise of a step is √T times that of all of the privacy in one.
    noise = math.sqrt(steps) * np.linalg.norm(weights) / weights.sum()
    assert 1 - 1e-9 <= noise <= 1.16


def test_how_many_steps_are_for_the_mean() -> None:
    for reach in (9.0, 20.0, 100.0, 1e4):
        for steps in (8, 20, 64):
            first = mean_steps(steps, reach=reach)
            assert math.sqrt(steps / first) / reach <= 0.5 / math.sqrt(10) or first == steps // 2
            assert 1 <= first <= steps // 2
    assert mean_steps(1, reach=0.1) == 1
    assert mean_steps(64, reach=math.inf) in (0, 1)
    assert hides_mean(8.9)
    assert not hides_mean(9.0)


@pytest.mark.parametrize(
    "loss", [losses.squared(radius=np.inf), losses.huber(width=0.1, least_slope=0.25)]
)
def test_a_row_adds_at_most_the_clip_norm_without_its_columns(loss: Any) -> None:
    rule = GradientRule(
        loss=PerMargin(loss), features=2, outputs=1, clip_norm=0.7, rate=1.0, readings=0, means=1
    )
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (6, 2)), np.array([-1.0, 1.0, 0.5, -0.2, np.inf, np.nan])
    for i in range(6):
        own = rule.clipped_sum(x[i : i + 1], y[i : i + 1])
        assert np.linalg.norm(own) <= 0.7
        assert np.all(own[:-1] == 0)  # columns are not read
        if np.isfinite(y[i]):
            assert own[-1] == pytest.approx(-0.7 * y[i], rel=1e-6)  # they fill the clip norm


def excess(model: Any, x: Any, y: Any, seeds: range) -> float:
    """Mean squared distance of predictions from the mean target, in units of a private mean's."""
    mu = gaussian.mu(epsilon=model.epsilon, delta=model.delta)
    low, high = model.target_bounds
    found = []
    for seed in seeds:
        told = model.set_params(test_seed=seed).fit(x, y).predict(x)
        found.append(np.mean((told - y.mean()) ** 2))
    return float(np.mean(found) * (len(y) * mu / ((high - low) / 2)) ** 2)


def narrow(*, seed: int, middle: float) -> tuple[np.ndarray, np.ndarray]:
    """1,000 x 20, and targets of a thirtieth of their bounds that no column tells."""
    rng = np.random.default_rng(seed)
    x = np.clip(0.3 * rng.normal(size=(1000, 20)) + rng.uniform(-0.5, 0.5, 20), -1, 1)
    return x, middle + 0.03 * rng.normal(size=1000)


@pytest.mark.parametrize("middle", [0.0, 0.5])
def test_where_nothing_is_to_be_learned_a_fit_is_as_good_as_a_private_mean(middle: float) -> None:
    """1,000 x 20, ε = 0.1, targets of a thirtieth of their bounds: with an intercept that momentum
    moves the error was 2.4 times (in the middle) and 18 times (beside it) that of a mean."""
    x, y = narrow(seed=2, middle=middle)
    model = PrivateLinearRegression(epsilon=0.1, bounds=(-1, 1))
    assert excess(model, x, y, range(16)) < 2.0  # 1 up to the chance of sixteen seeds, and columns


def test_huber_regression_stays_near_the_mean_too() -> None:
    """Slopes of a narrow width could not reach a mean beside the middle in a few steps."""
    x, y = narrow(seed=3, middle=0.5)
    model = PrivateHuberRegressor(epsilon=0.1, bounds=(-1, 1), width=0.1)
    assert excess(model, x, y, range(12)) < 2.5


def test_poisson_regression_follows_the_mean_in_the_units_of_y() -> None:
    """Its targets are not centred, so that a mean has twice the noise, and its intercept is a
    logarithm: with momentum the error was 28."""
    x, y = narrow(seed=3, middle=0.5)
    model = PrivatePoissonRegressor(epsilon=0.1, bounds=(-1, 1))
    assert excess(model, x, y, range(10)) < 20


def test_a_quantile_that_noise_hides_is_that_of_the_targets() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.uniform(-1, 1, (400, 40)), 0.5 + 0.1 * rng.normal(size=400)
    made: dict[str, Any] = {"epsilon": 0.3, "bounds": (-1, 1), "quantile": 0.8}
    found = [
        float(np.median(PrivateQuantileRegressor(**made, test_seed=seed).fit(x, y).predict(x)))
        for seed in range(8)
    ]
    assert abs(np.median(found) - np.quantile(y, 0.8)) < 0.15


def test_no_intercept_is_none() -> None:
    """A window of targets around 15 used to come back as an intercept."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-1, 1, (6000, 8))
    y = 15 + x[:, 0] + rng.normal(size=6000)
    model = PrivateLinearRegression(
        epsilon=1.0, bounds=(-1, 1), target_bounds=(-45, 75), fit_intercept=False, test_seed=0
    ).fit(x, y)
    assert model.intercept_ == pytest.approx(15.0)  # the middle of the target bounds, as before
