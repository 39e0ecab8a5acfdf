"""Which solver for a loss, so many rows and dimensions, an ε and a domain: `best`, by simulation.

Every solver that takes the loss and the domain is run on a synthetic table of that size (rows drawn
within the bound of the loss, labels from planted weights in the domain, noise of test seeds), and
the mean excess risk over its exact optimum is told, the smallest first. Solvers that end above the
point they start from are left out: at that size they are worth less than nothing. What a loss can
do on real rows may differ; nothing here reads data, so asking costs no privacy. No state.

>>> from noshuffle.convex.losses import logistic
>>> from noshuffle.convex.solvers.domains import Ball
>>> found = best(logistic(), 2000, 5, epsilon=1.0, domain=Ball(3.0))
>>> found[0].excess < 0.05 < found[-1].excess, found[-1].solver
(True, 'start')
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss, fit_into
from noshuffle.convex.solvers.accelerated_srgd import accelerated_srgd
from noshuffle.convex.solvers.base import Solution, budget
from noshuffle.convex.solvers.domains import Domain, Everywhere
from noshuffle.convex.solvers.dp_gd import dp_gd
from noshuffle.convex.solvers.frank_wolfe_full import frank_wolfe_full
from noshuffle.convex.solvers.frank_wolfe_noisy import frank_wolfe_noisy
from noshuffle.convex.solvers.frank_wolfe_poly import frank_wolfe_poly
from noshuffle.convex.solvers.frank_wolfe_tree import frank_wolfe_tree
from noshuffle.convex.solvers.ftrl import ftrl
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.convex.solvers.output_perturbation import best_ridge, output_perturbation
from noshuffle.convex.solvers.phased import phased_mirror_descent, phased_sgd
from noshuffle.errors import InvalidInput, Unsupported, whole

_STEPS = 1000


class Ranked(NamedTuple):
    """A solver, the settings it was run with, and its mean excess risk."""

    solver: str
    settings: dict[str, Any]
    excess: float


def best(
    loss: Loss,
    rows: int,
    dimension: int,
    *,
    epsilon: float,
    delta: float = 1e-6,
    domain: Domain | None = None,
    neighbours: str = "zero-out",
    seeds: int = 2,
) -> list[Ranked]:
    """Solvers by mean excess on a synthetic table of this size; "start", where all begin, is last.

    Refuses what no solver takes.
    """
    whole(at_least=16, rows=rows)
    whole(dimension=dimension, seeds=seeds)
    place = domain or Everywhere()
    x, y = _table(loss, rows, dimension, place)
    start = place.project(place.start(dimension))
    least = min(loss.risk(_minimum(loss, x, y, place), x, y), loss.risk(start, x, y))
    asked = {"epsilon": epsilon, "delta": delta, "domain": place, "neighbours": neighbours}
    limit = Ranked("start", {}, loss.risk(start, x, y) - least)
    found = []
    for solve, settings in _candidates(loss, rows, dimension, place, epsilon, delta):
        try:
            runs = [solve(loss, x, y, **asked, **settings, test_seed=k) for k in range(seeds)]
        except (Unsupported, InvalidInput):
            continue
        excess = float(np.mean([loss.risk(run.weights, x, y) for run in runs])) - least
        if excess <= limit.excess:
            found.append(Ranked(str(getattr(solve, "__name__", "solver")), settings, excess))
    if not found:
        raise Unsupported(
            f"no solver beats its start at {rows} rows, {dimension} dimensions and ε = {epsilon:g}"
        )
    return [*sorted(found, key=lambda one: one.excess), limit]


def _candidates(
    loss: Loss, n: int, d: int, domain: Domain, epsilon: float, delta: float
) -> list[tuple[Callable[..., Solution], dict[str, Any]]]:
    """Solvers and settings from public numbers."""
    radius = domain.euclidean(d) if math.isfinite(domain.euclidean(d)) else 10 / loss.feature_bound
    sizes = {"rows": n, "dimension": d, "radius": radius}
    far = best_ridge(loss, **sizes, epsilon=epsilon, delta=delta)  # type: ignore[arg-type]
    bend = loss.smoothness if loss.is_smooth else 1.0
    share = 0.1 if n * budget(epsilon=epsilon, delta=delta) < 100 * math.sqrt(d) else 0.4
    ridge = max(bend / (n * math.expm1(share * epsilon)), 1e-9)
    batch = max(1, n // 256)
    return [
        (dp_gd, {}),
        (objective_perturbation, {"ridge": ridge}),
        (output_perturbation, {"ridge": far}),
        (phased_sgd, {"batch_size": batch}),
        (phased_mirror_descent, {"norm": domain.norm} if domain.norm.p < 2 else {}),
        (ftrl, {"batch_size": batch}),
        (accelerated_srgd, {}),
        (frank_wolfe_full, {}),
        (frank_wolfe_poly, {}),
        (frank_wolfe_tree, {}),
        (frank_wolfe_noisy, {}),
    ]


def _table(loss: Loss, n: int, d: int, domain: Domain) -> tuple[Array, Array]:
    draws = np.random.default_rng((n, d))
    x = draws.choice([-1.0, 1.0], (n, d)) if loss.order == math.inf else draws.normal(size=(n, d))
    x = fit_into(1e3 * x, bound=loss.feature_bound, order=loss.order, parts=loss.parts)
    planted = draws.normal(size=d) if loss.order != math.inf else 0.5 ** np.arange(d, dtype=float)
    if math.isfinite(domain.size):
        planted = 0.65 * domain.project(1e3 * planted)
    else:
        planted *= 10 / (np.linalg.norm(planted) * loss.feature_bound)
    scores = x @ planted
    if loss.is_classifier:
        chance = 1 / (1 + np.exp(-np.clip(2 * scores / max(scores.std(), 1e-12), -30, 30)))
        return x, np.where(draws.random(n) < chance, 1.0, -1.0)
    noisy = scores + 0.1 * scores.std() * draws.normal(size=n)
    return x, np.clip(noisy, max(-loss.label_bound, loss.least_label), loss.label_bound)


def _minimum(loss: Loss, x: Array, y: Array, domain: Domain) -> Array:
    """The exact optimum over the domain, by accelerated projected gradients."""
    bend = loss.curvature_bound if loss.is_smooth else 1.0
    rate = 1 / (bend * float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]) + loss.ridge + 1e-9)
    w = ahead = domain.project(domain.start(x.shape[1]))
    for t in range(_STEPS):
        new = domain.project(ahead - rate * loss.gradient(ahead, x, y))
        moved = float(np.abs(new - w).max())
        ahead, w = new + t / (t + 3) * (new - w), new
        if moved < 1e-10:
            break
    return w
