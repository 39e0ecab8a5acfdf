"""The proximal scheme for weakly convex losses: convex problems on fresh rows, one after another.

    for j = 0 … J−1:  x_{j+1} ≈ argmin_{x∈K} F(x) + (β/2)‖x − x_j‖²,    β = 2ϱ

f + (ϱ/2)‖·‖² is convex, so each inner problem is ϱ-strongly convex. It is solved by phased mirror
descent (p = 2) on its own n/J rows with the whole budget: rows are disjoint, nothing composes
(Bassily, Guzmán, Menart 2021, arXiv 2107.05585; Davis, Grimmer 2019). The gradient handed to the
solver is ∇f + ϱ(x − x_j), the rest (β−ϱ)/2·‖x − x_j‖² is kept exactly in the dual step. With
J ~ min(√n, (εn/√d)^{2/3}) a uniformly drawn x_j has E‖∇F_β‖ of order n^{−1/4} + (√d/(εn))^{1/3}
(docs/proofs-convex.md).

In other norms of `optim.norms` of order 1 ≤ p < 2 (l_p, groups, Schatten) and rows bounded in the
dual norm, f is ϱ-weakly convex in ‖·‖, and ψ = ‖·‖_r²/(2(r−1)), r = max(p, 1 + 1/ln k), takes the
place of ½‖·‖²: F + ϱψ(· − x_j) is convex and ϱψ is ϱ-strongly convex on top, so that dual averaging
over the domain K (`mirror_step`) needs no phases,

    x ← argmin_{x∈K} ⟨ḡ, x⟩ + ϱψ(x − x_j),   ḡ = mean of [noisy ∇F(x) + ϱ∇ψ(x − x_j)].

A row bounded in order q > s = r/(r−1) grows by k^{1/s−1/q} ≤ e, and ϱ by its square. State: x_j.

>>> from noshuffle.convex.losses import phase
>>> from noshuffle.convex.solvers.domains import Ball
>>> x = np.tile([[1.0, 0.0], [0.0, 1.0]], (500, 1)); y = (x @ [0.8, 0.0]) ** 2
>>> run = weakly_convex(phase(radius=1.0), x, y, epsilon=4.0, delta=1e-6, domain=Ball(1.0),
...                     start=np.array([0.5, 0.1]), test_seed=0)
>>> round(run.statement.epsilon, 6), run.weights.shape
(4.0, (2,))
"""

from __future__ import annotations

import numpy as np

from noshuffle.convex.arrays import Array, real_array
from noshuffle.convex.solvers.base import ONE_PASS, Solution, split
from noshuffle.convex.solvers.generalized_gaussian import (
    NOISES,
    deviation,
    releaser,
    shape_of,
    spending,
)
from noshuffle.convex.solvers.mirror_step import MirrorStep
from noshuffle.convex.solvers.phased import Prox, mirror_norm, phased_mirror_descent
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, Unsupported, one_of, whole
from noshuffle.optim.norms import Norm

#: Noisy gradients of one round, at most.
_STEPS = 128


def rounds_for(*, rows: int, dimension: int, mu: float) -> int:
    """J = min(√n, (μn/√d)^{2/3}), a constant below it, at least 1: public numbers only."""
    best = min(rows**0.5, (mu * rows / dimension**0.5) ** (2 / 3))
    return max(1, min(int(best / 2), rows // 8))


@solver()
def weakly_convex(
    problem: Problem,
    *,
    rounds: int | None = None,
    start: Array | None = None,
    output: str = "random",
    p: float = 2.0,
    norm: Norm | None = None,
    noise: str = "normal",
) -> Solution:
    """J proximal rounds; returns a uniformly drawn x_j (or the last), with all in `iterates`.

    `norm` measures weights, l_p if it is not given.

    Guarantees: each round is μ-GDP (normal noise) or ρ-zCDP on rows of its own, so the whole pass
    is. Every iterate lies in the domain. `start` must be chosen without the
    data (or by another private release, to be added up).
    """
    one_of(("random", "last"), output=output)
    one_of(NOISES, noise=noise)
    given = mirror_norm("the proximal scheme", Norm(p) if norm is None else norm)
    problem.require("the proximal scheme", convex=False, rows=given.dual)
    loss, domain, n, d = problem.loss, problem.domain, problem.n, problem.d
    if loss.is_convex:
        raise Unsupported(f"{loss.name} is convex; use phased_sgd or phased_mirror_descent")
    if rounds is None:
        rounds = rounds_for(rows=n, dimension=d, mu=problem.mu)
    whole(rounds=rounds, at_most=max(1, n // 4))
    strength = 2 * loss.weak_convexity
    if strength == 0:
        raise Unsupported(f"the ridge of {loss.name} makes it convex; use dp_gd, or less ridge")
    point = domain.start(d) if start is None else real_array(start=start)
    if point.shape != (d,) or not np.isfinite(point).all():
        raise InvalidInput(f"start must be {d} finite numbers, got shape {point.shape}, or others")
    w = domain.project(point)
    points = [w]
    run = None
    for part in split(n, rounds):
        # The regularised solution lies within G/β of the centre: that is how far phases search.
        reach = min(2 * domain.euclidean(d), 2 * loss.lipschitz / strength)
        run = (
            phased_mirror_descent.on(
                problem.part(part), radius=reach, prox=Prox(w, strength, loss.weak_convexity)
            )
            if given.p == 2
            else _proximal_round(problem.part(part), w, norm=given, noise=noise)
        )
        w = run.weights
        points.append(w)
    assert run is not None
    picked = problem.draws.integers(1, rounds + 1) if output == "random" else rounds
    statement = run.statement.with_assumptions(
        f"The {rounds} rounds read disjoint rows ({n} in all), so each row is covered by one."
    )
    return Solution(
        weights=points[picked],
        statement=statement,
        iterates=np.array(points),
        details={
            "rounds": float(rounds),
            "strength": strength,
            "picked": float(picked),
            "noise": run.details["first_noise" if given.p == 2 else "noise"],
        },
    )


def _proximal_round(problem: Problem, centre: Array, *, norm: Norm, noise: str) -> Solution:
    """One round for p < 2: T noisy full gradients of its rows, dual averaging around the centre."""
    loss, n, d = problem.loss, problem.n, problem.d
    smooth = norm.regular(d)
    stretch = loss.row_norm.times(smooth.dual, d)  # of a row, from its norm to that of ψ
    # Without the ridge, which is strongly convex in the Euclidean norm only.
    convexity = loss.weak_curvature * (loss.feature_bound * stretch) ** 2
    shape = shape_of(norm, d, rows=loss.row_norm, noise=noise)
    rho, currency = spending(problem, shape)
    steps = min(_STEPS, max(n, 8))
    reach = problem.c * loss.lipschitz / n
    sigma = deviation(shape, sensitivity=reach, rho=rho / steps)
    release = releaser(problem, shape, steps=steps)
    step = MirrorStep(smooth, problem.domain)
    v, mean, average = centre, np.zeros(d), np.zeros(d)
    for t in range(1, steps + 1):
        g = release(problem.gradient(v) / n, scale=sigma) + loss.ridge * v
        mean += (g + convexity * smooth.gradient(v - centre) - mean) / t
        v = step(mean, centre=centre, strength=convexity)
        average += 2 * t * v / (steps * (steps + 1))
    return problem.solution(
        average,
        {"noise": sigma},
        sensitivity=shape.measured(reach),
        noise=sigma,
        mechanism=f"proximal rounds of {steps} full gradients, {shape.words} noise",
        participation=ONE_PASS,
        **currency,
    )
