"""Confidence intervals: what one row adds, the law against simulation, units, refusals."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noshuffle import Budget
from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
    PrivateSVC,
    losses,
)
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.inference import ClippedRows, law_of, reach, spread_sum
from noshuffle.convex.margins import PerMargin
from noshuffle.convex.moments import pack, unpack_square
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.release.verify import verify

TRUE = np.array([0.8, -0.5, 0.2])


def drawn(seed: int, n: int = 3000) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(n, 2))
    return x, x @ TRUE[:2] + TRUE[2] + 0.3 * rng.normal(size=n)


def line(**settings: Any) -> PrivateLinearRegression:
    kept = {"epsilon": 4.0, "bounds": (-1, 1), "target_bounds": (-4, 4), "inference": True}
    return PrivateLinearRegression(**{**kept, **settings})


def test_one_row_adds_at_most_the_clip_norm() -> None:
    rng, worst = np.random.default_rng(0), 0.0
    for size in (1e-3, 1.0, 1e3, 1e150):
        for _ in range(20):
            row = size * rng.normal(size=(1, 3))
            slope = rng.normal(size=(1, 3))
            slope *= min(1.0, 0.7 / float(np.linalg.norm(slope)))
            for bend in (0.25, 0.0):
                out = spread_sum(
                    row, slope, np.array([bend]), clip=0.7, limit=4.0, outer_limit=0.49,
                    is_clipped=np.array([True]),
                )  # fmt: skip
                assert np.isfinite(out).all()
                assert (out[-1] > 0) == (bend == 0)
                worst = max(worst, float(np.linalg.norm(out)))
    assert 0.65 < worst <= 0.7


def test_the_law_is_that_of_a_newton_step() -> None:
    """Exact matrices in, the textbook sandwich out."""
    h, j = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([[1.0, 0.2], [0.2, 3.0]])
    told = np.concatenate([pack(h) / 4.0, pack(j) / 0.49, [0.0]]) * 0.7 / math.sqrt(2)
    found = law_of(
        told, q=2, clip=0.7, limit=4.0, outer_limit=0.49, deviation=0.0, point=np.ones(2),
        gradient=h @ [0.1, 0.2], gradient_deviation=0.05, rows=100, gain=1.0,
    )  # fmt: skip
    inverse = np.linalg.inv(h)
    np.testing.assert_allclose(found.centre, [0.9, 0.8])
    np.testing.assert_allclose(found.noise, 0.0025 * inverse @ inverse)
    np.testing.assert_allclose(found.sampling, inverse @ j @ inverse / 100)


def test_noise_of_the_spread_widens_intervals() -> None:
    """Normal quantiles would hold 0.93: a width that noise made small misses."""
    rng, rows, noise, held = np.random.default_rng(8), 100, 0.28, []
    exact = np.concatenate([pack(np.eye(2)) / 0.1, pack(np.eye(2)), [0.0]]) / math.sqrt(2)
    for _ in range(3000):
        found = law_of(
            exact + noise * rng.normal(size=7), q=2, clip=1.0, limit=0.1, outer_limit=1.0,
            deviation=noise, point=rng.normal(size=2) / math.sqrt(rows),
            gradient=0.03 * rng.normal(size=2), gradient_deviation=0.03, rows=rows, gain=1.0,
        )  # fmt: skip
        width, factor = found.along(np.eye(2), level=0.95, sampling=True)
        held.append(np.abs(found.centre)[None] <= np.array([factor, [1.96, 1.96]]) * width)
    ours, normal = np.mean(held, axis=(0, 2))
    assert 0.94 < ours < 0.975  # chance moves it by 0.003
    assert normal < 0.935
    _, factor = found.along(np.eye(2), level=0.95, sampling=False)
    np.testing.assert_allclose(factor, 1.96, atol=1e-3)


@pytest.mark.parametrize("loss", [losses.logistic(), losses.squared(radius=np.inf)])
def test_curvature_is_the_derivative_of_the_gradients(loss: losses.Loss) -> None:
    """Of long rows no more is cut off the curvature than off the gradients."""
    rng, n = np.random.default_rng(4), 400
    x = np.minimum(rng.exponential(0.15, size=(n, 3)), 1.0)
    y = (rng.random(n) < 0.5).astype(np.float64)
    rule = GradientRule(
        loss=PerMargin(loss), features=3, outputs=1, clip_norm=50.0, rate=1.0, readings=1, spreads=2
    )
    rule._centre, rule._scale = x.mean(0), 3 / (x.std(0) * math.sqrt(3))
    theta = 0.3 * rng.normal(size=(1, 4))

    def slope(at: Any) -> Any:
        rows, residual, *_ = rule._residuals(x, y, None, theta=at)
        return np.append(rows.T @ residual[:, 0], residual.sum())

    rows, residual, bends, _ = rule._residuals(x, y, None, theta=theta)
    rows = np.hstack([rows, np.ones((n, 1))])
    assert np.max(np.sum(rows**2, axis=1)) > 2 * reach(3)
    known = rule._limits
    told = spread_sum(rows, residual * rows, bends, clip=50.0, **known._asdict())
    found = unpack_square(told[:10], 4) * known.limit * math.sqrt(2) / 50.0
    numeric = [(slope(theta + 1e-5 * e) - slope(theta - 1e-5 * e)) / 2e-5 for e in np.eye(4)]
    np.testing.assert_allclose(found, numeric, rtol=1e-4, atol=1e-4 * n)


def test_a_ridge_is_part_of_the_target() -> None:
    x, y = drawn(0, 2000)
    model = line(epsilon=math.inf, clip_norm=50.0, penalty="l2", alpha=0.1).fit(x, y)
    rows, unit = np.hstack([x, np.ones((2000, 1))]), 4.0  # half of the target bounds
    curved = rows.T @ rows / 2000 + np.diag([0.1, 0.1, 0.0])
    best = np.linalg.solve(curved, rows.T @ (y / unit) / 2000) * unit
    np.testing.assert_allclose(model.intervals().estimate, best, atol=5e-3)
    slopes, inverse = rows * (rows @ best - y)[:, None], np.linalg.inv(curved)
    spread = np.sqrt(np.diag(inverse @ slopes.T @ slopes @ inverse)) / 2000
    np.testing.assert_allclose(model.intervals().deviation, spread, rtol=0.05)
    assert np.linalg.norm(best[:2]) < 0.9 * np.linalg.norm(TRUE[:2])


def test_classifiers_clip_few_rows_and_others_warn() -> None:
    x, y = drawn(6, 4000)
    chance = 1 / (1 + np.exp(-(x @ TRUE[:2] + TRUE[2])))
    label = (np.random.default_rng(6).random(4000) < chance).astype(int)
    made: dict[str, Any] = {"epsilon": 4.0, "bounds": (-1, 1), "inference": True, "test_seed": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClippedRows)
        model = PrivateLogisticRegression(**made, classes=[0, 1]).fit(x, label)
        told = model.intervals(0.999)
        line(test_seed=0).fit(x, y).intervals()
    assert ((told.low <= TRUE) & (told.high >= TRUE)).all()
    tight = line(target_bounds=(-1, 1), test_seed=0).fit(x, y)
    with pytest.warns(ClippedRows, match="larger clip_norm"):
        tight.intervals()


def test_deviations_are_those_of_repeated_fits() -> None:
    """Noise alone on one table; with the noise off, least squares and its own deviations."""
    x, y = drawn(0, 2000)
    fits = [line(test_seed=seed).fit(x, y) for seed in range(16)]
    told = fits[0].intervals(sampling=False)
    seen = np.std([np.append(m.coef_, m.intercept_) for m in fits], axis=0, ddof=1)
    ratio = math.sqrt(np.mean((seen / told.deviation) ** 2))
    assert 0.7 < ratio < 1.4  # chance moves it by 0.1; 2/3 and 3/2 are outside
    np.testing.assert_allclose(np.append(fits[0].coef_, fits[0].intercept_), told.estimate)
    exact = line(epsilon=math.inf, clip_norm=50.0).fit(x, y)
    rows = np.hstack([x, np.ones((2000, 1))])
    best, rest, *_ = np.linalg.lstsq(rows, y, rcond=None)
    np.testing.assert_allclose(exact.intervals().estimate, best, atol=5e-3)
    classic = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)) * rest / 1997)
    np.testing.assert_allclose(exact.intervals().deviation, classic, rtol=0.1)
    low, high = fits[0].predict_interval(x[:50]).T
    middle = fits[0].predict(x[:50])
    assert ((low < middle) & (middle < high)).all()


def test_wider_levels_probabilities_and_evidence(tmp_path: Path) -> None:
    x, y = drawn(1, 6000)
    model = PrivateLogisticRegression(
        epsilon=4.0, bounds=(-1, 1), classes=[0, 1], inference=True, clip_norm=4.0
    ).fit(x, (y > 0).astype(int), run=tmp_path / "run")
    assert verify(tmp_path / "run").answer == "PROVED"
    narrow, wide = model.intervals(0.5), model.intervals(0.99)
    assert (wide.low < narrow.low).all()
    assert (narrow.high < wide.high).all()
    assert narrow.covers == "noise and sampling"
    chance = model.predict_interval(x[:9])
    assert ((chance > 0) & (chance < 1)).all()
    assert model.privacy_.epsilon <= 4.0


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (PrivateSVC(inference=True, classes=[0, 1], loss="hinge"), "smooth loss"),
        (PrivateQuantileRegressor(inference=True), "smooth loss"),
        (PrivateLogisticRegression(inference=True, classes=[0, 1, 2]), "one margin"),
        (PrivateLogisticRegression(inference=True, classes=[0, 1], solver="ftrl"), "needs solver"),
        (PrivateLogisticRegression(inference=True, classes=[0, 1], epsilon=0.01), "hide"),
    ],
)
def test_refusals(model: Any, match: str) -> None:
    x, y = drawn(2, 300)
    with pytest.raises(Unsupported, match=match):
        model.set_params(test_seed=0).fit(x, (y > 0).astype(int))


def test_intervals_are_asked_for_before_fit_and_may_be_hidden() -> None:
    x, y = drawn(3, 500)
    with pytest.raises(InvalidInput, match="inference=True, given before fit"):
        line(inference=False, test_seed=0).fit(x, y).intervals()
    with pytest.raises(Unsupported, match="hides the curvature"):
        line(epsilon=0.3, test_seed=0).fit(x, y).intervals()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PrivateLinearRegression, PrivatePoissonRegressor])
def test_coverage_of_a_thousand_runs(kind: Any) -> None:
    held = []
    for seed in range(1000):
        x, y = drawn(seed, 4000)
        bounds = (-4, 4)
        if kind is PrivatePoissonRegressor:
            y, bounds = np.random.default_rng(seed).poisson(np.exp(x @ TRUE[:2] + 0.2)), (0, 15)
        settings = {"bounds": (-1, 1), "target_bounds": bounds, "inference": True}
        told = kind(epsilon=4.0, test_seed=seed, **settings).fit(x, y).intervals()
        held.append((told.low <= TRUE) & (told.high >= TRUE))
    assert 0.93 < np.mean(held) < 0.97


def test_intervals_of_sums_cover_the_answer_of_the_table() -> None:
    """The noise of the sums is known: 95 % intervals around what they give without noise."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-1, 1, size=(3000, 3))
    y = x @ [0.5, -0.3, 0.0] + 0.1 + 0.1 * rng.normal(size=3000)
    made: dict[str, Any] = {"solver": "sums", "bounds": (-1, 1), "inference": True}
    made |= {"clip_norm": 5.0, "epsilon": 2.0}
    exact = np.linalg.lstsq(np.column_stack([x, np.ones(3000)]), y, rcond=None)[0]
    held = []
    for seed in range(60):
        told = PrivateLinearRegression(**made, test_seed=seed).fit(x, y).intervals(sampling=False)
        held.append((told.low <= exact) & (exact <= told.high))
    assert 0.90 < np.mean(held) < 0.985  # 240 intervals; two thirds of the noise would give 0.81
    model = PrivateLinearRegression(**made, test_seed=0).fit(x, y)
    np.testing.assert_allclose(model.coef_, model.intervals(sampling=False).estimate[:-1])
    assert np.diff(model.predict_interval(x[:5], sampling=False), axis=1).max() < 1
    with pytest.raises(Unsupported, match="sampling=False"):
        model.intervals()
    with pytest.raises(Unsupported, match="constraint"):
        PrivateLinearRegression(**made, constraint="ball").fit(x, y)
    tiny = PrivateLinearRegression(**{**made, "epsilon": 0.01}, test_seed=0).fit(x, y)
    with pytest.raises(Unsupported, match="hides"):
        tiny.intervals(sampling=False)


@pytest.mark.parametrize("kind", [PrivateLinearRegression, PrivatePoissonRegressor])
def test_too_few_passes_for_intervals_are_refused_before_anything_is_spent(
    kind: Any, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2000, 2))
    budget = Budget(tmp_path / "budget", epsilon=2.0, delta=1e-5)
    made: dict[str, Any] = {"solver": "gd", "bounds": (-1, 1), "target_bounds": (0.1, 2.0)}
    made["inference"] = True
    with pytest.raises(Unsupported, match="passes=3 or more"):
        kind(passes=2, budget=budget, **made).fit(x, np.abs(x[:, 0]))
    assert not budget.entries()
    assert kind(passes=3, budget=budget, **made).fit(x, np.abs(x[:, 0])).privacy_.epsilon <= 1.0
