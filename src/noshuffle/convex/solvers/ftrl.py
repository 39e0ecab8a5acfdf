"""DP-FTRL on a loss object: one pass, any order, every iterate private, regret against anyone.

    w_{t+1} = argmin_{w∈K} ⟨s_t, w⟩ + t·B·r(w) + (λ/2)‖w‖²,    s_t = Σ_{i≤t} (g_i + noise_i)

g_t is the sum of B gradients at w_t (B = batch_size), noise_t is row t of C⁻¹Z times the Lipschitz
bound L (Kairouz et al. 2021, arXiv 2103.00039; correlated noise: Denisov et al. 2022). r is l1, an
elastic net or a group penalty per example. The whole run is one Gaussian mechanism.

Regret. Let u_t be the iterates without noise, b_t the noise in s_t. Be-the-leader and stability
give Σ f_t(u_t) − f_t(v) ≤ Σ (BL)²/λ + (λ/2)‖v‖². The argmin is 1/λ-Lipschitz in the linear term,
so ‖w_{t+1} − u_{t+1}‖ ≤ ‖b_t‖/λ with the gradients held fixed; linearisation at w_t makes the
bound hold for them as played, and costs ⟨g_t, w_t − u_t⟩ ≤ BL‖b_t‖/λ. With z the noise
multiplier, E_t the error of the strategy on prefix sums and d the dimension, E‖b_t‖ ≤ L z E_t √d,
and per example

    regret(v) ≤ a/λ + λ‖v‖²/(2n),    a = B L² + L² z E √d,    best λ = √(2na)/R: R√(2a/n).

That is O(1/√n + d^{1/4}/√(εn)): slope −1/2 in n, +1/4 in d, −1/2 in ε. The same bound holds for the
excess risk of the average iterate on fresh data, up to R L √(log(1/β)/n) (online to batch).

State: s, its sum of iterates, the noise stream. Kept on request: all iterates.

>>> from noshuffle.convex.losses import hinge
>>> x = np.tile([[0.6, 0.8], [-0.6, -0.8]], (50, 1)); y = np.tile([1.0, -1.0], 50)
>>> run = ftrl(hinge(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(1.0), test_seed="doc")
>>> round(run.statement.epsilon, 6), run.iterates.shape
(1.0, (100, 2))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.losses import Array, Loss, require
from noshuffle.convex.solvers.base import Solution, contribution, generator, on_top_of_plan
from noshuffle.convex.solvers.domains import Ball, Box, Domain, L1Ball, Simplex
from noshuffle.convex.solvers.stream import NoiseStream
from noshuffle.errors import InvalidInput, Unsupported, non_negative, one_of, positive, whole
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error

__all__ = ["Ball", "best_regularization", "ftrl", "regret"]


def ftrl(
    loss: Loss,
    rows: Any,
    labels: Any,
    *,
    epsilon: float,
    delta: float,
    domain: Domain,
    regularization: float | None = None,
    batch_size: int = 1,
    mechanism: Any = "blt",
    neighbours: str = "zero-out",
    l1: float = 0.0,
    l2: float = 0.0,
    group: float = 0.0,
    groups: Array | None = None,
    output: str = "average",
    keep_iterates: bool = True,
    test_seed: int | str | None = None,
) -> Solution:
    """One pass of DP-FTRL; `weights` is the average iterate or the last (the sparse one under l1).

    `iterates` holds every iterate that was played, unless `keep_iterates=False`: memory is then
    independent of n.

    Guarantees: `statement` covers all iterates, for rows that meet the bounds of the loss, in any
    order, chosen by anyone. `regularization` λ defaults to the best one of the bound above, from
    public numbers only. A last incomplete batch is read too; it is not divided by its size.
    """
    one_of(("average", "last"), output=output)
    non_negative(l1=l1, l2=l2, group=group)
    check_penalty(domain, l1=l1, group=group, groups=groups)
    contribution(neighbours)  # refuses neighbours that would shift the batches
    x, y = loss.check(rows, labels)
    n, d = x.shape
    radius = domain.euclidean(d)
    require(loss, "DP-FTRL", radius=radius, order=2.0)
    radius = radius if math.isfinite(radius) else 1.0  # the step size needs some length
    whole(batch_size=batch_size, at_most=n)
    steps = -(-n // batch_size)
    plan = Plan.fit(
        SinglePass(steps),
        mechanism=mechanism,
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,
    )
    noise = plan.noise_multiplier * loss.lipschitz
    if regularization is None:
        regularization = best_regularization(
            plan, loss=loss, examples=n, dimension=d, radius=radius, batch_size=batch_size
        )
    positive(regularization=regularization)
    stream = NoiseStream(
        plan.strategy, steps=steps, size=d, scale=noise, draws=generator(test_seed)
    )
    total, seen = np.zeros(d), 0
    iterates = np.empty((steps, d)) if keep_iterates else None
    average = np.zeros(d)
    w = domain.project(np.zeros(d))
    curvature = l2 + loss.ridge
    for t in range(steps):
        average += w / steps
        if iterates is not None:
            iterates[t] = w
        batch = slice(t * batch_size, (t + 1) * batch_size)
        total += loss.data_gradient(w, x[batch], y[batch]) + stream.next()
        seen = min(seen + batch_size, n)
        # Divide the objective by λ + (curvature of r): prox of r at the scaled linear term.
        weight = regularization + seen * curvature
        w = penalised(
            -total / weight,
            domain=domain,
            l1=seen * l1 / weight,
            group=seen * group / weight,
            groups=groups,
        )
    statement = plan.statement(notes=on_top_of_plan(rows=n, test_seed=test_seed))
    return Solution(
        weights=average if output == "average" else w,
        statement=statement,
        iterates=iterates,
        details={"noise": noise, "steps": steps, "regularization": regularization},
    )


def best_regularization(
    plan: Plan, *, loss: Loss, examples: int, dimension: int, radius: float, batch_size: int
) -> float:
    """λ = √(2na)/R of the regret bound in the module's docstring; public numbers only."""
    spread = error(plan.strategy, plan.steps).max
    private = plan.noise_multiplier * spread * math.sqrt(dimension)
    a = loss.lipschitz**2 * (batch_size + private)
    return math.sqrt(2 * examples * a) / radius


