"""With their default steps solvers of one pass are not worth less than where they start."""

from __future__ import annotations

import math

import numpy as np
import pytest

from noshuffle.convex import losses
from noshuffle.convex.solvers import accelerated_srgd, frank_wolfe_noisy, frank_wolfe_poly
from noshuffle.convex.solvers.domains import Ball, L1Ball
from noshuffle.convex.solvers.recursive import Recursion


def excess_over_start(solve, loss, x, y, *, domain, epsilon: float) -> float:
    """Mean risk of three runs less that of zero."""
    asked = {"epsilon": epsilon, "delta": 1e-6, "domain": domain}
    runs = [solve(loss, x, y, **asked, test_seed=k) for k in range(3)]
    risks = [loss.risk(run.weights, x, y) for run in runs]
    return float(np.mean(risks)) - loss.risk(np.zeros(x.shape[1]), x, y)


def table(n: int, d: int, *, strength: float) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng((n, d))
    x = losses.fit_into(1e3 * draws.standard_normal((n, d)), bound=1.0)
    chance = 1 / (1 + np.exp(-strength * math.sqrt(d) * x[:, 0]))
    return x, np.where(draws.random(n) < chance, 1.0, -1.0)


def test_the_start_keeps_a_weight_of_one_in_root_n() -> None:
    plan = Recursion.plan(rows=10_000, steps=100)
    assert (1 - plan.rate) ** plan.steps == pytest.approx(10_000**-0.5, rel=0.15)


def test_noisy_frank_wolfe_learns_where_there_is_something_to_learn() -> None:
    x, y = table(2000, 5, strength=3.0)
    gain = excess_over_start(
        frank_wolfe_noisy, losses.logistic(), x, y, domain=Ball(10.0), epsilon=2.0
    )
    assert gain < -0.2


def test_polyhedral_frank_wolfe_learns_where_there_is_something_to_learn() -> None:
    draws = np.random.default_rng(0)
    x = draws.choice([-1.0, 1.0], (8192, 100))
    y = np.clip(x[:, :2] @ [0.5, -0.25] + 0.05 * draws.standard_normal(8192), -1, 1)
    loss = losses.squared(order=math.inf, radius=1.0)
    gain = excess_over_start(frank_wolfe_poly, loss, x, y, domain=L1Ball(1.0), epsilon=1.0)
    assert gain < -0.07


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_accelerated_descent_stays_near_its_start_where_noise_hides_all(strength: float) -> None:
    x, y = table(1000, 5, strength=strength)
    worse = excess_over_start(
        accelerated_srgd, losses.logistic(), x, y, domain=Ball(5.0), epsilon=0.3
    )
    assert worse < 0.01
