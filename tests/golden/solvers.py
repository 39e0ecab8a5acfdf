"""Golden solvers: what each answers under a test seed, and what it states.

The noise is the same everywhere; the arithmetic around it is NumPy's in double precision, whose
sums of products differ in their last bits. Choices of vertices are exact. Constants that are found
by a search are held to 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tests.golden.arithmetic import normal
from tests.golden.entries import Entry

from noshuffle.convex import losses, solvers
from noshuffle.convex.solvers.domains import Ball, Everywhere, L1Ball, LpBall, Simplex

ROWS, COLUMNS = 96, 3
TOLERANCE = 1e-6
FREE: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
BALL = {**FREE, "domain": Ball(1.0)}
L1 = {**FREE, "domain": L1Ball(1.0)}

#: solver, loss, settings.
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "ftrl": (solvers.ftrl, losses.logistic(), {**BALL, "batch_size": 8}),
    "ftrl, tree": (
        solvers.ftrl, losses.logistic(), {**BALL, "batch_size": 8, "mechanism": "tree"},
    ),
    "ftrl, l1": (solvers.ftrl, losses.hinge(), {**BALL, "batch_size": 8, "l1": 0.01}),
    "ftrl, last": (
        solvers.ftrl, losses.logistic(), {**BALL, "batch_size": 8, "output": "last"},
    ),
    "dp_gd": (solvers.dp_gd, losses.logistic(), {**BALL, "steps": 5}),
    "dp_gd, replace-one": (
        solvers.dp_gd, losses.logistic(), {**BALL, "steps": 5, "neighbours": "replace-one"},
    ),
    "dp_gd, average": (solvers.dp_gd, losses.hinge(), {**BALL, "steps": 5, "output": "average"}),
    "dp_gd, its own steps": (solvers.dp_gd, losses.logistic(), BALL),
    "dp_gd, p = 3": (
        solvers.dp_gd, losses.logistic(order=1.5, feature_bound=2.0),
        {**FREE, "domain": LpBall(1.0, 3.0), "steps": 5},
    ),
    "dp_sgd": (solvers.dp_sgd, losses.hinge(), {**BALL, "rate": 0.2, "steps": 5}),
    "dp_svrg": (solvers.dp_svrg, losses.logistic(), {**BALL, "epochs": 2, "steps": 3}),
    "accelerated_srgd": (solvers.accelerated_srgd, losses.logistic(), {**BALL, "steps": 4}),
    "output": (solvers.output_perturbation, losses.logistic(), {**FREE, "ridge": 0.1}),
    "output, pure": (
        solvers.output_perturbation, losses.logistic(),
        {"epsilon": 2.0, "delta": 0.0, "ridge": 0.1},
    ),
    "objective": (solvers.objective_perturbation, losses.logistic(), {**FREE, "ridge": 0.1}),
    "objective, pure": (
        solvers.objective_perturbation, losses.logistic(),
        {"epsilon": 2.0, "delta": 0.0, "ridge": 0.1},
    ),
    "phased_sgd": (solvers.phased_sgd, losses.logistic(), BALL),
    "phased_mirror_descent": (
        solvers.phased_mirror_descent, losses.hinge(), {**BALL, "steps": 4},
    ),
    "phased_mirror_descent, p = 1.5": (
        solvers.phased_mirror_descent, losses.hinge(order=3.0),
        {**FREE, "domain": Everywhere(), "p": 1.5, "steps": 4},
    ),
    "frank_wolfe_noisy": (solvers.frank_wolfe_noisy, losses.logistic(), {**BALL, "steps": 5}),
    "frank_wolfe_noisy, p = 1.5": (
        solvers.frank_wolfe_noisy, losses.logistic(order=3.0),
        {**FREE, "domain": LpBall(1.0, 1.5), "steps": 5},
    ),
    "frank_wolfe_poly": (
        solvers.frank_wolfe_poly, losses.logistic(order=math.inf), {**L1, "steps": 5},
    ),
    "frank_wolfe_full": (
        solvers.frank_wolfe_full, losses.logistic(order=math.inf), {**L1, "steps": 5},
    ),
    "frank_wolfe_full, listed": (
        solvers.frank_wolfe_full, losses.logistic(),
        {**FREE, "steps": 5, "vertices": np.vstack([np.eye(COLUMNS), -np.eye(COLUMNS)])},
    ),
    "frank_wolfe_tree": (
        solvers.frank_wolfe_tree, losses.logistic(order=math.inf),
        {**FREE, "domain": Simplex(1.0), "phases": 2},
    ),
    "stationary, ball": (
        solvers.frank_wolfe_stationary, losses.sigmoid(), {**BALL, "steps": 5, "rate": 0.3},
    ),
    "stationary, l1": (
        solvers.frank_wolfe_stationary, losses.sigmoid(order=math.inf),
        {**L1, "steps": 5, "rate": 0.3},
    ),
    "weakly_convex": (
        solvers.weakly_convex, losses.phase(radius=1.0),
        {**BALL, "rounds": 2, "start": np.full(COLUMNS, 0.3)},
    ),
    "weakly_convex, p = 1.5": (
        solvers.weakly_convex, losses.sigmoid(order=3.0), {**FREE, "rounds": 2, "p": 1.5},
    ),
}  # fmt: skip


def data() -> tuple[Any, Any]:
    """Rows of norm one at most, and labels of ±1."""
    x = losses.fit_into(normal("solver rows", ROWS, COLUMNS), bound=1.0)
    return x, np.where(x[:, 0] + 0.1 * normal("solver labels", ROWS) > 0, 1.0, -1.0)


def numbers(solution: Any) -> dict[str, Any]:
    """Weights, the last iterate, and the numbers of the statement."""
    said = solution.statement
    last = None if solution.iterates is None else np.asarray(solution.iterates)[-1].tolist()
    return {
        "weights": np.asarray(solution.weights).tolist(),
        "last": last,
        "details": {key: float(value) for key, value in sorted(solution.details.items())},
        "epsilon": said.epsilon,
        "delta": said.delta,
        "mu": said.mu,
        "rho": said.rho,
        "sensitivity": said.sensitivity,
        "noise multiplier": said.noise_multiplier,
        "neighbours": said.neighbours,
        "exact": said.exact,
    }


def solved(name: str) -> dict[str, Any]:
    solver, loss, settings = CASES[name]
    return numbers(solver(loss, *data(), test_seed="golden", **settings))


def least_squares() -> dict[str, Any]:
    x, _ = data()
    y = np.clip(x @ [0.5, 0.1, -0.2], -1, 1)
    return numbers(solvers.ftrl_ls(x, y, **FREE, radius=1.0, batch_size=8, test_seed="golden"))


def choices(noise: str) -> dict[str, Any]:
    """Report-noisy-max: who is chosen under ten seeds, and what it costs."""
    scores = np.linspace(0, 3, 7)
    asked: dict[str, Any] = {"epsilon": 1.0, "sensitivity": 1.0, "noise": noise}
    found = [solvers.noisy_max(scores, **asked, test_seed=seed) for seed in range(10)]
    return {"chosen": [int(one.index) for one in found], "epsilon": found[0].statement.epsilon}


SECTION = {name: Entry(partial(solved, name), rtol=TOLERANCE, atol=1e-9) for name in CASES}
SECTION["ftrl_ls"] = Entry(least_squares, rtol=TOLERANCE, atol=1e-9)
SECTION |= {
    f"noisy_max, {noise}": Entry(partial(choices, noise))
    for noise in ("permute-and-flip", "gumbel", "laplace")
}
