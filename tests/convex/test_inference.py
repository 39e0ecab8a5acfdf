"""Confidence intervals: what one row adds, the law against simulation, units, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noshuffle.convex import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
    PrivateSVC,
)
from noshuffle.convex.inference import law_of, spread_sum
from noshuffle.convex.moments import pack
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
            out = spread_sum(row, slope, np.array([0.25]), clip=0.7, limit=4.0)
            assert np.isfinite(out).all()
            worst = max(worst, float(np.linalg.norm(out)))
    assert 0.65 < worst <= 0.7


def test_the_law_is_that_of_a_newton_step() -> None:
    """Exact matrices in, the textbook sandwich out."""
    h, j = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([[1.0, 0.2], [0.2, 3.0]])
    told = np.concatenate([pack(h) / 4.0, pack(j) / 0.49]) * 0.7 / math.sqrt(2)
    found = law_of(
        told, q=2, clip=0.7, limit=4.0, deviation=0.0, point=np.ones(2), gradient=h @ [0.1, 0.2],
        gradient_deviation=0.05, rows=100, gain=1.0,
    )  # fmt: skip
    inverse = np.linalg.inv(h)
    np.testing.assert_allclose(found.centre, [0.9, 0.8])
    np.testing.assert_allclose(found.noise, 0.0025 * inverse @ inverse)
    np.testing.assert_allclose(found.sampling, inverse @ j @ inverse / 100)


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
