"""Groups that take turns under banded noise: Monte Carlo on the matrices themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import CyclicPoisson, Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import banded, error, identity
from noshuffle.strategies.sensitivity import sensitivity


def simulated(C: np.ndarray, part: CyclicPoisson, z: float, epsilon: float) -> tuple[float, float]:
    """δ(ε) of a unit of group 0 that sends 1 in each of its turns, and its standard error."""
    rng = np.random.default_rng(3)
    turns = [np.array(coins) for coins in itertools.product((0, 1), repeat=part.most)]
    weights = np.array([np.prod(np.where(coins, part.rate, 1 - part.rate)) for coins in turns])
    means = np.array([C[:, :: part.groups] @ coins for coins in turns])
    drawn = means[rng.choice(len(turns), 200_000, p=weights)]
    y = drawn + z * rng.standard_normal(drawn.shape)
    exponents = (y @ means.T - 0.5 * (means**2).sum(1)) / z**2
    gain = np.maximum(1 - np.exp(epsilon) / (np.exp(exponents) @ weights), 0)
    return float(gain.mean()), float(gain.std() / np.sqrt(len(gain)))


def test_stated_delta_is_that_of_the_matrices() -> None:
    part = CyclicPoisson(steps=6, groups=2, rate=0.3)
    strategy = banded((0.8, 0.6))
    plan = Plan(participation=part, strategy=strategy, noise_multiplier=1.2, delta=0.01)
    assert plan.sensitivity.value == pytest.approx(1.0)
    found, spread = simulated(strategy.encoder(6), part, 1.2, plan.epsilon())
    assert found <= 0.01 + 4 * spread
    assert found >= 0.01 - 4 * spread, "and no more than it"
    # one band too many: the largest column alone would state too little
    wide = np.array(banded((0.7, 0.5, 0.5)).encoder(6))
    found, spread = simulated(wide / np.linalg.norm(wide[:, 0]), part, 1.2, plan.epsilon())
    assert found > 0.01 + 4 * spread
    with pytest.raises(Unsupported, match="at most 2 bands"):
        sensitivity(banded((0.7, 0.5, 0.5)), part)


def test_prefixes_rates_and_limits() -> None:
    part = CyclicPoisson.of(steps=2401, groups=4, batch=250, population=60_000)
    assert (part.most, part.rate) == (601, pytest.approx(1 / 60))
    with pytest.raises(InvalidInput, match="fewer groups"):
        CyclicPoisson.of(steps=100, groups=300, batch=250, population=60_000)
    plan = Plan(participation=part, strategy=identity(), noise_multiplier=1.0)
    assert plan.epsilon_after(1) == plan.epsilon_after(4) < plan.epsilon_after(5) < plan.epsilon()


def test_between_plain_sampling_and_none() -> None:
    """Noise × error at ε = 1: bands that take turns beat independent noise and no sampling."""
    figures = {}
    for groups in (1, 4, 32):
        part = CyclicPoisson(steps=128, groups=groups, rate=groups / 32)
        plan = Plan.fit(part, mechanism="best", epsilon=1.0)
        assert 0.99 < plan.epsilon() <= 1.0
        assert plan.accountant == "fourier"
        figures[groups] = plan.noise_multiplier * error(plan.strategy, 128).rms
    unsampled = Plan.fit(Epochs(4, 32), mechanism="banded", epsilon=1.0, bands=32)
    whole = unsampled.noise_multiplier * error(unsampled.strategy, 128).rms
    assert figures[4] < min(figures[1], figures[32])
    assert figures[32] == pytest.approx(whole, rel=0.05), "rate 1 is no sampling"
