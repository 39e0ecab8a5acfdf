"""Nonconvex optimization: Frank–Wolfe to a nearly stationary point, one pass.

    p = 1 (l1 ball, simplex)     vertices by report-noisy-max        (`frank_wolfe_poly`)
    1 < p ≤ 2 (l_p balls)        noisy gradients from a decayed tree (`frank_wolfe_noisy`)

Bassily, Guzmán, Menart 2021 (arXiv 2107.05585). An iterate drawn uniformly has in expectation the
mean gap of the path. Its length A = ηT balances progress with sampling and noise
(docs/proofs-convex.md), over T = n^{2/3} steps:

    A = min(n^{1/3}, (nμ/√d)^{1/2})  for 1 < p ≤ 2,    A = min(n^{1/3}, (nμ)^{1/3})  for p = 1.

The index of the returned iterate is drawn without data; the statement covers all iterates anyway.

>>> from noshuffle.convex.losses import sigmoid
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (1000, 1)), np.tile([1.0, -1.0], 1000)
>>> run = frank_wolfe_stationary(sigmoid(), x, y, epsilon=2.0, delta=1e-6, domain=Ball(1.0),
...                              test_seed=0)
>>> run.statement.epsilon <= 2.0, run.weights.shape
(True, (2,))
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.frank_wolfe_noisy import frank_wolfe_noisy
from noshuffle.convex.solvers.frank_wolfe_poly import frank_wolfe_poly
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import Unsupported


def schedule(*, rows: int, dimension: int, mu: float, is_polytope: bool) -> tuple[int, float]:
    """(steps, η) from public numbers, as derived in the docstring."""
    steps = max(1, min(rows // 2, int(rows ** (2 / 3))))
    private = (rows * mu) ** (1 / 3) if is_polytope else (rows * mu / dimension**0.5) ** 0.5
    length = max(1.0, min(rows ** (1 / 3), private))
    return steps, min(1.0, length / steps)


@solver()
def frank_wolfe_stationary(
    problem: Problem, *, steps: int | None = None, rate: float | None = None
) -> Solution:
    """A uniformly drawn iterate; `iterates` holds all of them.

    Guarantees: those of the two solvers above, which need smoothness and no convexity.
    """
    is_polytope = problem.domain.is_polytope
    planned = schedule(rows=problem.n, dimension=problem.d, mu=problem.mu, is_polytope=is_polytope)
    steps = planned[0] if steps is None else steps
    rate = planned[1] if rate is None else rate
    inner = frank_wolfe_poly if is_polytope else frank_wolfe_noisy
    run = inner.on(problem, steps=steps, rate=rate, convex=False)
    if run.iterates is None:
        raise Unsupported("iterates are not kept beyond 10,000 dimensions; use fewer features")
    picked = problem.draws.integers(0, steps + 1)
    details = {**run.details, "picked": float(picked)}
    return replace(run, weights=np.array(run.iterates[picked]), details=details)
