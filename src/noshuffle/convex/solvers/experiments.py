"""One number per experiment: excess risk, regret or gap of a solver at a given n, d or ε.

Synthetic problems, chosen so that the term under study is the one that is seen:

    travel     every row is the same vector g: no sampling error. On a ball a first-order method has
               to travel from 0 to the far side, which takes the time that its bound says
    hardest    the same with a signal of strength s, the excess at the worst s: a minimax bound
               speaks of the worst problem at each size. At a fixed s a round ball forgives noise
               (the excess is of its square), and a polytope ends by making no mistake at all
    regression rows uniform on the sphere, labels linear with small noise

Data depend on (experiment, seed) only, so every figure can be drawn again. Nothing here is private
(test seeds), and excess is measured against the exact optimum.

>>> 0 < ftrl_excess(512, seed=0) < 1
True
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from noshuffle.convex import losses
from noshuffle.convex.arrays import Array
from noshuffle.convex.moments import ball_least_squares
from noshuffle.convex.solvers.accelerated_srgd import accelerated_srgd
from noshuffle.convex.solvers.domains import Ball, L1Ball
from noshuffle.convex.solvers.dp_gd import dp_gd
from noshuffle.convex.solvers.dp_sgd import dp_sgd
from noshuffle.convex.solvers.dp_svrg import dp_svrg
from noshuffle.convex.solvers.frank_wolfe_noisy import frank_wolfe_noisy
from noshuffle.convex.solvers.frank_wolfe_poly import frank_wolfe_poly
from noshuffle.convex.solvers.frank_wolfe_stationary import frank_wolfe_stationary
from noshuffle.convex.solvers.frank_wolfe_tree import frank_wolfe_tree
from noshuffle.convex.solvers.ftrl import ftrl, regret
from noshuffle.convex.solvers.ftrl_ls import ftrl_ls
from noshuffle.convex.solvers.noisy_max import choose, noise_scale
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.convex.solvers.output_perturbation import best_ridge, output_perturbation
from noshuffle.convex.solvers.phased import phased_mirror_descent, phased_sgd
from noshuffle.convex.solvers.problem import Solver, source_of
from noshuffle.convex.solvers.stationarity import frank_wolfe_gap, moreau_gradient
from noshuffle.convex.solvers.weakly_convex import weakly_convex
from noshuffle.noise.laws import KeyedDraws

DELTA = 1e-6
#: Steps after which gradient methods stop, whatever their rule asks for.
_MOST_STEPS = 4096


def _sphere(n: int, d: int, *, seed: int) -> Array:
    x = np.random.default_rng((seed, n, d)).standard_normal((n, d))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def _same(n: int, d: int) -> tuple[Array, Array]:
    """n times one unit vector g with all entries equal, without storing it n times."""
    g = np.full(d, 1 / math.sqrt(d))
    return np.broadcast_to(g, (n, d)), g


def _travel(weights: Array, g: Array) -> float:
    """Excess of ⟨g, w⟩ over the unit ball."""
    return float(g @ weights + np.linalg.norm(g))


def ftrl_excess(n: int, *, seed: int, d: int = 10, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL on a linear stream: theory −1/2 in n, +1/4 in d, −1/2 in ε."""
    x, g = _same(n, d)
    batch = 8
    run = ftrl(
        losses.linear(),
        x,
        None,
        epsilon=epsilon,
        delta=DELTA,
        domain=Ball(1.0),
        batch_size=batch,
        test_seed=seed,
    )
    return regret(losses.linear(), run.iterates, x, None, comparator=-g, batch_size=batch)


