"""Bands fitted to their own amplification: slopes, what they are worth, and what a plan takes."""

from __future__ import annotations

import numpy as np
import pytest

from noshuffle.accounting.bins import Overlaps
from noshuffle.participation import BallsInBins
from noshuffle.plan import Plan
from noshuffle.plan.fit_bins import MOST_STEPS, fit_bins
from noshuffle.strategies import Strategy, Workload, error
from noshuffle.strategies.fit import fit
from noshuffle.strategies.positions import overlaps


def price(strategy: Strategy, part: BallsInBins, epsilon: float) -> float:
    known = Overlaps(overlaps(strategy, part, part.steps))
    z = known.noise_multiplier(epsilon=epsilon, delta=1e-5)
    return z * error(strategy, part.steps).rms


@pytest.mark.slow
def test_it_is_below_unsampled_and_cyclic_noise() -> None:
    """20 epochs of 100 steps at ε = 2: 36.99 without sampling, 31.36 by groups that take turns."""
    part = BallsInBins(20, 100)
    found = fit_bins(part, epsilon=2.0, delta=1e-5, workload=Workload())
    assert found is not None
    assert 30.5 < price(found, part, 2.0) < 31.3
    careless = fit("banded", part.in_order, bands=100).strategy  # as if positions were known
    assert price(careless, part, 2.0) > 35
    assert np.all(found.coefficients(100) >= 0)


def test_it_knows_its_own_amplification() -> None:
    part = BallsInBins(4, 12)
    found = fit_bins(part, epsilon=1.0, delta=1e-5, workload=Workload())
    careless = fit("banded", part.in_order, bands=12).strategy
    assert found is not None
    assert price(found, part, 1.0) < 0.97 * price(careless, part, 1.0)


def test_what_a_plan_takes() -> None:
    plan = Plan.fit(BallsInBins(3, 6), mechanism="best", epsilon=1.0, delta=1e-5)
    assert isinstance(plan.participation, BallsInBins)
    assert plan.epsilon() <= 1.0
    other = Plan.fit(BallsInBins(3, 6), mechanism="banded", epsilon=1.0, delta=1e-5)
    felt = [z.noise_multiplier * error(z.strategy, 18).rms for z in (plan, other)]
    assert felt[0] <= felt[1]
    given = {"epsilon": 1.0, "delta": 1e-5, "workload": Workload()}
    assert fit_bins(BallsInBins(2, MOST_STEPS), **given) is None
    assert fit_bins(BallsInBins(2, 1), **given) is None
