"""The intercept of a model of log y grows by log(mean y / mean ŷ), as far as noise lets it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.convex.calibration import LARGEST, MOST_SHIFT, calibration_sum, growth


def test_without_noise_predictions_fit_on_average_afterwards() -> None:
    rng = np.random.default_rng(0)
    margins, y = rng.normal(-3.0, 0.3, size=500), rng.uniform(0.0, 0.3, size=500)
    mean = calibration_sum(y, margins, None) / 500
    grown = growth(mean, intercept=float(margins.mean()), deviation=0.0)
    assert np.exp(margins + grown).mean() == pytest.approx(y.mean())
    assert growth(mean, intercept=-3.0, deviation=1.0) == 0.0, "hidden by noise"
    assert growth(-mean, intercept=-3.0, deviation=0.0) == 0.0, "it only grows"
    assert growth(100 * mean, intercept=-9.0, deviation=0.0) <= math.log(MOST_SHIFT)


def test_one_row_is_as_long_as_is_said() -> None:
    margins = np.array([-np.inf, -2.0, 0.0, 5.0, np.nan])
    longest = max(
        np.linalg.norm(calibration_sum(np.array([y]), np.array([s]), np.array([1.0])))
        for y in (0.0, 0.4, 1.0, 9.0)
        for s in margins
    )
    assert 0.99 * LARGEST < longest <= LARGEST


def test_noise_beyond_measure_is_no_error() -> None:
    assert growth(np.array([0.5, -0.1]), intercept=-1e4, deviation=1e-3) == math.log(MOST_SHIFT)
    assert growth(np.array([-0.5, -0.1]), intercept=-1e4, deviation=1e-3) == 0.0
