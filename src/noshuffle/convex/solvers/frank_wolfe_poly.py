"""Polyhedral stochastic Frank–Wolfe: one pass, variance reduction, vertices by report-noisy-max.

    x_{t+1} = (1−η)x_t + η·v_t,     v_t = noisy argmin over vertices v of ⟨v, d_t⟩

(Bassily, Guzmán, Nandi 2021, arXiv 2103.01278, for l1 balls and other polytopes with J vertices;
d_t is the recursive estimate of `recursive`.) Gradients are never released, only chosen vertices.
A row moves the scores of step t by at most D·max(Δ₀, Δ₁)·(1−η)^{t−s} from its own step s on, so
Gumbel noise of scale b composes to

    ρ = Σ_t (D·max(Δ₀, Δ₁)(1−η)^t)²/(2b²)      →      b = D·max(Δ₀, Δ₁)·√(Σ(1−η)^{2t}/(2ρ))

(docs/proofs-convex.md). The excess grows with ln J only, so d may be far above n. State: x and d_t.

>>> from noshuffle.convex.losses import linear
>>> from noshuffle.convex.solvers.domains import L1Ball
>>> x = np.tile([[0.1, -1.0, 0.2]], (2000, 1))
>>> run = frank_wolfe_poly(linear(order=math.inf), x, None, epsilon=1.0, delta=1e-6,
...                        domain=L1Ball(1.0), steps=20, test_seed=0)
>>> bool(run.weights[1] > 0.8), run.statement.epsilon <= 1
(True, True)
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.base import ONE_PASS, Solution
from noshuffle.convex.solvers.noisy_max import choose
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.convex.solvers.recursive import Recursion
from noshuffle.errors import Unsupported, one_of

#: zCDP of one choice is ε²/8 for Gumbel noise and ε²/2 for Laplace; b in units of move/√(2ρ).
CHOICE_COST = {"gumbel": 1.0, "laplace": 2.0, "permute-and-flip": 2.0}


def vertex_noise(
    recursion: Recursion, *, reach: float, radius: float, rho: float, noise: str = "gumbel"
) -> float:
    """Scale b of the noise on vertex scores for a pass of ρ-zCDP; see the docstring.

    Guarantees: Σ_t ρ_t ≤ ρ for the worst row, over all steps that it still influences.
    """
    one_of(tuple(CHOICE_COST), noise=noise)
    return CHOICE_COST[noise] * radius * reach * math.sqrt(recursion.decayed_squares() / (2 * rho))


@solver()
def frank_wolfe_poly(
    problem: Problem,
    *,
    steps: int | None = None,
    rate: float | None = None,
    noise: str = "gumbel",
    convex: bool = True,
) -> Solution:
    """One pass over the rows; `steps` defaults to √n (single-row steps: n/2).

    Guarantees: ρ-zCDP of all chosen vertices, hence of all iterates, for any smooth loss.
    """
    loss, domain = problem.loss, problem.domain
    if not domain.is_polytope:
        raise Unsupported(
            f"polyhedral Frank–Wolfe needs L1Ball or Simplex, got {type(domain).__name__}"
        )
    problem.require("polyhedral Frank–Wolfe", rows=math.inf, convex=convex, smooth=True)
    n, d = problem.n, problem.d
    recursion = Recursion.plan(rows=n, steps=steps, rate=rate)
    reach = max(recursion.reaches(loss, radius=domain.size, neighbours=problem.neighbours))
    scale = vertex_noise(recursion, reach=reach, radius=domain.size, rho=problem.rho, noise=noise)
    estimate = np.zeros(d)

    def pick(t: int, share: Array, w: Array) -> Array:
        nonlocal estimate
        estimate = (1 - recursion.rate) * estimate + share
        scores = -domain.scores(estimate + loss.ridge * w)
        return domain.vertex(choose(scores, scale=scale, noise=noise, draws=problem.draws), d)

    # All iterates up to 10,000 dimensions, beyond that the last.
    path = deque(recursion.walk(problem, pick), maxlen=None if d <= 10_000 else 1)
    return problem.solution(
        path[-1],
        {"noise": scale, "steps": float(recursion.steps), "rate": recursion.rate},
        iterates=np.array(path) if len(path) > 1 else None,
        rho=problem.rho,
        sensitivity=domain.size * reach,
        noise=scale,
        mechanism=f"{recursion.steps + 1} vertices by report-noisy-max with {noise} noise",
        participation=ONE_PASS,
    )
