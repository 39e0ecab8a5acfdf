"""Objective perturbation: minimise a randomly tilted objective and release the minimiser.

    ŵ = argmin (1/n)Σ φ(⟨x_i, w⟩, y_i) + (Λ/2)‖w‖² + ⟨b, w⟩/n,        Λ = ridge (+ extra)

Chaudhuri, Monteleoni, Sarwate 2011 (pure ε); Kifer, Smith, Thakurta 2012; Redberg, Koskela, Wang
2023 (the Gaussian profile), with a sharper determinant: κ = log(1 + β/(nΛ)) of ε pays for it, and Λ
grows until κ ≤ ε/2. The tilt is the smaller in mean square of

    pure    density ∝ e^{−(ε−κ)‖b‖/(cL)},     c = 2 gradients of norm L differing (1 for zero-out)
    normal  N(0, σ²I) with Σ_v δ_G(ε − κ; ‖v‖/σ) ≤ δ

δ_G the curve of a Gaussian mechanism, v the corners of what one row can do to the gradient sum. The
log ratio of the densities of ŵ is (2⟨b, Γ⟩ + ‖Γ‖²)/(2σ²) + κ at most, with Γ = Σ a_j p_j, p_j fixed
vectors (signed rows), a_j slopes that may depend on b in any way. It is convex in a, hence at most
its value at a corner of the box of slopes, where Γ does not depend on b and the ratio is that of a
Gaussian mechanism; and (1 − e^{ε−κ−max_v ℓ_v})₊ ≤ Σ_v (1 − e^{ε−κ−ℓ_v})₊. Corners other than zero:

    zero-out      one of norm L where φ' keeps its sign for a label (logistic, hinges), else two
    replace-one   two of norm L and one of 2L where φ' keeps its sign, else four of 2L

so that a classifier under zero-out pays for its tilt what a Gaussian mechanism pays (the general
bound of Redberg et al. is twice that δ). δ = 0 asks for the pure tilt.

Conditions: smooth convex loss, Lipschitz everywhere, linear model (rank-one Hessians), ridge > 0
and the exact minimiser. Nobody has that one: a point with ‖∇J‖ ≤ γ (checked) is within γ/Λ of it,
so a thousandth of (ε, δ) pays for noise of sensitivity 2γ/Λ on what is released (Iyengar et al.
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

from noshuffle.accounting import gaussian
from noshuffle.accounting.bisection import bracket
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import Solution, budget, contribution
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.convex.solvers.output_perturbation import spherical
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import open_unit, positive
from noshuffle.strategies import identity

#: Share of ε and δ that pays for the distance to the exact minimiser.
_INEXACT = 0.001


class Tilt(NamedTuple):
    """Ridge actually used, and the scale of b (std for normal, length scale for pure)."""

    ridge: float
    scale: float
    kappa: float
    is_pure: bool


def corners(loss: Loss, *, neighbours: str) -> tuple[tuple[int, float], ...]:
    """(how many, norm) of the corners of what one row does to a gradient sum, zero left out."""
    length = loss.lipschitz
    if contribution(neighbours) == 1:
        return ((1 if loss.is_monotone else 2, length),)
    return ((2, length), (1, 2 * length)) if loss.is_monotone else ((4, 2 * length),)


def normal_scale(shape: tuple[tuple[int, float], ...], *, epsilon: float, delta: float) -> float:
    """The smallest σ with Σ δ_G(ε; ‖v‖/σ) ≤ δ over the corners, from above."""
    positive(epsilon=epsilon)
    open_unit(delta=delta)

    def fits(scale: float) -> bool:
        return sum(k * gaussian.delta(mu=v / scale, epsilon=epsilon) for k, v in shape) <= delta

    low = high = max(v for _, v in shape)
    while not fits(high):
        high *= 2
    while fits(low):
        low /= 2
    return bracket(fits, low, high, tolerance=1e-12)[1]


def tilt(
    loss: Loss,
    *,
    rows: int,
    ridge: float,
    epsilon: float,
    delta: float = 0.0,
    neighbours: str = "zero-out",
    dimension: int | None = None,
) -> Tilt:
    """Ridge and noise of the tilt, as derived in the docstring of the module.

    Guarantees: κ + (density part) = ε as evaluated; κ ≤ ε/2, so the noise is always finite. With a
    dimension the pure tilt is taken at δ > 0, too, where its mean square (d + 1)·scale² is smaller.
    """
    positive(epsilon=epsilon, ridge=ridge)
    needed = loss.smoothness / (rows * math.expm1(min(epsilon / 2, 700.0)))  # a double's range
    total = max(ridge + loss.ridge, needed)
    kappa = math.log1p(loss.smoothness / (rows * total))
    pure = contribution(neighbours) * loss.lipschitz / (epsilon - kappa)
    if delta == 0:
        return Tilt(total, pure, kappa, True)
    shape = corners(loss, neighbours=neighbours)
    scale = normal_scale(shape, epsilon=epsilon - kappa, delta=delta)
    if dimension is not None and (dimension + 1) * pure**2 < scale**2:
        return Tilt(total, pure, kappa, True)
    return Tilt(total, scale, kappa, False)


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
        dimension=d,
    )
    if chosen.is_pure:
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
            "a thousandth of the budget pays for noise that covers the distance left.",
        ),
    )
