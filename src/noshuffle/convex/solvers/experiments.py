"""One number per experiment: excess risk, regret or gap of a solver at a given n, d or ε.

Synthetic problems, chosen so that the term under study is the one that is seen:

    travel     every row is the same vector g: no sampling error. On a ball a first-order method has
               to travel from 0 to the far side, which takes the time that its bound says
    hardest    the same with a signal of strength s, the excess at the worst s: a minimax bound
               speaks of the worst problem at each size. At a fixed s a round ball forgives noise
               (the excess is of its square), and a polytope ends by making no mistake at all
    curved     rows uniform on the sphere, labels drawn from a logistic model with its optimum in
               the domain: curvature and sampling error, in the sample and in the population
    regression rows uniform on the sphere, labels linear with small noise

Data depend on (experiment, seed) only, so every figure can be drawn again. Nothing here is private
(test seeds), and excess is measured against the exact optimum.

>>> 0 < ftrl_excess(512, seed=0) < 1
True
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from noshuffle.convex import losses, solvers
from noshuffle.convex.arrays import Array
from noshuffle.convex.moments import ball_least_squares
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.domains import Ball, L1Ball
from noshuffle.convex.solvers.ftrl import regret
from noshuffle.convex.solvers.minimise import minimise
from noshuffle.convex.solvers.noisy_max import choose, noise_scale
from noshuffle.convex.solvers.problem import Solver, source_of
from noshuffle.convex.solvers.stationarity import frank_wolfe_gap, moreau_gradient
from noshuffle.noise.laws import KeyedDraws

DELTA = 1e-6
#: Steps after which gradient methods stop, whatever their rule asks for.
_MOST_STEPS = 4096


def _run(solve: Solver, loss: losses.Loss, x: Array, y: Array | None, **settings: Any) -> Solution:
    """A solver on the unit ball, unless told otherwise."""
    seed = settings.pop("seed")
    return solve(loss, x, y, **{"delta": DELTA, "domain": Ball(1.0), **settings}, test_seed=seed)


def _sphere(n: int, d: int, *, seed: int) -> Array:
    x = np.random.default_rng((seed, n, d)).standard_normal((n, d))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def _same(n: int, d: int, *, strength: float = 1.0) -> tuple[Array, Array]:
    """n times one vector g with all entries equal, without storing it n times."""
    g = np.full(d, strength / math.sqrt(d))
    return np.broadcast_to(g, (n, d)), g


def _travel(weights: Array, g: Array) -> float:
    """Excess of ⟨g, w⟩ over the unit ball."""
    return float(g @ weights + np.linalg.norm(g))


def ftrl_excess(n: int, *, seed: int, d: int = 10, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL on a linear stream: theory −1/2 in n, +1/4 in d, −1/2 in ε."""
    loss, (x, g) = losses.linear(), _same(n, d)
    run = _run(solvers.ftrl, loss, x, None, epsilon=epsilon, batch_size=8, seed=seed)
    return regret(loss, run.iterates, x, None, comparator=-g, batch_size=8)


