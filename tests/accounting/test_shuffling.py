"""Shuffling and trade-off curves: beside enumeration and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import comb
from scipy.stats import binom

from noshuffle.accounting import gaussian, shuffling, tradeoff
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import BallsInBins, Epochs, Poisson
from noshuffle.plan import Plan


def enumerated(local: float, count: int, epsilon: float, clone: float) -> float:
    """δ of P = (A + Δ, C − A + 1 − Δ) against Q, point by point."""
    more = math.exp(local) / (1 + math.exp(local))
    P, Q = np.zeros((count + 1, count + 1)), np.zeros((count + 1, count + 1))
    for c in range(count):
        chance = comb(count - 1, c) * clone**c * (1 - clone) ** (count - 1 - c)
        for a in range(c + 1):
            mass = chance * comb(c, a) / 2**c
            P[a + 1, c - a] += mass * more
            P[a, c - a + 1] += mass * (1 - more)
            Q[a + 1, c - a] += mass * (1 - more)
            Q[a, c - a + 1] += mass * more
    return float(np.maximum(P - math.exp(epsilon) * Q, 0).sum())


def test_shuffling_is_the_sum_over_clones() -> None:
    for local, count, epsilon in ((1.0, 12, 0.3), (2.0, 30, 1.0), (0.5, 1, 0.2)):
        true = enumerated(local, count, epsilon, math.exp(-local))
        found = shuffling.delta(local=local, count=count, epsilon=epsilon)
        assert found == pytest.approx(true, rel=1e-6, abs=1e-13)
        if count > 1:  # twice as many clones as there are
            assert enumerated(local, count, epsilon, min(1.0, 2 * math.exp(-local))) < 0.99 * true
    found = shuffling.epsilon(local=1.0, count=10_000, delta=1e-6)
    assert shuffling.delta(local=1.0, count=10_000, epsilon=found) <= 1e-6
    assert found < 0.3 * shuffling.bound(local=1.0, count=10_000, delta=1e-6)
    assert shuffling.epsilon(local=1.0, count=1, delta=1e-6) == pytest.approx(1.0, rel=1e-4)
    with pytest.raises(Unsupported, match="closed form"):
        shuffling.bound(local=9.0, count=100, delta=1e-6)


def test_shuffled_delta_is_above_what_rounding_may_take_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10⁷ reports, with functions that are a last bit off (tails: what they were found to be)."""
    n, local, epsilon = 10_000_000, 1.0, 0.0015
    c = np.arange(n * math.exp(-local) - 16_000, n * math.exp(-local) + 16_000).astype(int)
    more, gamma = 1 / (1 + math.exp(-local)), math.exp(epsilon)
    odds = (gamma - math.exp(-local)) / (1 - gamma * math.exp(-local))
    first = np.floor((c + 1) * odds / (1 + odds)) + 1
    tails = [binom.sf(first - 2, c, 0.5), binom.sf(first - 1, c, 0.5)]
    gains = (more - gamma * (1 - more)) * tails[0] + (1 - more - gamma * more) * tails[1]
    true = float(binom.pmf(c, n - 1, math.exp(-local)) @ np.maximum(gains, 0.0))
    assert 1e-9 < true < 1e-3
    found = shuffling.delta(local=local, count=n, epsilon=epsilon)
    assert true < found < true * (1 + 1e-5)
    for name, wrong in (("gammaln", 1 + 2.0**-52), ("betainc", 1 - 2e-12)):
        real = getattr(shuffling, name)
        with monkeypatch.context() as patch:
            patch.setattr(shuffling, name, lambda *a, real=real, wrong=wrong: real(*a) * wrong)
            assert shuffling.delta(local=local, count=n, epsilon=epsilon) > true
            if name == "gammaln":  # the binomial coefficient is smaller by as much
                patch.setattr(shuffling, name, lambda x, real=real: real(x) * (
                    1 + 2.0**-52 * np.where(np.asarray(x) == n, -1, 1)))  # fmt: skip
                assert shuffling.delta(local=local, count=n, epsilon=epsilon) > true


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
