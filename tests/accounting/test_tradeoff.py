"""Trade-off curves: beside closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian, tradeoff
from noshuffle.errors import InvalidInput
from noshuffle.participation import BallsInBins, Epochs, Poisson
from noshuffle.plan import Plan


def test_trade_off_of_a_curve_lies_below_the_exact_one() -> None:
    alphas = np.linspace(0, 1, 21)
    exact = tradeoff.gaussian_tradeoff(alphas, mu=1.0)
    grid = np.linspace(0, 8, 200)
    curve = np.array([gaussian.delta(mu=1.0, epsilon=e) for e in grid])
    found = tradeoff.from_curve(alphas, grid, curve)
    assert np.all(found <= exact + 1e-12)
    assert np.max(exact - found) < 2e-3
    assert np.any(tradeoff.from_curve(alphas, grid, curve / 2) > exact)  # half of the δ: a lie
    assert tradeoff.gaussian_tradeoff(alphas, mu=math.inf).max() == 0
    far = tradeoff.gaussian_tradeoff(np.array([0.0, 1e-17, 1.0]), mu=10.0)
    assert far == pytest.approx([1.0, 0.0660, 0.0], abs=1e-4)  # 1 − 1e-17 is 1 in floats
    with pytest.raises(InvalidInput, match="type I"):
        tradeoff.gaussian_tradeoff(np.array([1.5]), mu=1.0)


def test_plans_have_trade_offs_and_groups() -> None:
    alphas = np.array([0.01, 0.1, 0.5])
    plan = Plan.fit(Epochs(2, 4), mechanism="identity", epsilon=2.0)
    assert np.allclose(plan.tradeoff(alphas), tradeoff.gaussian_tradeoff(alphas, mu=plan.mu() or 0))
    assert plan.epsilon(group=3) == gaussian.epsilon(mu=3 * (plan.mu() or 0), delta=plan.delta)
    for part in (Poisson(20, 0.1), BallsInBins(2, 10)):
        sampled = Plan.fit(part, mechanism="identity", noise_multiplier=1.0)
        known = Plan.fit(Epochs(2, 10), mechanism="identity", noise_multiplier=1.0)
        beta = sampled.tradeoff(alphas)
        assert np.all(beta <= 1 - alphas)
        if isinstance(part, BallsInBins):
            assert np.all(beta >= known.tradeoff(alphas) - 2e-3)
        line = 1 - sampled.delta - math.exp(sampled.epsilon()) * alphas
        assert np.all(beta >= line - 1e-3)
    two, mu = sampled.epsilon(group=2), 2 * math.sqrt(2.0)  # of two units with known positions
    assert 2 * sampled.epsilon() < two <= gaussian.epsilon(mu=mu, delta=sampled.delta) * (1 + 1e-9)
