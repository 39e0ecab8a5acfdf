"""Accelerated DP-SRGD: one epoch, √n steps of √n rows, the optimal rate for smooth losses.

Choquette-Choo, Ganesh, Thakurta 2024 (arXiv 2406.02716): stochastic recursive gradients, Nesterov's
acceleration, and continual counting. With T steps on disjoint batches of B = n/T rows:

    x_t = (1−τ_t)y_{t−1} + τ_t z_{t−1},    τ_t = 2/(t+1)
    z_t = Π_K(z_{t−1} − η_t d̃_t),          η_t = t·η
    y_t = (1−τ_t)y_{t−1} + τ_t z_t

t·d_t = Σ_{s≤t} m_s, m_s = g_s + (s−1)Δ_s, Δ_s = mean[∇f(x_s) − ∇f(x_{s−1})], g_s = mean ∇f(x_s), is
a plain prefix sum, released by any continual-counting strategy; d̃_t is the released sum over t.
One row's share of m_t is at most (L + 8βR)/B in a ball of radius R, in one step only
(docs/proofs-convex.md). η = min(1/(4β), the step of the noise bound); where the second is below
η₀ = 1/(max(β, L²/(βR²))·max(16, T/3)), (η/η₀)² times that: noise hides then what there is to
learn (found on synthetic tables; any η is private).

State: x, y, z, the running sum, the noise stream. Two gradients per row.

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (5000, 1)), np.tile([1.0, -1.0], 5000)
>>> run = accelerated_srgd(logistic(), x, y, epsilon=4.0, delta=1e-6, domain=Ball(1.0), test_seed=0)
>>> round(run.statement.epsilon, 6), bool(run.weights[0] > 0.5)
(4.0, True)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import Solution, split
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import Unsupported, positive, whole
from noshuffle.participation import SinglePass
from noshuffle.strategies import error


def increment_bound(loss: Loss, *, radius: float, steps: int) -> float:
    """Norm of one row's share of m_t, times the batch: max_t L + (t−1)β·2R(τ_{t−1} + τ_t).

    The exact maximum over t ≤ steps: (t−1)·2R·(2/t + 2/(t+1)) rises in t towards 8R.
    """
    t = float(steps)
    drift = (t - 1) * 2 * radius * (2 / t + 2 / (t + 1))
    return loss.lipschitz + loss.smoothness * drift


@solver()
def accelerated_srgd(
    problem: Problem,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    mechanism: Any = "blt",
) -> Solution:
    """One epoch; `weights` is y_T. `steps` defaults to √n.

    Guarantees: the statement covers every released sum, hence all iterates, for smooth losses,
    convex or not. The ridge of the loss is no data and enters outside of the sums.
    """
    problem.require("accelerated SRGD", convex=False, smooth=True)
    loss, domain, n, d = problem.loss, problem.domain, problem.n, problem.d
    radius = domain.euclidean(d)
    if not math.isfinite(radius):
        raise Unsupported("accelerated SRGD needs a bounded domain, got one without a radius")
    steps = max(2, math.isqrt(n)) if steps is None else steps
    whole(steps=steps, at_least=2)
    batches = split(n, steps)
    size = n // steps
    plan = problem.plan(SinglePass(steps), mechanism)
    bound = increment_bound(loss, radius=radius, steps=steps) / size
    noise = plan.noise_multiplier * bound
    release = problem.releases(plan, scale=noise)
    if learning_rate is None:
        bend = max(loss.smoothness + loss.ridge, 1e-12)
        # E‖t·d̃_t − t·∇F‖² is about t·L²/size + d(noise·E)²; balance R²/η with η·Σ of it.
        private = d * (noise * error(plan.strategy, steps).max) ** 2
        spread = steps * loss.lipschitz**2 / size + private
        learning_rate = min(1 / (4 * bend), radius / math.sqrt(steps * spread))
        # Steps far below what curvature allows are short because of noise, which still carries z
        # across the whole domain, and curvature makes that a loss. Shorter ones leave y near the
        # start.
        bend = max(bend, (loss.lipschitz / radius) ** 2 / bend)
        learning_rate *= min(1.0, learning_rate * bend * max(16, steps / 3)) ** 2
    positive(learning_rate=learning_rate)
    z = w = point = problem.start()
    total = np.zeros(d)
    for t in range(1, steps + 1):
        tau = 2 / (t + 1)
        previous, point = point, (1 - tau) * w + tau * z
        batch = slice(batches[t - 1].start, batches[t - 1].start + size)
        share = new = problem.gradient(point, batch) / size
        if t > 1:
            share = new + (t - 1) * (new - problem.gradient(previous, batch) / size)
        total = total + release(share)
        # η_t·d̃_t = (t·η)·(released sum)/t: the weights cancel.
        z = domain.project(z - learning_rate * (total + t * loss.ridge * point))
        w = (1 - tau) * w + tau * z
    details = {"noise": noise, "steps": float(steps), "learning_rate": learning_rate}
    return problem.solution(w, details, plan=plan)
