"""Objective perturbation: minimise a randomly tilted objective and release the minimiser.

    ŵ = argmin (1/n)Σ φ(⟨x_i, w⟩, y_i) + (Λ/2)‖w‖² + ⟨b, w⟩/n,        Λ = ridge (+ extra)

Chaudhuri, Monteleoni, Sarwate 2011 (pure ε) and Kifer, Smith, Thakurta 2012 ((ε, δ)), with a
sharper determinant: κ = log(1 + β/(nΛ)) of ε pays for it, and Λ grows until κ ≤ ε/2. The tilt has

    pure    density ∝ e^{−(ε−κ)‖b‖/(cL)},     c = 2 gradients of norm L differing (1 for zero-out)
    normal  N(0, σ²I), σ = cL(t + √(t² + 2(ε−κ)))/(2(ε−κ)), t = Q⁻¹(δ/(2c))

Conditions: smooth convex loss, Lipschitz everywhere, linear model (rank-one Hessians), ridge > 0
and the exact minimiser. Nobody has that one: a point with ‖∇J‖ ≤ γ (checked) is within γ/Λ of it,
so a hundredth of (ε, δ) pays for noise of sensitivity 2γ/Λ on what is released (Iyengar et al.
2019), on a public grid of 2⁻¹⁰ of that noise. Proofs of all of it: docs/proofs-convex.md.

>>> from noshuffle.convex.losses import logistic
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (2000, 1)), np.tile([1.0, -1.0], 2000)
>>> run = objective_perturbation(logistic(), x, y, epsilon=1.0, ridge=0.01, test_seed=0)
>>> run.statement.epsilon, run.statement.delta, bool(run.weights[0] > 1)
(1.0, 0.0, True)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import Solution, budget, contribution
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.convex.solvers.output_perturbation import spherical
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import positive
from noshuffle.strategies import identity

#: Share of ε and δ that pays for the distance to the exact minimiser.
_INEXACT = 0.01


class Tilt(NamedTuple):
    """Ridge actually used, and the scale of b (std for normal, length scale for pure)."""

    ridge: float
    scale: float
    kappa: float


def tilt(
    loss: Loss,
    *,
    rows: int,
    ridge: float,
    epsilon: float,
    delta: float = 0.0,
    neighbours: str = "replace-one",
) -> Tilt:
    """Ridge and noise of the tilt, as derived in the docstring of the module.

    Guarantees: κ + (density part) = ε as evaluated; κ ≤ ε/2, so the noise is always finite.
    """
    positive(epsilon=epsilon, ridge=ridge)
    count = contribution(neighbours)
    reach = count * loss.lipschitz
    needed = loss.smoothness / (rows * math.expm1(epsilon / 2))
    total = max(ridge + loss.ridge, needed)
    kappa = math.log1p(loss.smoothness / (rows * total))
    left = epsilon - kappa
    if delta == 0:
        return Tilt(total, reach / left, kappa)
    t = float(norm.isf(delta / (2 * count)))
    return Tilt(total, reach * (t + math.sqrt(t * t + 2 * left)) / (2 * left), kappa)


@solver(delta=0.0)
def objective_perturbation(problem: Problem, *, ridge: float, tolerance: float = 1e-12) -> Solution:
    """The minimiser of the tilted objective; δ = 0 asks for pure ε.

    Guarantees: as derived above. ‖∇J‖ ≤ tolerance is checked before anything is released, and the
    distance to the exact minimiser that it leaves is covered by noise of its own; a domain
    projects afterwards (post-processing).
    """
    positive(tolerance=tolerance)
    problem.require("objective perturbation", smooth=True, everywhere=True)
    loss, n, d, draws = problem.loss, problem.n, problem.d, problem.draws
    epsilon, delta = problem.epsilon, problem.delta
    main, rest = 1 - _INEXACT, _INEXACT
    chosen = tilt(
        loss,
        rows=n,
        ridge=ridge,
        epsilon=main * epsilon,
        delta=main * delta,
        neighbours=problem.neighbours,
    )
    if delta == 0:
        b = spherical(d, scale=chosen.scale, draws=draws)
    else:
        b = chosen.scale * draws.standard_normal(d)
    found = minimise(
        loss,
        problem.x,
        problem.y,
        ridge=chosen.ridge - loss.ridge,
        tilt=np.asarray(b / n),
        tolerance=tolerance,
    ).weights
    apart = 2 * tolerance / chosen.ridge
    if delta == 0:
        cover = apart / (rest * epsilon)
        released = draws.release(found, spherical(d, scale=cover, draws=draws), scale=cover)
    else:
        cover = apart / budget(epsilon=rest * epsilon, delta=rest * delta)
        released = problem.sums(identity(), steps=1, scale=cover)(found)
    details = {
        "noise": chosen.scale,
        "ridge": chosen.ridge,
        "gradient_norm_limit": tolerance,
        "cover": cover,
    }
    return problem.solution(
        problem.domain.project(released),
        details,
        epsilon=epsilon,
        sensitivity=problem.c * loss.lipschitz,
        noise=chosen.scale,
        mechanism=f"minimiser of the risk with ridge {chosen.ridge:g} and a random tilt",
        notes=(
            f"The minimiser was found up to a gradient norm of {tolerance:g}, which was checked; "
            "a hundredth of the budget pays for noise that covers the distance left.",
        ),
    )