def check_penalty(domain: Domain, *, l1: float, group: float, groups: Array | None) -> None:
    """Refuse pairs of penalty and set for which "prox, then project" is not the exact argmin.

    Ball around 0: a multiplier ν adds (ν/2)‖w‖², and l1 and group norms are homogeneous, so ν only
    rescales. Box and l1: the problem separates, and a convex function of one variable has its
    minimum over an interval at the clamped minimiser. L1Ball and l1: thresholds add up. Simplex:
    ‖w‖₁ is constant. Groups go with the ball (or no set) only.
    """
    if group and l1:
        raise Unsupported("l1 and group penalties together have no closed form here; use one")
    if group and groups is None:
        raise InvalidInput("a group penalty needs groups: one group number per coordinate")
    if group and isinstance(domain, Box | L1Ball | Simplex):
        raise Unsupported(
            f"a group penalty inside {type(domain).__name__} has no closed form; use Ball"
        )


def penalised(u: Array, *, domain: Domain, l1: float, group: float, groups: Array | None) -> Array:
    """argmin_{w∈K} l1·‖w‖₁ + group·Σ‖w_g‖ + ½‖w − u‖², exactly; zeros are exact zeros."""
    if l1 and not isinstance(domain, Simplex):
        u = np.sign(u) * np.maximum(np.abs(u) - l1, 0.0)
    if group and groups is not None:
        _, index = np.unique(groups, return_inverse=True)
        norms = np.sqrt(np.bincount(index, weights=u * u))
        kept = np.maximum(norms - group, 0.0) / np.maximum(norms, 1e-300)
        u = u * kept[index]
    return domain.project(u)


def regret(
    loss: Loss,
    iterates: Array | None,
    rows: Any,
    labels: Any,
    *,
    comparator: Array,
    batch_size: int = 1,
) -> float:
    """Mean of f_t(w_t) − f_t(comparator): each row judged before it is learned from. Not private.

    This reads the raw losses; it is for experiments and tests, not for release.
    """
    if iterates is None:
        raise InvalidInput("regret needs the iterates of a run, got none")
    x, y = loss.check(rows, labels)
    played = np.repeat(iterates, batch_size, axis=0)[: len(x)]
    if len(played) != len(x):
        raise InvalidInput(f"{len(x)} rows need as many iterates, got {len(played)}")
    scores = np.einsum("ij,ij->i", x, played)
    penalty = 0.5 * loss.ridge * np.einsum("ij,ij->i", played, played)
    suffered = loss.value_fn(scores, y) + penalty
    return float(np.mean(suffered - loss.values(comparator, x, y)))
