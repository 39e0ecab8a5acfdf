"""Where targets are: the window against brute force, what a row adds, and what it is good for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from noshuffle.convex import (
    PrivateHuberRegressor,
    PrivateLinearRegression,
    PrivateQuantileRegressor,
    losses,
)
from noshuffle.convex.gradient_rule import GradientRule
from noshuffle.convex.margins import PerMargin
from noshuffle.convex.target_window import (
    BINS,
    bins_of,
    can_be_seen,
    far_slopes,
    highest,
    is_narrow,
    window,
)


def by_hand(counts: Any, rows: float, deviation: float, worth: float) -> tuple[float, float]:
    for w in (2, 4, 8, 16):
        unit = w / 32 * max(1.0, worth / 100)
        best = max(range(65 - w), key=lambda first: sum(counts[first : first + w]))
        held, slack = sum(counts[best : best + w]), 2 * deviation * math.sqrt(w)
        if (
            unit <= 0.75
            and slack <= 0.4 * rows
            and held >= 0.95 * rows - slack
            and held >= 0.6 * rows + slack
        ):
            return -1 + (best + w / 2) / 32, unit
    return 0.0, 1.0


def test_the_window_is_that_of_brute_force() -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        y = rng.uniform(-0.9, 0.9) + 10 ** rng.uniform(-3, 0) * rng.normal(size=1000)
        deviation, worth = 10 ** rng.uniform(-1, 2), 10 ** rng.uniform(0, 3)
        counts = np.bincount(bins_of(np.clip(y, -1, 1)), minlength=BINS)
        noisy = counts + deviation * rng.normal(size=BINS)
        told = window(noisy, rows=1000, deviation=deviation, worth=worth)
        assert told == pytest.approx(by_hand(noisy, 1000, deviation, worth))
        found.append(told[1])
    assert {min(found), max(found)} == {1 / 16, 1.0}
    assert 50 < sum(unit < 1 for unit in found) < 350


def test_bins_and_what_can_be_seen() -> None:
    assert bins_of(np.array([-1.0, -0.97, 0.0, 0.999, 1.0])).tolist() == [0, 0, 32, 63, 63]
    assert can_be_seen(rows=1000, deviation=50)
    assert not can_be_seen(rows=1000, deviation=80)
    spread = np.bincount(bins_of(np.random.default_rng(1).uniform(-1, 1, 4000)), minlength=BINS)
    rng = np.random.default_rng(2)
    for _ in range(200):  # as much noise as a reading is taken for
        noisy = spread + 280 * rng.normal(size=BINS)
        assert window(noisy, rows=4000, deviation=280, worth=10) == (0.0, 1.0)


@pytest.mark.parametrize("many", [False, True])
def test_a_row_adds_at_most_the_clip_norm(many: bool) -> None:
    rule = GradientRule(
        loss=PerMargin(losses.squared(radius=np.inf)), features=2, outputs=1, clip_norm=0.7,
        rate=1.0, readings=1, windows=2, worth=10.0, has_many_rows=many, most_weight=3.0,
    )  # fmt: skip
    rule._count = rule._counting
    rng = np.random.default_rng(3)
    x, y = rng.uniform(-1, 1, (5, 2)), rng.uniform(-1, 1, 5)
    weight = np.array([3.0, 0.5, 1.0, 0.0, 2.0])
    whole = rule.clipped_sum(x, y, weight)
    for i in range(5):
        rest = np.arange(5) != i
        moved = float(np.linalg.norm(whole - rule.clipped_sum(x[rest], y[rest], weight[rest])))
        most = 0.7 * (weight[i] / 3.0 if many else float(weight[i] > 0))
        assert moved == pytest.approx(most, rel=1e-6)
        assert moved <= most


def outliers(seed: int) -> tuple[Any, Any]:
    """One of thirty targets is twenty times as far out as the others, and bounds hold them all."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (6000, 8))
    errors = np.where(rng.random(6000) < 0.03, 20.0, 0.5) * rng.normal(size=6000)
    return x, x @ np.resize([1.0, -1.0], 8) + errors + 15.0


