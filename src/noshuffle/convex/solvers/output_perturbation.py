"""Output perturbation: minimise, then add noise in proportion to how far one row moves the minimum.

    ŵ = argmin F(w) + (ridge/2)‖w‖²,      release ŵ + noise

J and J' (one row replaced) are ridge-strongly convex and ∇J − ∇J' is at most 2L/n, so
ridge·‖ŵ − ŵ'‖ ≤ ‖∇J'(ŵ) − ∇J(ŵ)‖ ≤ 2L/n (Bousquet, Elisseeff 2002; Chaudhuri, Monteleoni, Sarwate
2011). The minimiser is found to ‖∇J‖ ≤ γ only, within γ/ridge of the true one, on both data sets:
the sensitivity is 2L/(n·ridge) + 2γ/ridge (zero-out: L/(n·ridge) + 2γ/ridge).

    Gaussian   std = sensitivity/μ(ε, δ)
    pure ε     density ∝ e^{−ε‖b‖/sensitivity}: uniform direction, length Gamma(d, sensitivity/ε)

Excess risk of a convex loss at the best ridge, L√(2c√d/(nμ))/R from public numbers, is
L R·O((√d/(εn))^{1/2}): slope −1/2 in n; with strong convexity of its own −1. Projection onto the
domain afterwards is post-processing.

>>> from noshuffle.convex.losses import logistic
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (2000, 1)), np.tile([1.0, -1.0], 2000)
>>> run = output_perturbation(logistic(), x, y, epsilon=1.0, delta=1e-6, ridge=0.1, test_seed=0)
>>> round(run.statement.sensitivity, 6), round(run.statement.epsilon, 6)
(0.0025, 1.0)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import Solution, contribution
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import positive
from noshuffle.noise.laws import KeyedDraws
from noshuffle.strategies import identity


def output_sensitivity(
    loss: Loss, *, rows: int, ridge: float, gap: float = 0.0, neighbours: str = "zero-out"
) -> float:
    """How far the (γ-approximate) minimiser can move; derived in the docstring of the module."""
    return (contribution(neighbours) * loss.lipschitz / rows + 2 * gap) / ridge


def spherical(d: int, *, scale: float, draws: KeyedDraws) -> Array:
    """A vector with density ∝ exp(−‖b‖/scale): uniform direction, Gamma(d) length."""
    direction = draws.standard_normal(d)
    return np.asarray(direction * (draws.gamma(d, scale) / np.linalg.norm(direction)))


@solver(delta=0.0)
def output_perturbation(problem: Problem, *, ridge: float, tolerance: float = 1e-10) -> Solution:
    """The ridge-regularised minimiser with noise; δ = 0 asks for pure ε.

    Guarantees: the gradient norm γ at the released point is checked before noise is added, and
    is part of the sensitivity. The intermediate iterates and γ itself are not released.
    """
    positive(ridge=ridge, tolerance=tolerance)
    problem.require("output perturbation", smooth=True, everywhere=True)
    loss = problem.loss
    found = minimise(loss, problem.x, problem.y, ridge=ridge, tolerance=tolerance).weights
    reach = output_sensitivity(
        loss, rows=problem.n, ridge=ridge + loss.ridge, gap=tolerance, neighbours=problem.neighbours
    )
    if problem.delta == 0:
        noise = reach / problem.epsilon
        added = spherical(problem.d, scale=noise, draws=problem.draws)
        released = problem.draws.release(found, added, scale=noise)
        currency: dict[str, Any] = {"epsilon": problem.epsilon, "noise": noise}
    else:
        noise = reach / problem.mu
        released = problem.sums(identity(), steps=1, scale=noise)(found)
        currency = {"mu": problem.mu}
    return problem.solution(
        problem.domain.project(released),
        {"noise": noise, "ridge": ridge},
        sensitivity=reach,
        mechanism=f"minimiser of the risk with ridge {ridge:g}, plus noise",
        **currency,
    )
