"""DP-FTRL-LS: least squares by private sums of x xᵀ and y x; regret falls like 1/(εn).

    V_t = Σ x_i x_iᵀ,  u_t = Σ y_i x_i      released by one continual-sum mechanism, noise N_t, n_t
    w_{t+1} = argmin_{‖w‖≤R} wᵀ(V_t + N_t)w − 2⟨u_t + n_t, w⟩ + λ‖w‖²

Kairouz et al. 2021, section 4.2 (arXiv 2103.00039). Both streams are one vector per example,
m(x, y) = (svec(x xᵀ), τ y x) of `moments`, where the problem is solved too.

Sensitivity, ‖x‖ ≤ L and |y| ≤ Y. Zero-out: ‖m‖² = ‖x‖⁴ + τ²y²‖x‖² ≤ L⁴ + τ²L²Y². Replace-one:
‖xxᵀ − x'x'ᵀ‖_F² = ‖x‖⁴ + ‖x'‖⁴ − 2⟨x, x'⟩² ≤ 2L⁴ and ‖yx − y'x'‖ ≤ 2LY, hence
√(2L⁴ + 4τ²L²Y²) (a little under twice the zero-out bound; the two maxima exclude each other, so
it is not attained). τ = L/Y makes both parts count the same.

λ is the expected norm of the noise matrix (`moments.noise_norm`), which keeps the problem convex.

Regret O(L²R²(√(log n/n) + √(d log⁵n log(1/δ))/(εn))); on realisable data the first term is 1/n too,
so in the privacy regime the slope in n is −1. State: the noisy sums, d(d+1)/2 + d numbers.

>>> x = np.tile([[0.6, 0.8], [0.8, -0.6]], (512, 1)); y = x @ [0.5, 0.1]
>>> run = ftrl_ls(x, y, epsilon=8.0, delta=1e-6, radius=1.0, batch_size=32, test_seed=1)
>>> bool(np.linalg.norm(run.iterates[-1] - [0.5, 0.1]) < 0.2), round(run.statement.epsilon, 6)
(True, 8.0)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.losses import squared
from noshuffle.convex.moments import ball_least_squares, moments, noise_norm, unpack
from noshuffle.convex.solvers.base import Solution, contribution
from noshuffle.convex.solvers.problem import Problem, charged
from noshuffle.errors import positive, whole
from noshuffle.participation import SinglePass
from noshuffle.release.account import Account
from noshuffle.strategies import Strategy, error, sensitivity
from noshuffle.strategies.fit import fit


def moment_bound(
    *, feature_bound: float, label_bound: float, ratio: float, neighbours: str
) -> float:
    """How far one example moves the vector (svec(x xᵀ), τ y x); derived in the docstring."""
    square, cross = feature_bound**4, (ratio * feature_bound * label_bound) ** 2
    if contribution(neighbours) == 2:
        return math.sqrt(2 * square + 4 * cross)
    return math.sqrt(square + cross)


def ftrl_ls(
    rows: Any,
    labels: Any,
    *,
    epsilon: float,
    delta: float,
    radius: float,
    feature_bound: float = 1.0,
    label_bound: float = 1.0,
    batch_size: int = 1,
    mechanism: str | Strategy = "blt",
    neighbours: str = "zero-out",
    regularization: float | None = None,
    test_seed: int | str | None = None,
    budget: Account | None = None,
) -> Solution:
    """One pass of DP-FTRL-LS; `weights` is the last iterate, `iterates` holds every one.

    Guarantees: `statement` covers all iterates. One example joins one batch, and its vector moves
    by at most `moment_bound`; noise is that bound times the sensitivity of the strategy over μ.
    """
    positive(radius=radius)
    loss = squared(radius=radius, feature_bound=feature_bound, label_bound=label_bound)
    problem = Problem.of(
        loss, rows, labels, epsilon=epsilon, delta=delta, neighbours=neighbours, test_seed=test_seed
    )
    n, d, x, y = problem.n, problem.d, problem.x, problem.y
    whole(batch_size=batch_size, at_most=n)
    charge = problem.reserve(budget, "ftrl_ls")
    steps = -(-n // batch_size)
    participation = SinglePass(steps)
    strategy = (
        mechanism if isinstance(mechanism, Strategy) else fit(mechanism, participation).strategy
    )
    ratio = feature_bound / label_bound
    bound = moment_bound(
        feature_bound=feature_bound, label_bound=label_bound, ratio=ratio, neighbours=neighbours
    )
    reach = sensitivity(strategy, participation).value * bound
    noise = reach / problem.mu
    size = d * (d + 1) // 2 + d
    release = problem.sums(strategy, steps=steps, scale=noise, size=size)
    spread = error(strategy, steps).per_step  # of the prefix sums, for unit noise
    total, w = np.zeros(size), np.zeros(d)
    iterates = np.empty((steps, d))
    for t in range(steps):
        iterates[t] = w
        batch = slice(t * batch_size, (t + 1) * batch_size)
        total += release(moments(x[batch], y[batch], ratio=ratio))
        gram, cross = unpack(total, d, ratio=ratio)
        ridge = regularization
        if ridge is None:
            ridge = noise_norm(noise * float(spread[t]), d)
        w = ball_least_squares(gram, cross, radius=radius, ridge=ridge)
    found = problem.solution(
        w,
        {"noise": noise, "steps": steps, "moment_bound": bound},
        iterates=iterates,
        mu=problem.mu,
        sensitivity=reach,
        mechanism=f"sums of x xᵀ and y x with {strategy.words()}",
        participation=participation.words(),
        notes=("All iterates are functions of the noisy sums.",),
    )
    return charged(charge, found)