def hinge_regret(n: int, *, seed: int, d: int = 10, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL with the hinge loss against the direction that made the labels."""
    u, loss = np.eye(d)[0], losses.hinge()
    y = np.where(np.random.default_rng((seed, n)).random(n) < 0.5, -1.0, 1.0)
    x = 0.5 * _sphere(n, d, seed=seed) + 0.5 * y[:, None] * u
    run = _run(solvers.ftrl, loss, x, y, epsilon=epsilon, batch_size=8, seed=seed)
    return regret(loss, run.iterates, x, y, comparator=u, batch_size=8)


def least_squares_regret(n: int, *, seed: int, d: int = 5, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL-LS on realisable regression: theory −1 in n."""
    x = _sphere(n, d, seed=seed)
    draws = np.random.default_rng((seed, n, d, 1))
    truth = draws.standard_normal(d)
    truth *= 0.8 / np.linalg.norm(truth)
    y = np.clip(x @ truth + 0.05 * draws.standard_normal(n), -1, 1)
    settings = {"delta": DELTA, "radius": 1.0, "batch_size": 16, "test_seed": seed}
    run = solvers.ftrl_ls(x, y, epsilon=epsilon, **settings)  # type: ignore[arg-type]
    best = ball_least_squares(x.T @ x, y @ x, radius=1.0, ridge=0.0)
    loss = losses.squared(radius=1.0)
    return regret(loss, run.iterates, x, y, comparator=best, batch_size=16)


def travel_excess(n: int, *, solve: Solver, seed: int, d: int = 200, epsilon: float = 1.0) -> float:
    """A linear loss on the unit ball, the same row n times: theory −1 in n for all of these.

    For DP-SVRG differences vanish and snapshots remain; the phased solvers and accelerated SRGD
    follow −1 while privacy dominates.
    """
    x, g = _same(n, d)
    mu = epsilon / 4.2  # near enough for a step count, and public
    # Steps beyond which private gradient descent gains nothing.
    steps = int(min(max(16, (mu * n) ** 2 / (4 * d)), n, _MOST_STEPS))
    settings: dict[Solver, dict[str, Any]] = {
        solvers.dp_sgd: {"rate": 0.25, "steps": steps},
        solvers.dp_svrg: {"epochs": max(2, steps // 8), "steps": 8, "rate": 1 / 64},
    }
    # The others keep the relation for which their sizes were set.
    asked = settings.get(solve, {"neighbours": "replace-one"})
    run = _run(solve, losses.linear(), x, None, epsilon=epsilon, seed=seed, **asked)
    return _travel(run.weights, g)


def _logistic(n: int, d: int, *, seed: int) -> tuple[Array, Array, Array]:
    """Rows on the sphere, labels by a coin of logistic chance, and the weights that made it."""
    x, draws = _sphere(n, d, seed=seed), np.random.default_rng((seed, n, d, 2))
    truth = np.full(d, 3 / math.sqrt(d))
    y = np.where(draws.random(n) < 1 / (1 + np.exp(-x @ truth)), 1.0, -1.0)
    return x, y, truth


def curved_excess(
    n: int = 2**14,
    *,
    solve: Solver,
    seed: int,
    d: int = 10,
    epsilon: float = 1.0,
    is_population: bool = False,
) -> float:
    """Logistic regression around an interior optimum: theory (nμ)⁻² on the sample, and d² there.

    Of the population, fresh rows whose own optimum is known stand for it: 1/n where noise is small.
    """
    x, y, _ = _logistic(n, d, seed=seed)
    loss, settings = losses.logistic(), {}
    if solve is solvers.output_perturbation:  # judged with the ridge, which is its problem
        loss = losses.logistic(ridge=0.05)
        settings = {"ridge": 1e-9}
    elif solve is solvers.objective_perturbation:
        settings = {"ridge": 1 / n}
    elif solve is solvers.phased_sgd:
        settings = {"batch_size": max(1, n // 256)}
    domain = Ball(4.0) if solve is solvers.frank_wolfe_noisy else Ball(20.0)
    run = _run(solve, loss, x, y, epsilon=epsilon, domain=domain, seed=seed, **settings)
    if is_population:
        x, y, least = _population(d)
    else:
        least = loss.risk(minimise(loss, x, y, ridge=1e-9).weights, x, y)
    return loss.risk(run.weights, x, y) - least


@lru_cache(maxsize=2)
def _population(d: int) -> tuple[Array, Array, float]:
    """Fresh rows in the place of the population, and the least risk on them."""
    x, y, _ = _logistic(2**17, d, seed=10**6)
    loss = losses.logistic()
    return x, y, loss.risk(minimise(loss, x, y, ridge=1e-9).weights, x, y)


def logistic_regret(n: int, *, seed: int, d: int = 10, epsilon: float = 1.0) -> float:
    """Regret of DP-FTRL on the same stream against the weights that made it: bound −1/2 in n."""
    x, y, truth = _logistic(n, d, seed=seed)
    loss, settings = losses.logistic(), {"batch_size": 8, "domain": Ball(3.0)}
    run = _run(solvers.ftrl, loss, x, y, epsilon=epsilon, seed=seed, **settings)
    return regret(loss, run.iterates, x, y, comparator=truth, batch_size=8)


def sparse_excess(n: int, *, seed: int, d: int = 100, epsilon: float = 1.0) -> float:
    """Full-batch Frank–Wolfe, l1 ball, regression with noisy labels: theory (ln d/(εn))^⅔."""
    draws = np.random.default_rng((seed, n, d, 3))
    x = draws.choice([-1.0, 1.0], (n, d))
    truth = np.zeros(d)
    truth[:4] = 0.4, -0.3, 0.2, 0.1  # on the boundary, inside of a face
    y = np.clip(x @ truth + 0.1 * draws.standard_normal(n), -1, 1)
    loss, domain = losses.squared(radius=1.0, order=math.inf), L1Ball(1.0)
    run = _run(solvers.frank_wolfe_full, loss, x, y, epsilon=epsilon, domain=domain, seed=seed)
    w = truth
    for _ in range(300):  # x xᵀ/n is near the identity: projected steps of ½ end quickly
        w = domain.project(w - 0.5 * loss.gradient(w, x, y))
    return loss.risk(run.weights, x, y) - loss.risk(w, x, y)


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


@lru_cache(maxsize=256)  # measured once, told against n and against n / ln n
def frank_wolfe_excess(
    n: int, *, seed: int, aggregation: str = "tree", d: int = 64, epsilon: float = 1.0
) -> float:
    """Noisy Frank–Wolfe, l2 ball, hardest signal: theory −1 (tree, up to logs), −3/4 (naive)."""
    steps = math.isqrt(n)
    settings = {"epsilon": epsilon, "rate": 8 / steps, "aggregation": aggregation, "seed": seed}

    def excess(x: Array, g: Array) -> float:
        solve = solvers.frank_wolfe_noisy
        return _travel(_run(solve, losses.linear(), x, None, steps=steps, **settings).weights, g)

    return max(excess(*_same(n, d, strength=s)) for s in np.geomspace(1e-3, 1.0, 13))


@lru_cache(maxsize=256)
def hardest_l1_excess(
    n: int, *, seed: int, d: int, solver: str = "poly", epsilon: float = 1.0, steps: int = 64
) -> float:
    """l1 Frank–Wolfe with one good coordinate, at the worst strength: grows with ln d."""
    solve = solvers.frank_wolfe_poly if solver == "poly" else solvers.frank_wolfe_tree
    settings: dict[str, Any] = {"steps": steps} if solver == "poly" else {}
    settings.update(epsilon=epsilon, domain=L1Ball(1.0), seed=seed)

    def run(strength: float) -> tuple[float, float]:
        g = np.zeros(d)
        g[0] = -strength
        x = np.broadcast_to(g, (n, d))
        solution = _run(solve, losses.linear(order=math.inf), x, None, **settings)
        return float(g @ solution.weights) + strength, solution.details["noise"]

    # Noise of scale b on 2d vertices hides a signal of about b·ln(2d): look around there.
    hidden = run(1.0)[1] * math.log(2 * d)
    return max(run(min(1.0, hidden * factor))[0] for factor in np.geomspace(0.4, 2.0, 8))


def single_row_excess(n: int, *, seed: int) -> float:
    """Polyhedral Frank–Wolfe with one row per step, as its −1/2 is stated."""
    return hardest_l1_excess(n, seed=seed, d=100, steps=n // 2, epsilon=8.0)


def stationary_gap(n: int, *, seed: int, d: int = 5, epsilon: float = 8.0) -> float:
    """Frank–Wolfe gap on the sigmoid loss, mean over iterates: theory −1/3 to −1/2 in n."""
    loss, domain, x = losses.sigmoid(), Ball(4.0), _sphere(n, d, seed=seed)
    y = np.where(x[:, 0] > 0, 1.0, -1.0)
    solve = solvers.frank_wolfe_stationary
    run = _run(solve, loss, x, y, epsilon=epsilon, domain=domain, seed=seed)
    assert run.iterates is not None
    some = run.iterates[:: max(1, len(run.iterates) // 64)]
    return float(np.mean([frank_wolfe_gap(loss, w, x, y, domain=domain) for w in some]))


def weakly_convex_gap(n: int, *, seed: int, d: int = 5, epsilon: float = 4.0) -> float:
    """Moreau-envelope gradient on phase retrieval, mean over rounds: theory −1/4 to −1/3 in n."""
    loss, domain, x = losses.phase(radius=1.0), Ball(1.0), _sphere(n, d, seed=seed)
    y = (x @ (0.9 * np.eye(d)[0])) ** 2
    start = 0.4 * np.eye(d)[0] + 0.4 * np.eye(d)[1]  # on no saddle's side
    run = _run(solvers.weakly_convex, loss, x, y, epsilon=epsilon, start=start, seed=seed)
    assert run.iterates is not None
    some = run.iterates[1 :: max(1, len(run.iterates) // 8)]
    held = slice(0, min(n, 2048))
    measured = [moreau_gradient(loss, w, x[held], y[held], domain=domain, steps=200) for w in some]
    return float(np.mean(measured))
