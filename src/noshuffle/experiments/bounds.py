"""`bounds`: what theory promises beside what our solvers reach, over n, d and ε.

    stream     regret on a linear stream whose rows are all alike: the hardest kind for noise
               (`convex.solvers.experiments.travel`), DP-FTRL with a BLT and with a tree, DP-SGD
               without amplification row by row and in batches of z√d
    risk       excess risk of DP-FTRL's average iterate, rows x = g/2 + u/2 with u on the sphere;
               the risk of a model is known exactly
    squares    regret of DP-FTRL-LS on linear data with small noise
    l_p        noisy Frank–Wolfe with and without a tree (p = 2), l1 Frank–Wolfe (p = 1)

Bounds with constants are drawn as they stand. A theorem inside O(·) has no number: its line is
drawn through the first measured point, and shows the slope alone. Slopes in n, d and ε are those of
the private term: they are fitted where it is over four fifths of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from noshuffle import theory
from noshuffle.convex import losses, solvers
from noshuffle.convex.solvers import experiments
from noshuffle.convex.solvers.domains import Ball
from noshuffle.experiments.bounds_view import AXES, CLAIMS, L_P, STREAM, draw, table
from noshuffle.experiments.figure import Cell, Figure, Request, Results, deviation
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error
from noshuffle.theory import Sizes, l_p

#: Rows of one step of DP-FTRL.
BATCH = 8
#: Runs of DP-SGD row by row, a step of Python each, end here, and have fewer seeds.
LONGEST, FEW = 16384, 2


def _solve(name: str, sizes: Sizes, x: Any, seed: int) -> tuple[Any, int, theory.Bound]:
    """A run on the unit ball with a linear loss, its batch size, and its bound in expectation."""
    given: dict[str, Any] = {"mechanism": "blt"}
    batch = BATCH
    if name.startswith("DP-SGD"):
        batch = 1 if name.endswith("row by row") else theory.best_batch(sizes)
        bound = theory.sgd_regret(sizes, batch_size=batch)
        # λ = G√T/R: then R√T·G is n times the bound.
        given = {"mechanism": "identity", "regularization": bound.order * sizes.n}
    else:
        given["mechanism"] = "tree" if name.endswith("tree") else "blt"
        spread = _spread(sizes, -(-sizes.n // batch), given["mechanism"])
        bound = theory.ftrl_regret(sizes, spread=spread, batch_size=batch, expected=True)
    run = solvers.ftrl(
        losses.linear(), x, None, epsilon=sizes.epsilon, delta=sizes.delta, domain=Ball(1.0),
        batch_size=batch, test_seed=seed, **given,
    )  # fmt: skip
    return run, batch, bound


def _stream(name: str, sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Mean regret against the best fixed model, every row the same."""
    g = np.full(sizes.d, 1 / math.sqrt(sizes.d))
    x = np.broadcast_to(g, (sizes.n, sizes.d))
    found = []
    for seed in seeds:
        run, batch, bound = _solve(name, sizes, x, seed)
        played = np.repeat(run.iterates @ g, batch)[: sizes.n]
        found.append(theory.regret(played.tolist(), [-1.0] * sizes.n))
    return _record(found, bound)