def hinge_regret(n: int, *, seed: int, d: int = 10, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL with the hinge loss against the direction that made the labels."""
    u = np.eye(d)[0]
    x = 0.5 * _sphere(n, d, seed=seed)
    y = np.where(np.random.default_rng((seed, n)).random(n) < 0.5, -1.0, 1.0)
    x = x + 0.5 * y[:, None] * u
    batch = 8
    loss = losses.hinge()
    run = ftrl(
        loss, x, y, epsilon=epsilon, delta=DELTA, domain=Ball(1.0), batch_size=batch, test_seed=seed
    )
    return regret(loss, run.iterates, x, y, comparator=u, batch_size=batch)


def least_squares_regret(n: int, *, seed: int, d: int = 5, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL-LS on realisable regression: theory −1 in n."""
    x = _sphere(n, d, seed=seed)
    draws = np.random.default_rng((seed, n, d, 1))
    truth = draws.standard_normal(d)
    truth *= 0.8 / np.linalg.norm(truth)
    y = np.clip(x @ truth + 0.05 * draws.standard_normal(n), -1, 1)
    run = ftrl_ls(x, y, epsilon=epsilon, delta=DELTA, radius=1.0, batch_size=16, test_seed=seed)
    best = ball_least_squares(x.T @ x, y @ x, radius=1.0, ridge=0.0)
    loss = losses.squared(radius=1.0)
    return regret(loss, run.iterates, x, y, comparator=best, batch_size=16)


def _steps(n: int, d: int, epsilon: float) -> int:
    """Steps beyond which private gradient descent gains nothing."""
    mu = epsilon / 4.2  # near enough for a step count, and public
    return int(min(max(16, (mu * n) ** 2 / (4 * d)), n, _MOST_STEPS))


def travel_excess(n: int, *, solve: Solver, seed: int, d: int = 200, epsilon: float = 1.0) -> float:
    """A linear loss on the unit ball, the same row n times: theory −1 in n for all of these.

    For DP-SVRG differences vanish and snapshots remain; the phased solvers and accelerated SRGD
    follow −1 while privacy dominates.
    """
    x, g = _same(n, d)
    settings: dict[str, float] = {}
    if solve is dp_sgd:
        settings = {"rate": 0.25, "steps": _steps(n, d, epsilon)}
    if solve is dp_svrg:
        epochs = max(2, _steps(n, d, epsilon) // 8)
        settings = {"epochs": epochs, "steps": 8, "rate": 1 / 64}
    run = solve(
        losses.linear(), x, None, epsilon=epsilon, delta=DELTA, domain=Ball(1.0), test_seed=seed,
        **settings,
    )  # fmt: skip
    return _travel(run.weights, g)


gd_excess = partial(travel_excess, solve=dp_gd)
sgd_excess = partial(travel_excess, solve=dp_sgd)
svrg_excess = partial(travel_excess, solve=dp_svrg)
phased_sgd_excess = partial(travel_excess, solve=phased_sgd)
phased_mirror_excess = partial(travel_excess, solve=phased_mirror_descent)
srgd_excess = partial(travel_excess, solve=accelerated_srgd)


def _regression(n: int, d: int, *, seed: int) -> tuple[Array, Array]:
    x = _sphere(n, d, seed=seed)
    truth = np.full(d, 0.5 / math.sqrt(d))
    return x, np.clip(x @ truth, -1, 1)


def output_excess(n: int, *, seed: int, d: int = 5, epsilon: float = 1.0) -> float:
    """Output perturbation at the best ridge, Huber regression: worst case −1/2, benign −1."""
    loss = losses.huber()
    x, y = _regression(n, d, seed=seed)
    ridge = best_ridge(loss, rows=n, dimension=d, radius=1.0, epsilon=epsilon, delta=DELTA)
    run = output_perturbation(
        loss, x, y, epsilon=epsilon, delta=DELTA, ridge=ridge, domain=Ball(1.0), test_seed=seed
    )
    return loss.risk(run.weights, x, y)


def objective_excess(n: int, *, seed: int, d: int = 20, epsilon: float = 1.0) -> float:
    """Objective perturbation, Huber regression with a ridge of √d/(εn): theory −1, benign −2."""
    loss = losses.huber()
    x, y = _regression(n, d, seed=seed)
    ridge = 2 * math.sqrt(d * math.log(1 / DELTA)) / (epsilon * n)
    run = objective_perturbation(
        loss, x, y, epsilon=epsilon, delta=DELTA, ridge=ridge, domain=Ball(1.0), test_seed=seed
    )
    return loss.risk(run.weights, x, y)


def noisy_max_excess(epsilon: float, *, seed: int, candidates: int = 300) -> float:
    """Report-noisy-max at the hardest gap between one good candidate and the rest: −1 in ε.

    The gaps are the same numbers at every ε, so another scale of the noise gives another slope.
    """
    draws = KeyedDraws(source_of(seed), name="noisy max")
    scale = noise_scale(epsilon=epsilon, sensitivity=1.0)
    worst = 0.0
    for gap in np.geomspace(8.0, 280.0, 13):
        scores = np.zeros(candidates)
        scores[0] = gap
        picks = [choose(scores, scale=scale, noise="gumbel", draws=draws) for _ in range(100)]
        worst = max(worst, gap * float(np.mean(np.array(picks) != 0)))
    return worst


def frank_wolfe_excess(
    n: int, *, seed: int, aggregation: str = "tree", d: int = 64, epsilon: float = 1.0
) -> float:
    """Noisy Frank–Wolfe, l2 ball, hardest signal: theory −1 (tree, up to logs), −3/4 (naive)."""
    domain, loss, worst = Ball(1.0), losses.linear(), 0.0
    steps = math.isqrt(n)
    for strength in np.geomspace(1e-3, 1.0, 13):
        g = np.full(d, strength / math.sqrt(d))
        run = frank_wolfe_noisy(
            loss,
            np.broadcast_to(g, (n, d)),
            None,
            epsilon=epsilon,
            delta=DELTA,
            domain=domain,
            steps=steps,
            rate=8 / steps,
            aggregation=aggregation,
            test_seed=seed,
        )
        worst = max(worst, _travel(run.weights, g))
    return worst


def hardest_l1_excess(
    n: int, *, seed: int, d: int, solver: str = "poly", epsilon: float = 1.0, steps: int = 64
) -> float:
    """l1 Frank–Wolfe with one good coordinate, at the worst strength: grows with ln d."""
    solve: Any = {"poly": frank_wolfe_poly, "tree": frank_wolfe_tree}[solver]
    settings = {"steps": steps} if solver == "poly" else {}
    loss = losses.linear(order=math.inf)

    def run(strength: float) -> tuple[float, float]:
        g = np.zeros(d)
        g[0] = -strength
        solution = solve(
            loss,
            np.broadcast_to(g, (n, d)),
            None,
            epsilon=epsilon,
            delta=DELTA,
            domain=L1Ball(1.0),
            test_seed=seed,
            **settings,
        )
        return float(g @ solution.weights) + strength, solution.details["noise"]

    # Noise of scale b on 2d vertices hides a signal of about b·ln(2d): look around there.
    hidden = run(1.0)[1] * math.log(2 * d)
    return max(run(min(1.0, hidden * factor))[0] for factor in np.geomspace(0.4, 2.0, 8))


def stationary_gap(n: int, *, seed: int, d: int = 5, epsilon: float = 8.0) -> float:
    """Frank–Wolfe gap on the sigmoid loss, mean over iterates: theory −1/3 to −1/2 in n."""
    loss, domain = losses.sigmoid(), Ball(4.0)
    x = _sphere(n, d, seed=seed)
    y = np.where(x[:, 0] > 0, 1.0, -1.0)
    run = frank_wolfe_stationary(
        loss, x, y, epsilon=epsilon, delta=DELTA, domain=domain, test_seed=seed
    )
    assert run.iterates is not None
    some = run.iterates[:: max(1, len(run.iterates) // 64)]
    return float(np.mean([frank_wolfe_gap(loss, w, x, y, domain=domain) for w in some]))


def weakly_convex_gap(n: int, *, seed: int, d: int = 5, epsilon: float = 4.0) -> float:
    """Moreau-envelope gradient on phase retrieval, mean over rounds: theory −1/4 to −1/3 in n."""
    loss, domain = losses.phase(radius=1.0), Ball(1.0)
    x = _sphere(n, d, seed=seed)
    y = (x @ (0.9 * np.eye(d)[0])) ** 2
    start = 0.4 * np.eye(d)[0] + 0.4 * np.eye(d)[1]  # on no saddle's side
    run = weakly_convex(
        loss, x, y, epsilon=epsilon, delta=DELTA, domain=domain, start=start, test_seed=seed
    )
    assert run.iterates is not None
    some = run.iterates[1 :: max(1, len(run.iterates) // 8)]
    held = slice(0, min(n, 2048))
    measured = [moreau_gradient(loss, w, x[held], y[held], domain=domain, steps=200) for w in some]
    return float(np.mean(measured))
