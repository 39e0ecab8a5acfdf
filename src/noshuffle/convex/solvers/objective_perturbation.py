"""Objective perturbation: minimise a randomly tilted objective and release the minimiser.

    ŵ = argmin (1/n)Σ φ(⟨x_i, w⟩, y_i) + (Λ/2)‖w‖² + ⟨b, w⟩/n,        Λ = ridge (+ extra)

Chaudhuri, Monteleoni, Sarwate 2011 (pure ε) and Kifer, Smith, Thakurta 2012 ((ε, δ)). Write
b(w) = −n·∇(the rest)(w): the tilt that makes w the minimiser, one to one because the rest is smooth
and strongly convex. The density of ŵ at w is ν(b(w))·|det ∂b/∂w|. Compare D and D' there.

Determinant. −∂b/∂w = A₀ + φ''x xᵀ with A₀ ⪰ nΛ·I common to both and 0 ≤ φ''‖x‖² ≤ β. The matrix
determinant lemma gives 1 ≤ det/det A₀ ≤ 1 + β/(nΛ), so the ratio is at most 1 + β/(nΛ), for
replacing and for zeroing out alike (CMS print its square; this is sharper and all that is needed).
With κ = log(1 + β/(nΛ)), where κ would exceed ε/2 the ridge grows to Λ = β/(n(e^{ε/2} − 1)).

Density, with c = 2 gradients of norm L differing (1 for zero-out), Γ = b' − b, ‖Γ‖ ≤ cL:
    pure    ν ∝ e^{−(ε−κ)‖b‖/(cL)}:  log ratio ≤ (ε−κ)‖Γ‖/(cL) ≤ ε − κ.
    normal  ν = N(0, σ²I): log ratio = (2⟨b, Γ⟩ + ‖Γ‖²)/(2σ²). Γ is a sum of c multiples of fixed
            rows, each at most L long, so ⟨b, Γ⟩ ≤ L Σ|⟨b, x/‖x‖⟩| although Γ depends on b; each
            of the c normals exceeds tσ in size with probability 2Q(t) = δ/c for t = Q⁻¹(δ/(2c)).
            Outside of that event the ratio is at most cLt/σ + c²L²/(2σ²) = ε − κ, solved for σ:
            σ = cL(t + √(t² + 2(ε−κ)))/(2(ε−κ)). (KST, zero-out: L√(8 ln(2/δ) + 4ε)/ε, larger.)

Conditions: smooth convex loss, Lipschitz everywhere, linear model (rank-one Hessians), ridge > 0
and the exact minimiser. With a kink it fails: for |w − a| + |w − a'| the minimiser of any small
tilt is a data point itself (the tests show it for {0, 100} and {0, 101}).

Nobody has the exact minimiser. What is found has ‖∇J‖ ≤ γ (checked), so it is ŵ + e with
‖e‖ ≤ γ/Λ, and e is a function of the data and of ŵ (b follows from the two). Given ŵ, releasing
ŵ + e + N is output perturbation of sensitivity 2γ/Λ; so a hundredth of (ε, δ) pays for noise N of
that size, the tilt gets the rest, and the two compose (Iyengar et al. 2019, who call it AMP).

Low bits. The tilt b is never published, but its minimiser is, and the digits of ŵ below b's own
rounding would be those of the data. ŵ + e + N is rounded at random to a grid of 2⁻¹⁰ of N
(`noise.grid`), a public number far below the noise of the tilt: what is published is a function of
the real number ŵ + e + N. That b itself is drawn in 53 digits is not analysed further.

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

from noshuffle.convex.losses import Loss
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
def objective_perturbation(
    problem: Problem,
    *,
    ridge: float,
    tolerance: float = 1e-12,
) -> Solution:
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