def _risk(sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    """Excess risk of the average iterate on fresh rows: exact, as the mean row is known."""
    found = []
    for seed in seeds:
        u = np.random.default_rng((seed, sizes.n)).standard_normal((sizes.n, sizes.d))
        x = 0.5 * u / np.linalg.norm(u, axis=1, keepdims=True)
        x[:, 0] += 0.5
        run, _, _ = _solve("DP-FTRL, BLT", sizes, x, seed)
        found.append(0.5 * float(run.weights[0]) + 0.5)
    spread = _spread(sizes, sizes.n // BATCH, "blt")
    return _record(found, theory.ftrl_risk(sizes, spread=spread, batch_size=BATCH))


def _spread(sizes: Sizes, steps: int, mechanism: str) -> float:
    """Largest deviation of the noise in a running sum of one pass, in clip norms."""
    asked: dict[str, Any] = {"epsilon": sizes.epsilon, "delta": sizes.delta}
    plan = Plan.fit(SinglePass(steps), mechanism=mechanism, **asked)
    return plan.noise_multiplier * error(plan.strategy, plan.steps).max


def _record(found: Sequence[float], bound: theory.Bound | None) -> dict[str, Any]:
    spread = deviation(found) if len(found) > 1 else None
    record = {"mean": float(np.mean(found)), "deviation": spread, "all": list(found), "bound": None}
    if bound is not None:
        record |= {"bound": bound.value, "private": bound.terms["privacy"] / bound.order}
    return record


def _squares(sizes: Sizes, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    fn = experiments.least_squares_regret
    return _record([fn(sizes.n, d=sizes.d, epsilon=sizes.epsilon, seed=s) for s in seeds], None)


def _l_p(name: str, n: int, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    if name == "l1 Frank–Wolfe":
        fn: Callable[..., float] = partial(
            experiments.hardest_l1_excess, d=100, solver="tree", epsilon=2.0
        )
    else:
        fn = partial(experiments.frank_wolfe_excess, aggregation=name.rpartition(" ")[2])
    return _record([fn(n, seed=seed) for seed in seeds], None)


def _sizes(settings: Mapping[str, Any], **other: Any) -> Sizes:
    return Sizes(**{name: settings[name] for name in ("n", "d", "epsilon", "delta")} | other)


def _cells(asked: Request) -> Sequence[Cell]:
    settings = asked.settings
    seeds = settings["seeds"][: asked.trials]
    cells = []
    for axis, values in AXES.items():
        for value in settings[values]:
            sizes = _sizes(settings, **{axis: value})
            for name in STREAM:
                is_slow = name == "DP-SGD, row by row"
                if is_slow and sizes.n > LONGEST:
                    continue
                work = partial(_stream, name, sizes, seeds[:FEW] if is_slow else seeds)
                cells.append(Cell(f"{axis}/{name}/{value:g}", work, sizes.n, name))
    for n in settings["lengths"]:
        sizes = _sizes(settings, n=n)
        cells.append(Cell(f"risk/{n}", partial(_risk, sizes, seeds), n, "risk"))
        cells.append(Cell(f"squares/{n}", partial(_squares, sizes, seeds), n, "squares"))
    for n in settings["l_p_lengths"]:
        for name in L_P:
            cells.append(Cell(f"l_p/{name}/{n}", partial(_l_p, name, n, seeds[:FEW]), n, name))
    sizes = _sizes(settings)
    cells.append(Cell("statements", lambda results: _statements(sizes)))
    return cells


def _statements(sizes: Sizes) -> list[dict[str, Any]]:
    """Every bound at the sizes of the settings, with its conditions."""
    found = [
        *theory.table_1(sizes),
        theory.theorem_4_1(sizes),
        theory.ftrl_regret(sizes),
        theory.corollary_4_2(sizes),
        theory.ftrl_risk(sizes),
        theory.theorem_4_3(sizes),
        theory.sgd_regret(sizes),
        theory.sgd_regret(sizes, batch_size=theory.best_batch(sizes)),
    ]
    for p in (1.0, 1.5, 2.0, math.inf):
        found += [replace(b, name=f"l_p, p = {p:g}: {b.name}") for b in l_p.convex(sizes, p=p)]
    for p in (1.0, 2.0):
        found.append(replace(l_p.nonconvex(sizes, p=p), name=f"nonconvex, p = {p:g}"))
    found.append(l_p.weakly_convex(sizes))
    return [
        {
            "name": bound.name,
            "quantity": bound.quantity,
            "value": bound.value,
            "order": bound.order,
            "conditions": "; ".join(bound.conditions),
            "source": bound.source,
        }
        for bound in found
    ]


FIGURE = Figure(
    name="bounds",
    title="theorems beside measured regret and risk",
    cells=_cells,
    table=table,
    draw=draw,
    claims=CLAIMS,
)
