"""Noisy variance-reduced stochastic Frank–Wolfe: one pass, noisy gradients, exact minimisation.

    x_{t+1} = (1−η)x_t + η·argmin_{v∈K} ⟨d̃_t, v⟩,     d̃_t = the recursive estimate + noise

(Bassily, Guzmán, Nandi 2021, arXiv 2103.01278.) The estimate of `recursive` is a decayed prefix sum
of w_s with first and step reach Δ₀, Δ₁, and there are two ways to release all of it:

    naive   every d_t with fresh noise: ρ = κ·max(Δ₀, Δ₁)²·Σ(1−η)^{2t}/(2σ²), excess n^{−3/4}
    tree    d_0 once, and nodes of a binary tree over w_1 … w_T: node [a, b] holds
            Σ (1−η)^{b−s}w_s, and a row sits in ⌊lg T⌋ + 1 of them: excess n^{−1}

Rows of the first batch and later rows are disjoint, so ρ is the larger of the two, not the sum
(docs/proofs-convex.md). Noise is generalized Gaussian for the l_p ball (Gaussian for p = 2),
correlated only through node values. State: x, the estimate, a stack of lg T + 1 node values.

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
from collections.abc import Callable
from functools import partial

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.base import ONE_PASS, Solution
from noshuffle.convex.solvers.generalized_gaussian import Shape, deviation, releaser
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.convex.solvers.recursive import Recursion
from noshuffle.errors import Unsupported, one_of

AGGREGATIONS = ("tree", "naive")


def noises(
    recursion: Recursion, shape: Shape, *, first: float, step: float, rho: float, aggregation: str
) -> tuple[float, float]:
    """(σ of d_0 or of every naive release, σ of a tree node) for a total of ρ-zCDP.

    Guarantees: with these, each disjoint half of the data has ρ-zCDP, so the pass has.
    """
    if aggregation == "naive":
        first = step = max(first, step)
        shares = (rho / recursion.decayed_squares(),) * 2
    else:
        shares = rho, rho / recursion.steps.bit_length()
    sigmas = [deviation(shape, sensitivity=s, rho=r) for s, r in zip((first, step), shares)]
    return sigmas[0], sigmas[1]


class DecayedTree:
    """Σ_{s≤t} decay^{t−s} w_s from noisy dyadic nodes; push one w at a time.

    Guarantees: every node goes through `release_fn` once; a leaf is in
    ⌊lg T⌋ + 1 nodes at most, with weights at most one. Raw node sums never leave.
    """

    def __init__(self, release_fn: Callable[[Array], Array], *, decay: float) -> None:
        self.decay, self._release = decay, release_fn
        self._stack: list[tuple[int, Array, Array]] = []  # length, raw sum, released sum

    def push(self, w: Array) -> Array:
        """Take in w_t and return the released decayed prefix sum."""
        length, raw = 1, w
        released = self._release(raw)
        while self._stack and self._stack[-1][0] == length:
            _, left, _ = self._stack.pop()
            raw = left * self.decay**length + raw
            length *= 2
            released = self._release(raw)
        self._stack.append((length, raw, released))
        total = np.zeros_like(w)
        for size, _, value in self._stack:  # oldest first: decay over each newer block
            total = total * self.decay**size + value
        return total


@solver()
def frank_wolfe_noisy(
    problem: Problem,
    *,
    steps: int | None = None,
    rate: float | None = None,
    aggregation: str = "tree",
    convex: bool = True,
) -> Solution:
    """One pass; `steps` defaults to √n, as the rates above want. All iterates are released.

    Guarantees: ρ-zCDP of all released gradients for any smooth loss, convex or not; the linear
    minimisation and the iterates are post-processing. Rows must be bounded in the dual norm of
    the domain (order q for the l_p ball).
    """
    one_of(AGGREGATIONS, aggregation=aggregation)
    loss, domain = problem.loss, problem.domain
    p = domain.norm_order
    if not 1 < p <= 2:
        raise Unsupported(
            f"noisy Frank–Wolfe needs a ball of order 1 < p <= 2, got {p:g}; "
            "use frank_wolfe_poly for polytopes"
        )
    problem.require("noisy Frank–Wolfe", order=p / (p - 1), convex=convex, smooth=True)
    n, d, rho = problem.n, problem.d, problem.rho
    recursion = Recursion.plan(rows=n, steps=steps or max(1, math.isqrt(n)), rate=rate)
    first, step = recursion.reaches(loss, radius=domain.size, neighbours=problem.neighbours)
    shape = Shape(p=p, d=d)
    sigma0, sigma = noises(
        recursion, shape, first=first, step=step, rho=rho, aggregation=aggregation
    )
    # d_0 and the nodes of a tree over T leaves (2T at most), or every naive estimate.
    release = releaser(problem, shape, steps=2 * recursion.steps + 1)
    decay = 1 - recursion.rate
    tree = DecayedTree(partial(release, scale=sigma), decay=decay)
    start = exact = np.zeros(d)

    def pick(t: int, share: Array, w: Array) -> Array:
        nonlocal start, exact
        exact = decay * exact + share
        if t > 0 and aggregation == "tree":
            estimate = decay**t * start + tree.push(share)
        else:
            start = estimate = release(exact, scale=sigma0)
        return domain.lmo(estimate + loss.ridge * w)

    iterates = np.array(list(recursion.walk(problem, pick)))
    return problem.solution(
        iterates[-1].copy(),
        {
            "first_noise": sigma0,
            "noise": sigma,
            "steps": float(recursion.steps),
            "rate": recursion.rate,
        },
        iterates=iterates,
        rho=rho,
        sensitivity=max(first, step),
        noise=sigma,
        mechanism=f"{aggregation} release of {recursion.steps + 1} recursive gradients, "
        f"generalized Gaussian noise of order {shape.r:g}",
        participation=ONE_PASS,
    )
