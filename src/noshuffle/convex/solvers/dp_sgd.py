"""DP-SGD by Poisson sampling on a loss object.

    batch_t: every row by its own secret coin of probability q
    ĝ_t = (Σ_{batch} g_i + N(0, (zL)² I)) / (qn)           divided by a constant, not by |batch|
    w_{t+1} = Π_K(w_t − η ĝ_t)

Abadi et al. 2016, accounted by the privacy-loss distribution (`accounting.fourier`). The bound L of
the loss takes the place of clipping. Neighbours: a row is zeroed out, which has the privacy loss of
adding or removing it while n, the constant in the divisor, stays the same.

This solver needs sampling, which the rest of this library does without: it is here to compare with.

State: the weights and their average.

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (500, 1)), np.tile([1.0, -1.0], 500)
>>> run = dp_sgd(logistic(), x, y, epsilon=2.0, delta=1e-6, domain=Ball(2.0), rate=0.1, steps=50,
...              test_seed=0)
>>> run.statement.epsilon <= 2.0, bool(run.weights[0] > 0.5)
(True, True)
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.solvers.base import OUTPUTS, Solution
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import one_of, positive, unit_rate, whole
from noshuffle.participation import Poisson


@solver(only="zero-out")
def dp_sgd(
    problem: Problem,
    *,
    rate: float,
    steps: int,
    learning_rate: float | None = None,
    output: str = "average",
) -> Solution:
    """Poisson-sampled DP-SGD; `learning_rate` defaults to the step size of the convex bound.

    Guarantees: the statement (zero-out neighbours) covers every iterate. The coins come from
    the same secret stream as the noise. An empty batch still releases noise.
    """
    one_of(OUTPUTS, output=output)
    unit_rate(rate=rate)
    whole(steps=steps)
    problem.require("DP-SGD", convex=False)
    loss, n, d = problem.loss, problem.n, problem.d
    plan = problem.plan(Poisson(steps, rate), "identity")
    expected = rate * n
    deviation = plan.noise_multiplier * loss.lipschitz / expected
    if learning_rate is None:
        spread = loss.lipschitz**2 * (1 + 1 / expected) + d * deviation**2
        learning_rate = problem.radius / math.sqrt(steps * spread)
    positive(learning_rate=learning_rate)
    release = problem.sums(plan.strategy, steps=steps, scale=deviation)
    w, average = problem.start(), np.zeros(d)
    for _ in range(steps):
        chosen = np.flatnonzero(problem.draws.coins(rate, n))
        g = release(problem.gradient(w, chosen) / expected) + loss.ridge * w
        average += w / steps
        w = problem.domain.project(w - learning_rate * g)
    return problem.solution(
        average if output == "average" else w,
        {"noise": deviation, "steps": float(steps), "rate": rate},
        plan=plan,
    )
