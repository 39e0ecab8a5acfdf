"""Output perturbation: minimise, then add noise in proportion to how far one row moves the minimum.

    ŵ = argmin F(w) + (ridge/2)‖w‖²,      release ŵ + noise

Sensitivity. J and J' (one row replaced) are ridge-strongly convex and ∇J − ∇J' is at most 2L/n, so
at the two minimisers  ridge·‖ŵ − ŵ'‖ ≤ ‖∇J'(ŵ)‖ = ‖∇J'(ŵ) − ∇J(ŵ)‖ ≤ 2L/n, hence ‖ŵ − ŵ'‖ ≤
2L/(n·ridge) (Bousquet, Elisseeff 2002; Chaudhuri, Monteleoni, Sarwate 2011). The minimiser is found
to ‖∇J‖ ≤ γ only, and every such point is within γ/ridge of the true one, on both data sets: the
release is calibrated to 2L/(n·ridge) + 2γ/ridge. Zero-out: L/(n·ridge) + 2γ/ridge.

    Gaussian   std = sensitivity/μ(ε, δ)
    pure ε     density ∝ e^{−ε‖b‖/sensitivity}: uniform direction, length Gamma(d, sensitivity/ε)

Excess risk of a convex loss: ridge·R²/2 + L·E‖noise‖ with ridge of its best size is
L R·O((√d/(εn))^{1/2}): slope −1/2 in n; with strong convexity of its own −1. `best_ridge` gives
it from public numbers. Projection onto the domain afterwards is post-processing.

>>> from noshuffle.convex.losses import logistic
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (2000, 1)), np.tile([1.0, -1.0], 2000)
>>> run = output_perturbation(logistic(), x, y, epsilon=1.0, delta=1e-6, ridge=0.1, test_seed=0)
>>> round(run.statement.sensitivity, 6), round(run.statement.epsilon, 6)
(0.005, 1.0)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.losses import Loss, require
from noshuffle.convex.solvers.base import (
    Solution,
    budget,
    contribution,
    gaussian_statement,
    generator,
    pure_statement,
)
from noshuffle.convex.solvers.domains import Domain, Everywhere
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.errors import InvalidInput, positive


def output_sensitivity(
    loss: Loss, *, rows: int, ridge: float, gap: float = 0.0, neighbours: str = "replace-one"
) -> float:
    """How far the (γ-approximate) minimiser can move; derived in the docstring of the module."""
    return (contribution(neighbours) * loss.lipschitz / rows + 2 * gap) / ridge


def best_ridge(
    loss: Loss, *, rows: int, dimension: int, radius: float, epsilon: float, delta: float
) -> float:
    """argmin of ridge·R²/2 + L·(2L√d/(n·ridge·μ)): public numbers only."""
    mu = budget(epsilon=epsilon, delta=delta)
    return 2 * loss.lipschitz * math.sqrt(math.sqrt(dimension) / (rows * mu)) / radius


def spherical(d: int, *, scale: float, draws: np.random.Generator) -> Any:
    """A vector with density ∝ exp(−‖b‖/scale): uniform direction, Gamma(d) length."""
    direction = draws.standard_normal(d)
    return direction * (draws.gamma(d, scale) / np.linalg.norm(direction))


def output_perturbation(
    loss: Loss,
    rows: Any,
    labels: Any,
    *,
    epsilon: float,
    delta: float = 0.0,
    ridge: float,
    domain: Domain | None = None,
    tolerance: float = 1e-10,
    neighbours: str = "replace-one",
    test_seed: int | str | None = None,
) -> Solution:
    """The ridge-regularised minimiser with noise; δ = 0 asks for pure ε.

    Guarantees: the gradient norm γ at the released point is checked before noise is added, and
    is part of the sensitivity. The intermediate iterates and γ itself are not released.
    """
    positive(epsilon=epsilon, ridge=ridge, tolerance=tolerance)
    require(loss, "output perturbation", smooth=True, everywhere=True, order=2.0)
    if not 0 <= delta < 1:
        raise InvalidInput(f"delta must lie in [0, 1), got {delta!r}")
    x, y = loss.check(rows, labels)
    n, d = x.shape
    found = minimise(loss, x, y, ridge=ridge, tolerance=tolerance)
    reach = output_sensitivity(
        loss, rows=n, ridge=ridge + loss.ridge, gap=tolerance, neighbours=neighbours
    )
    draws = generator(test_seed)
    words = f"minimiser of the risk with ridge {ridge:g}, plus noise"
    if delta == 0:
        noise = reach / epsilon
        released = found.weights + spherical(d, scale=noise, draws=draws)
        statement = pure_statement(
            epsilon=epsilon,
            sensitivity=reach,
            noise=noise,
            mechanism=words,
            rows=n,
            neighbours=neighbours,
            test_seed=test_seed,
        )
    else:
        mu = budget(epsilon=epsilon, delta=delta)
        noise = reach / mu
        released = found.weights + noise * draws.standard_normal(d)
        statement = gaussian_statement(
            mu=mu,
            delta=delta,
            sensitivity=reach,
            mechanism=words,
            rows=n,
            neighbours=neighbours,
            test_seed=test_seed,
        )
    if not math.isfinite(noise):  # pragma: no cover - positive() has refused what leads here
        raise InvalidInput("the noise is not finite; use a larger ridge or epsilon")
    w = (domain or Everywhere()).project(released)
    return Solution(weights=w, statement=statement, details={"noise": noise, "ridge": ridge})
