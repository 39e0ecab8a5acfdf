"""Noisy variance-reduced stochastic Frank–Wolfe: one pass, noisy gradients, exact minimisation.

    x_{t+1} = (1−η)x_t + η·argmin_{v∈K} ⟨d̃_t, v⟩,     d̃_t = the recursive estimate + noise

(Bassily, Guzmán, Nandi 2021, arXiv 2103.01278.) The estimate of `recursive` is a decayed prefix sum
of w_s with first and step reach Δ₀, Δ₁: d_0 is released once and the rest by one of the ways of
`decayed_sums`: a square root of the workload (excess n^{−1}), for noise="generalized" independent
steps or a tree, whichever has less noise; "naive" noise on every estimate has n^{−3/4}.

Rows of the first batch and later rows are disjoint, so the guarantee is the larger of the two, not
the sum (docs/proofs-convex.md). The domain is a ball of a norm of order p ≤ 2 that is no polytope:
l_p, groups (p = 1: vertices are single groups), matrices (p = 1: the nuclear norm, vertices of rank
one; Jain, Thakkar, Thakurta 2018). Gradients are measured in its dual norm (`generalized_gaussian`;
normal noise is accounted for exactly). State: x, and that of the released sums.

>>> from noshuffle.convex.losses import linear
>>> from noshuffle.convex.solvers.domains import Ball
>>> x = np.tile([[0.6, 0.8]], (4000, 1))
>>> run = frank_wolfe_noisy(linear(), x, None, epsilon=1.0, delta=1e-6, domain=Ball(1.0),
...                         steps=30, test_seed=0)
>>> bool(np.linalg.norm(run.weights - [-0.6, -0.8]) < 0.3), run.statement.epsilon <= 1
(True, True)
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers import decayed_sums
from noshuffle.convex.solvers.base import ONE_PASS, Solution
from noshuffle.convex.solvers.generalized_gaussian import (
    Shape,
    deviation,
    releaser,
    shape_of,
    spending,
)
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.convex.solvers.recursive import Recursion
from noshuffle.errors import Unsupported, one_of


def noises(
    recursion: Recursion, shape: Shape, *, first: float, step: float, rho: float, aggregation: str
) -> tuple[float, float]:
    """(σ of d_0 or of every naive release, σ of one release afterwards) for a total of ρ-zCDP.

    Guarantees: with these, each disjoint half of the data has ρ-zCDP (μ²/2 of μ-GDP where noise is
    normal), so the pass has.
    """
    shares = {"tree": recursion.steps.bit_length(), "steps": 1.0, "naive": 1.0, "root": 1.0}
    if aggregation == "naive":
        first = step = max(first, step)
        rho /= recursion.decayed_squares()
    elif aggregation == "root":
        step *= decayed_sums.root(recursion.steps, 1 - recursion.rate)[1]
    sigma0 = deviation(shape, sensitivity=first, rho=rho)
    return sigma0, deviation(shape, sensitivity=step, rho=rho / shares[aggregation])


@solver()
def frank_wolfe_noisy(
    problem: Problem,
    *,
    steps: int | None = None,
    rate: float | None = None,
    aggregation: str | None = None,
    noise: str = "normal",
    convex: bool = True,
) -> Solution:
    """One pass; `steps` defaults to √n, as the rates above want. All iterates are released.

    Guarantees: μ-GDP (normal noise) or ρ-zCDP of all released gradients for any smooth loss,
    convex or not; the linear minimisation and the iterates are post-processing. Rows must be
    bounded in the dual norm of the domain (order q for the l_p ball).
    """
    loss, domain = problem.loss, problem.domain
    norm = domain.norm
    if norm.p > 2 or domain.is_polytope or not math.isfinite(domain.size):
        raise Unsupported(
            f"noisy Frank–Wolfe needs a ball of order p <= 2 that is round, got {domain!r}; "
            "use frank_wolfe_poly for polytopes"
        )
    problem.require("noisy Frank–Wolfe", rows=norm.dual, convex=convex, smooth=True)
    n, d = problem.n, problem.d
    recursion = Recursion.plan(rows=n, steps=steps, rate=rate)
    first, step = recursion.reaches(loss, radius=domain.size, neighbours=problem.neighbours)
    shape = shape_of(norm, d, rows=loss.row_norm, noise=noise)
    decay, steps = 1 - recursion.rate, recursion.steps
    rho, currency = spending(problem, shape)
    if aggregation is None:
        aggregation = decayed_sums.smallest(steps=steps, decay=decay, is_normal=shape.is_normal)
    one_of(decayed_sums.AGGREGATIONS, aggregation=aggregation)
    if aggregation == "root" and not shape.is_normal:
        raise Unsupported(f"sums of noise of order {shape.r:g} are of no known law; use 'tree'")
    sigma0, sigma = noises(
        recursion, shape, first=first, step=step, rho=rho, aggregation=aggregation
    )
    # d_0 and the nodes of a tree over T leaves (2T at most), or every naive estimate.
    release = releaser(problem, shape, steps=2 * steps + 1)
    push = decayed_sums.push_with(
        aggregation, problem, release, sigma=sigma, steps=steps, decay=decay
    )
    start = exact = np.zeros(d)

    def pick(t: int, share: Array, w: Array) -> Array:
        nonlocal start, exact
        exact = decay * exact + share
        if t > 0 and aggregation != "naive":
            estimate = decay**t * start + push(share)
        else:
            start = estimate = release(exact, scale=sigma0)
        return domain.lmo(estimate + loss.ridge * w)

    iterates = np.array(list(recursion.walk(problem, pick)))
    return problem.solution(
        iterates[-1].copy(),
        {
            "first_noise": sigma0,
            "noise": sigma,
            "steps": float(steps),
            "rate": recursion.rate,
        },
        iterates=iterates,
        sensitivity=shape.measured(max(first, step)),
        noise=sigma,
        mechanism=f"{aggregation} release of {steps + 1} recursive gradients, {shape.words} noise",
        participation=ONE_PASS,
        **currency,
    )
