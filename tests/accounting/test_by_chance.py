"""Amplified plans against a plain Monte Carlo of the attacker's likelihood ratio.

    δ(ε) = E_P (1 − e^{ε − log dP/dQ})₊,       P with the unit and Q without it, or the other way

Nothing is shared with `accounting`. δ is large, so that a plain mean over samples finds it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import logsumexp

from noshuffle.participation import BallsInBins, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import banded, identity

SAMPLES, DELTA = 200_000, 1e-2
#: Losses in one direction: drawn from P of log dP/dQ, or from Q of log dQ/dP.
Losses = tuple[np.ndarray, np.ndarray]


def poisson_losses(steps: int, rate: float, noise: float) -> Losses:
    rng = np.random.default_rng(0)
    taken = rng.random((SAMPLES, steps)) < rate

    def log_ratio(x: np.ndarray) -> np.ndarray:
        exponent = x / noise**2 - 1 / (2 * noise**2)
        return np.log1p(rate * np.expm1(exponent)).sum(axis=1)

    without = noise * rng.standard_normal((SAMPLES, steps))
    return log_ratio(without + taken), -log_ratio(without)


def position_losses(shifts: np.ndarray, noise: float) -> Losses:
    """`shifts`: one column for each secret position, which are equally likely."""
    rng = np.random.default_rng(0)
    m = shifts.T / noise

    def log_ratio(x: np.ndarray) -> np.ndarray:
        return logsumexp(x @ m.T - (m**2).sum(axis=1) / 2, axis=1) - math.log(len(m))

    without = rng.standard_normal((SAMPLES, m.shape[1]))
    return log_ratio(without + m[rng.integers(len(m), size=SAMPLES)]), -log_ratio(without)


def delta_by_chance(losses: Losses, epsilon: float) -> tuple[float, float]:
    """δ of the worse direction, and its standard error."""
    gains = [np.maximum(-np.expm1(epsilon - own), 0.0) for own in losses]
    return max((float(own.mean()), float(own.std()) / math.sqrt(SAMPLES)) for own in gains)


def test_poisson_steps() -> None:
    plan = Plan(
        participation=Poisson(24, 0.1), strategy=identity(), noise_multiplier=1.0, delta=DELTA
    )
    found, error = delta_by_chance(poisson_losses(24, 0.1, 1.0), plan.epsilon())
    assert abs(found - DELTA) < 5 * error + 1e-3 * DELTA
    half = replace(plan, participation=Poisson(24, 0.05))  # a claim for half the rate is too small
    found, error = delta_by_chance(poisson_losses(24, 0.1, 1.0), half.epsilon())
    assert found - 5 * error > DELTA


@pytest.mark.parametrize("strategy", [identity(), banded((1.0, 0.5))], ids=["identity", "banded"])
def test_balls_in_bins(strategy: object) -> None:
    part = BallsInBins(3, 8)
    plan = Plan(participation=part, strategy=strategy, noise_multiplier=1.5, delta=DELTA)
    C = strategy.encoder(part.steps)
    shifts = np.stack([C[:, j::8].sum(axis=1) for j in range(8)], axis=1)
    found, error = delta_by_chance(position_losses(shifts, 1.5), plan.epsilon())
    assert 0.3 * DELTA < found < DELTA + 5 * error  # a bound, with room where positions overlap
    found, error = delta_by_chance(position_losses(shifts, 1.5), 0.7 * plan.epsilon())
    assert found - 5 * error > DELTA
