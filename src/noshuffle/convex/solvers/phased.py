"""Phased localisation: each phase learns from fresh rows, adds noise once, and halves the search.

    phase i = 1, 2, …:   n_i = n/2^i fresh rows,   η_i = η/4^i,   start from the last release

Feldman, Koren, Talwar 2020 (phased SGD) and Asi, Feldman, Koren, Talwar 2021 (mirror descent, l_p).
Rows of different phases are disjoint: nothing composes across phases (docs/proofs-convex.md).

Phased SGD (smooth losses, η_i ≤ 2/(β + ridge), where a step is non-expansive): one row moves every
iterate of its phase by at most η_i·2L/batch, and N(0, (2Lη_i/(batch·μ))² I) on their average makes
the phase μ-GDP. The projection has to be the Euclidean one, which no convex set makes expansive;
domains have that one, whatever norm they are balls of. Where it is found by iteration, two runs
part by 2e more in each of m steps, e = `inexact`·(R + ‖point‖): that is added to the move.

Phased mirror descent (any convex loss, any norm of `optim.norms` of order 1 ≤ p ≤ 2: l_p, groups,
Schatten). Phase i minimises the regularised risk F_i(x) + λ_iψ(x − x_{i−1}) over the domain K,
ψ = ‖·‖_p²/(2(p−1)) (1-strongly convex in ‖·‖_p; p at least 1 + 1/ln k), λ_i = 1/(η_i n_i), by T_i
steps of dual averaging on noisy full gradients of its n_i rows (`mirror_step`),

    x ← argmin_{x∈K} ⟨ḡ, x⟩ + λ_iψ(x − x_{i−1}),   ḡ = mean of all noisy gradients so far,

each gradient with noise for ρ/T_i, sensitivity 2L/n_i in ‖·‖_q (`generalized_gaussian`; normal
noise: ρ = μ²/2 exactly).

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.tile([[1.0, 0.0], [-1.0, 0.0]], (500, 1)), np.tile([1.0, -1.0], 500)
>>> run = phased_sgd(logistic(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(1.0), test_seed=0)
>>> round(run.statement.epsilon, 6), bool(run.weights[0] > 0.2)
(1.0, True)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.domains import Everywhere
from noshuffle.convex.solvers.generalized_gaussian import deviation, releaser, shape_of, spending
from noshuffle.convex.solvers.mirror_step import MirrorStep
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, instance_of, positive, whole
from noshuffle.optim.norms import Norm

_SINGLE = "each row is read in one of the phases only, in any order"


def phase_slices(n: int) -> list[slice]:
    """Consecutive slices of n/2, n/4, … rows; phases stop when fewer than two rows are left."""
    out, start = [], 0
    size = n // 2
    while size >= 1:
        out.append(slice(start, start + size))
        start, size = start + size, size // 2
    return out or [slice(0, n)]


@solver()
def phased_sgd(
    problem: Problem, *, learning_rate: float | None = None, batch_size: int = 1
) -> Solution:
    """Phased one-pass SGD; only the end of each phase is released, with noise.

    Guarantees: μ-GDP as derived above; step sizes beyond 2/(β + ridge), where steps may expand,
    are refused, and so are losses with kinks. Iterates inside a phase are not released.
    """
    problem.require("phased SGD", smooth=True)
    loss, domain, n, d, mu = problem.loss, problem.domain, problem.n, problem.d, problem.mu
    whole(batch_size=batch_size, at_most=n)
    limit = 2 / max(loss.smoothness + loss.ridge, 1e-12)
    if learning_rate is None:
        best = min(4 / math.sqrt(n), 2 * mu / math.sqrt(d)) * batch_size
        best *= problem.radius / loss.lipschitz
        learning_rate = min(best, 4 * limit)
    positive(learning_rate=learning_rate)
    if learning_rate / 4 > limit * (1 + 1e-12):
        raise InvalidInput(
            f"learning_rate/4 must be at most 2/(smoothness + ridge) = {limit:g}, got "
            f"{learning_rate / 4:g}; steps beyond it may expand"
        )

    def move(eta: float, steps: int) -> float:
        """How far one row can move the average of a phase."""
        far = 2 * problem.radius * (1 + eta * loss.ridge) + eta * loss.lipschitz
        inexact = domain.inexact and 2 * steps * domain.inexact * far
        return problem.c * loss.lipschitz * eta / batch_size + inexact

    phases = phase_slices(n)
    release = problem.gaussians(steps=len(phases))
    w = problem.start()
    released = [w]
    for i, part in enumerate(phases, start=1):
        eta = learning_rate / 4**i
        v, average, count = w, np.zeros(d), 0
        for start in range(part.start, part.stop, batch_size):
            batch = slice(start, min(start + batch_size, part.stop))
            # Divided by the planned batch size: a short last batch moves less, never more.
            g = problem.gradient(v, batch) / batch_size
            v = domain.project(v - eta * (g + loss.ridge * v))
            average, count = average + v, count + 1
        w = domain.project(release(average / count, scale=move(eta, count) / mu))
        released.append(w)
    first = move(learning_rate / 4, -(-len(range(*phases[0].indices(n))) // batch_size))
    return problem.solution(
        w,
        {"learning_rate": learning_rate, "first_noise": first / mu},
        iterates=np.array(released),
        mu=mu,
        sensitivity=first,
        mechanism="phased SGD, Gaussian noise on the average of each phase",
        participation=_SINGLE,
        notes=("Iterates inside a phase are kept secret; the end of each phase is released.",),
    )


class Prox(NamedTuple):
    """An extra term (strength/2)‖x − centre‖² of which `convexify` makes the loss convex."""

    centre: Array
    strength: float
    convexify: float


@solver()
def phased_mirror_descent(
    problem: Problem,
    *,
    p: float = 2.0,
    norm: Norm | None = None,
    radius: float | None = None,
    steps: int = 128,
    noise: str = "normal",
    prox: Prox | None = None,
) -> Solution:
    """Phased noisy mirror descent; non-smooth losses welcome. `radius` bounds the solution.

    `norm` measures weights, l_p if it is not given.

    Guarantees: μ-GDP (normal noise) or ρ-zCDP from the noisy gradients alone, convex or not; rows
    must be bounded in the dual norm. Every iterate lies in the domain.
    """
    loss, domain, n, d = problem.loss, problem.domain, problem.n, problem.d
    given = mirror_norm("phased mirror descent", Norm(p) if norm is None else norm)
    problem.require("phased mirror descent", rows=given.dual, convex=prox is None)
    norm = given.regular(d)
    if prox is not None:
        instance_of(Prox, prox=prox)
    if prox is not None and (norm.p != 2 or prox.convexify < loss.weak_convexity):
        raise InvalidInput("a prox term needs p = 2 and convexify of at least the weak convexity")
    if radius is None:
        radius = 1.0 if isinstance(domain, Everywhere) else domain.reach(norm, d)
    positive(radius=radius)
    whole(steps=steps)
    shape = shape_of(given, d, rows=loss.row_norm, noise=noise)
    rho, currency = spending(problem, shape)
    # E‖noise‖ in the dual norm is σ times this, at most.
    spread = math.sqrt(shape.kappa) * (given.dual.spread(d) if shape.is_normal else math.sqrt(d))
    eta = radius / loss.lipschitz * min(1 / math.sqrt(n), math.sqrt(2 * rho) / spread)
    eta *= 4  # the first phase then uses η itself
    phases = phase_slices(n)
    counts = [min(steps, max(part.stop - part.start, 8)) for part in phases]
    release = releaser(problem, shape, steps=sum(counts))
    start = problem.start() if prox is None else prox.centre
    released, noises = [start], []
    for i, (part, count) in enumerate(zip(phases, counts), start=1):
        size = part.stop - part.start
        reach = problem.c * loss.lipschitz / size
        noises.append(deviation(shape, sensitivity=reach, rho=rho / count))
        strength = 4**i / (eta * size)
        centre, v = released[-1], released[-1]
        step = MirrorStep(norm, domain)
        mean, average, weight = np.zeros(d), np.zeros(d), 0.0
        for t in range(count):
            g = problem.gradient(v, part) / size
            g = release(g, scale=noises[-1]) + loss.ridge * v
            if prox is not None:
                g = g + prox.convexify * (v - prox.centre)
            mean += (g - mean) / (t + 1)
            if prox is None:
                v = step(mean, centre=centre, strength=strength)
            else:  # what is left of the prox term is kept exactly
                rest = prox.strength - prox.convexify
                v = (strength * centre + rest * prox.centre - mean) / (strength + rest)
                v = domain.project(v)
            average, weight = average + (t + 1) * v, weight + t + 1
        released.append(average / weight)
    return problem.solution(
        released[-1],
        {"learning_rate": eta, "first_noise": noises[0]},
        iterates=np.array(released),
        sensitivity=shape.measured(problem.c * loss.lipschitz / max(1, n // 2)),
        noise=noises[0],
        mechanism=f"phased dual averaging, {shape.words} noise on every full gradient of a phase",
        participation=_SINGLE,
        **currency,
    )


def mirror_norm(solver: str, norm: Norm) -> Norm:
    """A norm whose square makes a strongly convex ψ."""
    instance_of(Norm, norm=norm)
    if not 1 <= norm.p <= 2:
        raise InvalidInput(f"{solver} needs a norm of order 1 <= p <= 2, got {norm.p!r}; take 2")
    return norm