def test_outliers_do_not_push_a_fit_below_the_mean() -> None:
    """At ε = 0.1 the noise is for the bounds: before, the mean squared error was 1.4 times that of
    the mean, nine tenths of it by coefficients of noise."""
    shares = []
    for seed in range(3):
        x, y = outliers(seed)
        model = PrivateLinearRegression(
            epsilon=0.1, bounds=(-1, 1), target_bounds=(-45, 75), test_seed=seed
        ).fit(x, y)
        assert model.privacy_.epsilon == pytest.approx(0.1)
        line = x @ np.resize([1.0, -1.0], 8) + 15.0  # what there is to be learned
        shares.append(1 - np.mean((model.predict(x) - line) ** 2) / line.var())
    assert min(shares) > 0.3
    # A ridge along coefficients of the data is the same in every unit.
    x, y = outliers(0)
    made: dict[str, Any] = {"epsilon": 1.0, "bounds": (-1, 1), "test_seed": 0, "penalty": "l2"}
    wide = PrivateLinearRegression(**made, target_bounds=(-385, 415), alpha=0.5).fit(
        x[:3000], y[:3000]
    )
    assert vars(wide._stream.rule)["_unit"] < 1
    assert np.linalg.norm(wide.coef_) < 0.6 * math.sqrt(8)


def test_who_looks_for_a_window() -> None:
    x, y = outliers(1)
    made: dict[str, Any] = {"bounds": (-1, 1), "target_bounds": (-45, 75), "test_seed": 0}
    models = {
        "linear": PrivateLinearRegression(**made),
        "huber": PrivateHuberRegressor(**made),
        "quantile": PrivateQuantileRegressor(**made),
        "given": PrivateLinearRegression(**made, solver="gd", passes=20),
        "hidden": PrivateLinearRegression(**made, epsilon=0.4),
        "exact": PrivateLinearRegression(**made, epsilon=np.inf),
    }
    found = {}
    for name, model in models.items():
        few = slice(300 if name == "hidden" else 6000)
        rule = model.fit(x[few], y[few])._stream.rule
        found[name] = (rule.windows, rule.halvings, model.n_steps_)
    assert found["linear"] == found["huber"] == (4, 0, 75)  # 64 steps, 7 of columns
    assert found["quantile"] == (4, 0, 83)  # and 8 questions
    assert found["given"] == (0, 0, 20)
    assert found["hidden"][:2] == (0, 1)  # 300 of the 6,000 rows
    assert found["exact"][:2] == (0, 0)


def test_one_question_halves_the_unit() -> None:
    assert far_slopes(np.array([-0.06, 0.0, 0.2, 0.46, 1.0]), 0.2).tolist() == [1, -1, -1, 1, 1]
    rng, halved = np.random.default_rng(4), np.zeros(2)
    for _ in range(500):
        for i, spread in enumerate((0.05, 0.35)):
            share = np.mean(np.abs(spread * rng.normal(size=300)) > 0.25)
            halved[i] += is_narrow(share + 0.08 * rng.normal(), deviation=0.08) / 500
    assert halved[0] > 0.95
    assert halved[1] < 0.05
    assert not is_narrow(0.0, deviation=0.21)  # too much noise to be sure of anything


def test_windows_hold_bins_that_surely_have_targets_above_them() -> None:
    counts = np.zeros(BINS)
    counts[0], counts[12] = 1900.0, 100.0
    known: dict[str, Any] = {"rows": 2000.0, "deviation": 18.0}
    assert window(counts, **known, worth=30.0)[1] == 1 / 16
    least = highest(counts, **known)
    assert least == 12
    assert window(counts, **known, worth=30.0, least=least) == (-0.75, 0.5)
    assert highest(counts, rows=2000.0, deviation=30.0) == 0  # noise hides them
    assert highest(np.zeros(BINS), **known) == 0
