"""Secret positions: the sampling-free bound beside quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian
from noshuffle.accounting.bins import Overlaps
from noshuffle.errors import Unsupported
from noshuffle.participation import BallsInBins, Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import banded, blt, error, identity, tree
from noshuffle.strategies.positions import shifts


def both_ways(m: np.ndarray, z: float, epsilon: float) -> float:
    """The larger δ(ε) of (1/b) Σ N(m_j, z²) and N(0, z²) in the plane, by a fine sum."""
    axis = np.linspace(-8 * z, 8 * z + m.max(), 1201)
    x, y = np.meshgrid(axis, axis)
    area = (axis[1] - axis[0]) ** 2 / (2 * math.pi * z * z)
    q = np.exp(-(x**2 + y**2) / (2 * z * z)) * area
    p = sum(np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * z * z)) for u, v in m) * area / len(m)
    gamma = math.exp(epsilon)
    return float(max(np.maximum(p - gamma * q, 0).sum(), np.maximum(q - gamma * p, 0).sum()))


@pytest.mark.parametrize("m", [[(2.0, 0.0), (0.0, 2.0)], [(1.8, 0.9), (0.3, 2.0)]])
def test_two_positions_in_the_plane(m: list[tuple[float, float]]) -> None:
    shift = np.array(m)
    K = shift @ shift.T
    top, common = float(K.diagonal().max()), float(K[0, 1])
    found = Overlaps(((1, 0.0, top), (2, common, top - common)))
    careless = Overlaps(((1, 0.0, top), (2, 0.0, top)))  # as if positions did not overlap
    for epsilon in (0.1, 1.0, 2.5):
        true = both_ways(shift, 1.5, epsilon)
        stated = found.delta(noise_multiplier=1.5, epsilon=epsilon)
        assert true * (1 - 1e-4) <= stated <= 1.15 * true + 1e-6
        if common:
            assert careless.delta(noise_multiplier=1.5, epsilon=epsilon) < 0.99 * true
    delta = found.delta(noise_multiplier=1.5, epsilon=1.0)
    assert found.epsilon(noise_multiplier=1.5, delta=delta) == pytest.approx(1.0, rel=1e-4)
    least = found.noise_multiplier(epsilon=1.0, delta=delta)
    assert least == pytest.approx(1.5, rel=1e-3)
    assert found.epsilon(noise_multiplier=least, delta=delta) <= 1.0 + 2e-6


@pytest.mark.parametrize("second", [0.0, 0.6])
def test_a_plan_states_what_quadrature_finds(second: float) -> None:
    strategy, part = banded((1.0, second)), BallsInBins(1, 2)
    plan = Plan(participation=part, strategy=strategy, noise_multiplier=1.3, delta=0.05)
    true = both_ways(shifts(strategy, part, 2).T, 1.3, plan.epsilon())
    assert 0.8 * plan.delta < true <= plan.delta * (1 + 1e-4)
    less = both_ways(shifts(strategy, part, 2).T, 1.3, 0.9 * plan.epsilon())
    assert less > plan.delta


def test_signs_cannot_do_worse_than_absolute_values() -> None:
    """Position j shifts by any vector with entries up to |C|: quadrature over signs."""
    shift = np.array([(1.0, -0.7), (0.0, 1.0)])
    K = np.abs(shift) @ np.abs(shift).T
    top, common = float(K.max()), float(K[0, 1])
    found = Overlaps(((1, 0.0, top), (2, common, top - common)))
    for signs in ((1, 1), (1, -1), (-1, 1)):
        true = both_ways(shift * np.array(signs), 0.9, 1.0)
        assert true <= found.delta(noise_multiplier=0.9, epsilon=1.0)


def test_shifts_are_sums_of_columns() -> None:
    part = BallsInBins(3, 4)
    for strategy in (banded((1.0, 0.5, -0.25)), blt((0.9,), (0.3,)), identity()):
        C = np.abs(np.tril(strategy.encoder(10)))
        want = np.stack([C[:, j::4].sum(1) for j in range(4)], axis=1)
        assert np.allclose(shifts(strategy, part, 10), want)


def test_plans() -> None:
    part = BallsInBins(epochs=4, steps_per_epoch=16)
    plan = Plan.fit(part, mechanism="banded", bands=4, epsilon=2.0)
    assert 1.99 < plan.epsilon() <= 2.0
    assert plan.epsilon_after(16) < plan.epsilon()
    unsampled = Plan.fit(Epochs(4, 16), mechanism="banded", bands=4, epsilon=2.0)
    assert plan.noise_multiplier < 0.9 * unsampled.noise_multiplier
    assert Plan.from_json(plan.to_json()) == plan
    assert any("secret positions" in line for line in plan.statement().assumptions)
    assert plan.noise_multiplier * error(plan.strategy, 64).rms > 0
    mu = plan.sensitivity.value / plan.noise_multiplier
    assert plan.epsilon() < gaussian.epsilon(mu=mu, delta=plan.delta)
    for wrong in ({"accountant": "fourier"}, {"neighbours": "replace-one"}):
        with pytest.raises(Unsupported, match="BallsInBins"):
            Plan(participation=part, strategy=identity(), noise_multiplier=1.0, **wrong)
    with pytest.raises(Unsupported, match="square encoder"):
        Plan(participation=part, strategy=tree(), noise_multiplier=1.0)
