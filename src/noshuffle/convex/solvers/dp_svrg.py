"""DP-SVRG: variance reduction by private snapshots, with noise that shrinks as iterates settle.

    each epoch: snapshot v, G = mean gradient at v + N(0, (z·L/n)² I)
    each step:  D = Σ_{batch} [∇f(w) − ∇f(v)],  ‖each difference‖ ≤ c_t = min(2L, β‖w_t − v‖)
                ĝ = (D + N(0, (z·c_t)² I))/(qn) + G + ridge·w,   w ← Π_K(w − ηĝ)

Johnson, Zhang 2013; the private form scales the noise of a step to c_t, which is public: w_t and v
are released already, and β-smoothness bounds the difference by β‖w_t − v‖. Every step is then one
Poisson-sampled Gaussian of multiplier z whatever c_t is, so the composition is that of DP-SGD
plus one plain Gaussian of multiplier z per epoch, summed as Rényi divergences (zero-out: one row
moves the sum of differences by c_t, and the sum of snapshot gradients by L).

The noise of a snapshot is the same in all m steps of its epoch, and moves the last of them by up to
ηm of itself, while differences add at most D = min(2L, βR)/q times the noise of one step: with
V = d(z/n)²(mL² + D²) the mean of T steps of η has an excess of R²/(2ηT) + ηV/2 or so, hence
η = R/√(TV), at most 1/(2(β + ridge)(1 + 4/(qn))), within which variance reduction converges. The
answer is the mean of the second half of all steps.

State: weights, snapshot and its private gradient, the average.

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (500, 1)), np.tile([1.0, -1.0], 500)
>>> run = dp_svrg(logistic(), x, y, epsilon=2.0, delta=1e-6, domain=Ball(2.0), test_seed=0)
>>> run.statement.epsilon <= 2.0, bool(run.weights[0] > 0.5)
(True, True)
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from noshuffle.accounting import calibrate, renyi
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import positive, unit_rate, whole


def svrg_epsilon(*, noise: float, epochs: int, steps: int, rate: float, delta: float) -> float:
    """ε of `epochs` snapshots and `epochs·steps` sampled steps, all of multiplier `noise`."""
    records = [(noise, 1.0, epochs), (noise, rate, epochs * steps)]
    return renyi.compose_epsilon(records, delta=delta)


@lru_cache(maxsize=64)
def svrg_noise(*, epsilon: float, epochs: int, steps: int, rate: float, delta: float) -> float:
    """The least multiplier of that ε; ten curves, so the same question is answered once."""

    def spent(noise: float) -> float:
        return svrg_epsilon(noise=noise, epochs=epochs, steps=steps, rate=rate, delta=delta)

    return calibrate.smallest(spent, epsilon)


@solver(only="zero-out")
def dp_svrg(
    problem: Problem,
    *,
    epochs: int = 4,
    steps: int = 25,
    rate: float = 0.1,
    learning_rate: float | None = None,
) -> Solution:
    """`epochs` snapshots with `steps` sampled corrections each.

    Guarantees: the statement (zero-out neighbours) covers every iterate; a difference of
    gradients beyond c_t cannot occur for a loss that keeps its bounds, and non-smooth losses,
    whose differences have no such bound, are refused.
    """
    whole(epochs=epochs, steps=steps)
    unit_rate(rate=rate)
    problem.require("DP-SVRG", smooth=True)
    loss, n, d = problem.loss, problem.n, problem.d

    noise = svrg_noise(
        epsilon=problem.epsilon, epochs=epochs, steps=steps, rate=rate, delta=problem.delta
    )
    bound, expected = loss.lipschitz, rate * n
    if learning_rate is None:
        reach = min(2 * bound, loss.smoothness * problem.radius) / rate
        private = d * (noise / n) ** 2 * (steps * bound**2 + reach**2)
        curved = 2 * max(loss.smoothness + loss.ridge, 1e-12) * (1 + 4 / expected)
        learning_rate = min(problem.radius / math.sqrt(epochs * steps * private), 1 / curved)
    positive(learning_rate=learning_rate)
    release = problem.gaussians(steps=epochs * (steps + 1))
    w, average = problem.start(), np.zeros(d)
    late = epochs * steps - epochs * steps // 2  # the second half, and one of one
    for epoch in range(epochs):
        v = w
        snapshot = release(problem.gradient(v) / n, scale=noise * bound / n)
        for step in range(steps):
            reach = min(2 * bound, loss.smoothness * float(np.linalg.norm(w - v)))
            chosen = np.flatnonzero(problem.draws.coins(rate, n))
            part = problem.gradient(w, chosen) - problem.gradient(v, chosen)
            # At w = v every difference is zero, whatever the data: there is nothing to release.
            part = release(part, scale=noise * reach) if reach > 0 else np.zeros(d)
            g = part / expected + snapshot + loss.ridge * w
            w = problem.domain.project(w - learning_rate * g)
            if epoch * steps + step >= epochs * steps - late:
                average += w / late
    return problem.solution(
        average,
        {"noise": noise, "learning_rate": learning_rate},
        epsilon=svrg_epsilon(
            noise=noise, epochs=epochs, steps=steps, rate=rate, delta=problem.delta
        ),
        sensitivity=bound,
        noise=noise,
        participation=f"every snapshot, and each of {epochs * steps} steps by a secret coin flip "
        f"of probability {rate:g}",
        mechanism=f"{epochs} full gradients and {epochs * steps} sampled differences",
        accountant="rdp",
    )
