"""Single mechanisms: their numbers from their densities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.accounting import gaussian, mechanisms
from noshuffle.errors import InvalidInput


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 1.0, 1.5])
def test_laplace_curve_from_its_density(scale: float, part: float) -> None:
    laplace = mechanisms.Laplace(scale)
    x = np.linspace(-40 * scale, 40 * scale + 1, 800_001)
    p, q = (np.exp(-np.abs(x - m) / scale) / (2 * scale) for m in (1.0, 0.0))
    epsilon = part * laplace.epsilon
    slow = float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0.0), x))
    assert laplace.delta(epsilon=epsilon) == pytest.approx(slow, abs=1e-6)


def test_fits_are_safe() -> None:
    for epsilon in (0.1, 1.0, 7.0):
        normal = mechanisms.Gaussian.fit(epsilon=epsilon, delta=1e-6, sensitivity=3.0)
        assert normal.delta(epsilon=epsilon) <= 1e-6
        assert normal.epsilon(delta=1e-6) == pytest.approx(epsilon, rel=1e-9)
        assert mechanisms.Laplace.fit(epsilon=epsilon, sensitivity=2.0).epsilon <= epsilon
        mixed = mechanisms.Laplace.fit(epsilon=epsilon, delta=1e-3)
        assert mixed.delta(epsilon=epsilon) <= 1e-3 * (1 + 1e-12)
        assert mixed.epsilon > epsilon


def test_gaussian_record() -> None:
    normal = mechanisms.Gaussian(deviation=4.0, sensitivity=2.0)
    assert (normal.mu, normal.rho) == (0.5, 0.125)
    assert normal.epsilon(delta=1e-5) == gaussian.epsilon(mu=0.5, delta=1e-5)


def test_noisy_max_with_gumbel_noise_is_the_exponential_mechanism() -> None:
    """The index has probabilities softmax(score / scale): the worst ratio is e^ε at most."""
    pick = mechanisms.ReportNoisyMax(scale=1.5)
    worst = 0.0
    generator = np.random.default_rng(0)
    for _ in range(200):
        scores = generator.normal(size=4) * 3
        moved = scores + generator.choice([-1.0, 1.0], size=4)
        p, q = (np.exp(s / 1.5) / np.exp(s / 1.5).sum() for s in (scores, moved))
        worst = max(worst, float(np.abs(np.log(p / q)).max()))
    assert 0.5 * pick.epsilon < worst <= pick.epsilon + 1e-12
    assert mechanisms.ReportNoisyMax(scale=1.5, is_monotone=True).epsilon == pick.epsilon / 2
    assert pick.rho == pick.epsilon**2 / 8
    assert mechanisms.ReportNoisyMax(scale=1.5, noise="laplace").rho == pick.epsilon**2 / 2


def test_refusals() -> None:
    for build in (mechanisms.Gaussian, mechanisms.Laplace, mechanisms.ReportNoisyMax):
        with pytest.raises(InvalidInput):
            build(0.0)
        with pytest.raises(InvalidInput):
            build(1.0, math.inf)
    with pytest.raises(InvalidInput, match="noise"):
        mechanisms.ReportNoisyMax(1.0, noise="normal")
