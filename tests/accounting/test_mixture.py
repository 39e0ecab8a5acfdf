"""The pair of Poisson sampling with one unit replaced is the worst of all replacements."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

GRID = np.linspace(-14.0, 14.0, 4001)


def hockey_stick(gamma: float, rate: float, u: float, v: float) -> float:
    """H_γ of (1−q)N(0, 1) + qN(u, 1) against the same with v, by quadrature."""
    blank = (1.0 - rate) * norm.pdf(GRID)
    gap = blank + rate * norm.pdf(GRID - u) - gamma * (blank + rate * norm.pdf(GRID - v))
    return float(np.trapezoid(np.maximum(gap, 0.0), GRID))


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("length", [0.2, 1.0, 3.0])
def test_no_replacement_is_worse_than_the_opposite(rate: float, length: float) -> None:
    for gamma in (0.3, 0.8, 1.0, 1.3, 4.0):
        worst = hockey_stick(gamma, rate, length, -length)
        for u, v in np.random.default_rng(1).uniform(-length, length, (40, 2)):
            assert hockey_stick(gamma, rate, u, v) <= worst + 1e-9
        if gamma == 1.0:  # a pair that only leaves, as of adding and removing, would not bound it
            assert hockey_stick(gamma, rate, length, 0.0) < 0.99 * worst
