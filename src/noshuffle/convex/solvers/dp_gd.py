"""DP gradient descent: full gradients, exact Gaussian composition, projected steps.

    w_{t+1} = Π_K(w_t − α_t (∇F(w_t) + N_t)),     N_t ~ N(0, σ²I),  t = 1 … T

Replacing one of n rows moves the mean gradient by at most Δ = 2L/n (zero-out: L/n). T adaptive
Gaussian releases are exactly one with μ = √T Δ/σ (Dong, Roth, Su 2022), so σ = √T Δ / μ(ε, δ):
nothing is lost to a composition theorem. With G² = L² + dσ² the average of constant steps
α = R/(G√T) is within RG/√T, the last iterate with α_t = c/√t within 2RG(2 + ln T)/√T (Shamir, Zhang
2013). From T ≈ (μn)²/(4d) on more steps gain nothing (σ²/T is constant), and the excess risk is
R L√d·O(1/(εn)). That is the default for losses with kinks, with at most 1024 steps.

Smooth losses need far fewer. Heavy-ball steps v ← 0.9v + g, w ← Π_K(w − v/(β + ridge)) average T
noises of deviation √T·Δ/μ down to that of one release once they have travelled, so only the
distance bounds T from below, and the noise of early steps from above: T = nμ/(3c√d) within [4, 256]
and the mean of the second half, as found by simulation (`gradient_rule`). Where T would be below 4
the noise hides all there is to learn, and steps are (T/4)² as long: the answer is then near the
start. `output` or a rate given take the schedule above. State: the weights, their velocity and
their average.

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (500, 1)), np.tile([1.0, -1.0], 500)
>>> run = dp_gd(logistic(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(2.0), test_seed=0)
>>> round(run.statement.epsilon, 6), bool(run.weights[0] > 1)
(1.0, True)
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.base import OUTPUTS, Solution
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import one_of, positive, whole
from noshuffle.strategies import identity

_MOST_STEPS = 1024


@solver()
def dp_gd(
    problem: Problem,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    output: str | None = None,
) -> Solution:
    """T noisy full-gradient steps.

    Guarantees: the statement covers all T noisy gradients, hence every iterate; convexity is not
    needed for it (only for the rate). Step sizes come from public numbers.
    """
    problem.require("DP-GD", convex=False)
    loss = problem.loss
    is_plain = output is None and learning_rate is None and loss.is_convex
    output = "average" if output is None else output
    one_of(OUTPUTS, output=output)
    if is_plain and loss.is_smooth and loss.smoothness > 0:
        return _heavy_ball(problem, steps)
    n, d, mu, radius = problem.n, problem.d, problem.mu, problem.radius
    reach = problem.c * loss.lipschitz / n
    if steps is None:
        steps = int(min(max(16, (loss.lipschitz * mu / reach) ** 2 / d), n, _MOST_STEPS))
    whole(steps=steps)
    deviation = math.sqrt(steps) * reach / mu
    bound = math.sqrt((loss.lipschitz + loss.ridge * radius) ** 2 + d * deviation**2)
    rate = radius / (bound * math.sqrt(steps)) if learning_rate is None else learning_rate
    positive(learning_rate=rate)
    release = problem.sums(identity(), steps=steps, scale=deviation)
    w, average = problem.start(), np.zeros(d)
    for t in range(1, steps + 1):
        g = release(problem.gradient(w) / n) + loss.ridge * w
        average += w / steps
        # The last iterate needs α_t = c/√t, with the same total length of steps.
        decay = 1.0 if output == "average" else math.sqrt(steps / t)
        w = problem.domain.project(w - rate * decay * g)
    final = average if output == "average" else w
    return _told(problem, final, steps=steps, deviation=deviation, rate=rate)


def _heavy_ball(problem: Problem, steps: int | None) -> Solution:
    """The schedule for smooth convex losses; the guarantee is that of T releases, as above."""
    loss, n, d, mu = problem.loss, problem.n, problem.d, problem.mu
    useful = n * mu / (3 * problem.c * math.sqrt(d))
    if steps is None:
        steps = int(min(max(useful, 4), 256))
    whole(steps=steps)
    reach = problem.c * loss.lipschitz / n
    deviation = math.sqrt(steps) * reach / mu
    release = problem.sums(identity(), steps=steps, scale=deviation)
    rate = min(1.0, useful / 4) ** 2 / (loss.smoothness + loss.ridge)
    w, velocity, average = problem.start(), np.zeros(d), np.zeros(d)
    late = steps - steps // 2  # the second half, and one of one
    for t in range(steps):
        velocity = 0.9 * velocity + release(problem.gradient(w) / n) + loss.ridge * w
        w = problem.domain.project(w - rate * velocity)
        if t >= steps - late:
            average += w / late
    return _told(problem, average, steps=steps, deviation=deviation, rate=rate)


def _told(
    problem: Problem, weights: Array, *, steps: int, deviation: float, rate: float
) -> Solution:
    return problem.solution(
        weights,
        {"noise": deviation, "steps": float(steps), "learning_rate": rate},
        mu=problem.mu,
        sensitivity=math.sqrt(steps) * (problem.c * problem.loss.lipschitz / problem.n),
        mechanism=f"{steps} full gradients with independent Gaussian noise of std {deviation:.6g}",
    )
