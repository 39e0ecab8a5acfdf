"""The proximal scheme for weakly convex losses: convex problems on fresh rows, one after another.

    for j = 0 … J−1:  x_{j+1} ≈ argmin_{x∈K} F(x) + (β/2)‖x − x_j‖²,    β = 2ϱ

f + (ϱ/2)‖·‖² is convex, so each inner problem is ϱ-strongly convex. It is solved by phased mirror
descent (p = 2) on its own n/J rows with the whole budget: rows are disjoint, nothing composes
(Bassily, Guzmán, Menart 2021, arXiv 2107.05585; Davis, Grimmer 2019). The gradient handed to the
solver is ∇f + ϱ(x − x_j), the rest (β−ϱ)/2·‖x − x_j‖² is kept exactly in the dual step. With
J ~ min(√n, (εn/√d)^{2/3}) a uniformly drawn x_j has E‖∇F_β‖ of order n^{−1/4} + (√d/(εn))^{1/3}
(docs/proofs-convex.md).

For 1 ≤ p < 2 and rows bounded in the dual norm, f is ϱ-weakly convex in ‖·‖_p, and ψ =
‖·‖_r²/(2(r−1)), r = max(p, 1 + 1/ln d), takes the place of ½‖·‖²: F + ϱψ(· − x_j) is convex and ϱψ
is ϱ-strongly convex on top, so that dual averaging needs no phases (and has no bounded domain),

    x ← x_j + ∇ψ*(−ḡ/ϱ),   ḡ = mean of [noisy ∇F(x) + ϱ∇ψ(x − x_j)].

Gradients are measured in order s = r/(r−1); a row bounded in order q > s grows by d^{1/s−1/q} ≤ e,
and ϱ by its square. State: x_j.

>>> from noshuffle.convex.losses import phase
>>> from noshuffle.convex.solvers.domains import Ball
>>> x = np.tile([[1.0, 0.0], [0.0, 1.0]], (500, 1)); y = (x @ [0.8, 0.0]) ** 2
>>> run = weakly_convex(phase(radius=1.0), x, y, epsilon=4.0, delta=1e-6, domain=Ball(1.0),
...                     start=np.array([0.5, 0.1]), test_seed=0)
>>> round(run.statement.epsilon, 6), run.weights.shape
(4.0, (2,))
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.arrays import Array, real_array
from noshuffle.convex.solvers.base import ONE_PASS, Solution, split
from noshuffle.convex.solvers.domains import Everywhere
from noshuffle.convex.solvers.generalized_gaussian import Shape, deviation, releaser, spending
from noshuffle.convex.solvers.phased import Prox, dual_map, phased_mirror_descent
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, Unsupported, one_of, whole


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
) -> Solution:
    """J proximal rounds; returns a uniformly drawn x_j (or the last), with all in `iterates`.

    Guarantees: each round is μ-GDP (p = 2) or ρ-zCDP on rows of its own, so the whole pass is.
    `start` must be chosen without the data (or by another private release, to be added up).
    """
    one_of(("random", "last"), output=output)
    if not 1 <= p <= 2:
        raise InvalidInput(f"p must lie in [1, 2], got {p!r}; beyond 2 take p = 2")
    order = p / (p - 1) if p > 1 else math.inf
    problem.require("the proximal scheme", convex=False, order=order)
    loss, domain, n, d = problem.loss, problem.domain, problem.n, problem.d
    if p < 2 and not isinstance(domain, Everywhere):
        raise Unsupported("the proximal scheme has a bounded domain for p = 2 only; use Everywhere")
    if loss.is_convex:
        raise Unsupported(f"{loss.name} is convex; use phased_sgd or phased_mirror_descent")
    if rounds is None:
        rounds = rounds_for(rows=n, dimension=d, mu=problem.mu)
    whole(rounds=rounds, at_most=max(1, n // 4))
    strength = 2 * loss.weak_convexity
    if strength == 0:
        raise Unsupported(f"the ridge of {loss.name} makes it convex; use dp_gd, or less ridge")
    w = domain.project(domain.start(d) if start is None else real_array(start=start))
    points = [w]
    run = None
    for part in split(n, rounds):
        # The regularised solution lies within G/β of the centre: that is how far phases search.
        reach = min(2 * domain.euclidean(d), 2 * loss.lipschitz / strength)
        run = (
            phased_mirror_descent.on(
                problem.part(part), radius=reach, prox=Prox(w, strength, loss.weak_convexity)
            )
            if p == 2
            else _proximal_round(problem.part(part), w, p=p)
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
        details={"rounds": float(rounds), "strength": strength, "picked": float(picked)},
    )


def _proximal_round(problem: Problem, centre: Array, *, p: float, steps: int = 128) -> Solution:
    """One round for p < 2: T noisy full gradients of its rows, dual averaging around the centre."""
    loss, n, d = problem.loss, problem.n, problem.d
    r = max(p, 1 + 1 / max(math.log(d), 1.0))
    q = r / (r - 1)
    stretch = d ** max(0.0, 1 / q - 1 / loss.order)  # of a row, from its norm to that of order q
    # Without the ridge, which is strongly convex in the Euclidean norm only.
    convexity = loss.weak_curvature * (loss.feature_bound * stretch) ** 2
    shape = Shape(p=r, d=d)
    rho, currency = spending(problem, shape)
    steps = min(steps, max(n, 8))
    reach = problem.c * loss.lipschitz * stretch / n
    sigma = deviation(shape, sensitivity=reach, rho=rho / steps)
    release = releaser(problem, shape, steps=steps)
    v, mean, average = centre, np.zeros(d), np.zeros(d)
    for t in range(1, steps + 1):
        g = release(problem.gradient(v) / n, scale=sigma) + loss.ridge * v
        mean += (g + convexity * norm_gradient(v - centre, p=r) - mean) / t
        v = centre + dual_map(-mean / convexity, p=r)
        average += 2 * t * v / (steps * (steps + 1))
    return problem.solution(
        average,
        {"noise": sigma},
        sensitivity=reach,
        noise=sigma,
        mechanism=f"proximal rounds of {steps} full gradients, generalized Gaussian noise of order "
        f"{shape.r:g}",
        participation=ONE_PASS,
        **currency,
    )


def norm_gradient(y: Array, *, p: float) -> Array:
    """∇ψ(y) = ‖y‖_p^{2−p} sign(y)|y|^{p−1}/(p−1), the inverse of `dual_map`."""
    norm = float(np.linalg.norm(y, p))
    if norm == 0:
        return np.zeros_like(y)
    return np.asarray(norm * np.sign(y) * (np.abs(y) / norm) ** (p - 1) / (p - 1))
