"""DP-FTRL on a loss object: one pass, any order, every iterate private, regret against anyone.

    w_{t+1} = argmin_{w∈K} ⟨s_t, w⟩ + t·B·r(w) + (λ/2)‖w‖²,    s_t = Σ_{i≤t} (g_i + noise_i)

g_t is the sum of B gradients at w_t (B = batch_size), noise_t is row t of C⁻¹Z times the Lipschitz
bound L (Kairouz et al. 2021, arXiv 2103.00039; correlated noise: Denisov et al. 2022). r is l1, an
elastic net or a group penalty per example, and the argmin is `optim.leader` with η = 1/λ. The whole
run is one Gaussian mechanism. With E the error of the strategy on prefix sums, per example

    regret(v) ≤ a/λ + λ‖v‖²/(2n),    a = B L² + L² z E √d,    best λ = √(2na)/R: R√(2a/n),

slope −1/2 in n, +1/4 in d, −1/2 in ε (docs/proofs-convex.md). State: s, the sum of iterates, the
noise stream; on request all iterates.

>>> from noshuffle.convex.losses import hinge
>>> from noshuffle.convex.solvers.domains import Ball
>>> x = np.tile([[0.6, 0.8], [-0.6, -0.8]], (50, 1)); y = np.tile([1.0, -1.0], 50)
>>> run = ftrl(hinge(), x, y, epsilon=1.0, delta=1e-6, domain=Ball(1.0), test_seed="doc")
>>> round(run.statement.epsilon, 6), run.iterates.shape
(1.0, (100, 2))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.shape import groups_of
from noshuffle.convex.solvers.base import OUTPUTS, Solution
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, Unsupported, non_negative, one_of, positive, whole
from noshuffle.optim.composite import group_lasso, lasso
from noshuffle.optim.leader import Leader
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error


@solver()
def ftrl(
    problem: Problem,
    *,
    regularization: float | None = None,
    batch_size: int = 1,
    mechanism: Any = "blt",
    l1: float = 0.0,
    l2: float = 0.0,
    group: float = 0.0,
    groups: Array | None = None,
    output: str = "average",
    keep_iterates: bool = True,
) -> Solution:
    """One pass of DP-FTRL; `weights` is the average iterate or the last (the sparse one under l1).

    `iterates` holds every iterate that was played, unless `keep_iterates=False`: memory is then
    independent of n.

    Guarantees: `statement` covers all iterates, for rows that meet the bounds of the loss, in any
    order, chosen by anyone. `regularization` λ defaults to the best one of the bound above, from
    public numbers only. A last incomplete batch is read too; it is not divided by its size.
    """
    one_of(OUTPUTS, output=output)
    non_negative(l1=l1, l2=l2, group=group)
    if group and l1:
        raise Unsupported("l1 and group penalties together have no closed form here; use one")
    problem.require("DP-FTRL")
    loss, domain, n, d = problem.loss, problem.domain, problem.n, problem.d
    leader = Leader(
        d,
        l2=l2 + loss.ridge,
        composite=group_lasso(group) if group else lasso(l1) if l1 else None,
        constraint=domain,
        groups=groups_of(groups, features=d),
    )
    whole(batch_size=batch_size, at_most=n)
    steps = -(-n // batch_size)
    plan = problem.plan(SinglePass(steps), mechanism)
    noise = plan.noise_multiplier * loss.lipschitz
    if regularization is None:
        regularization = best_regularization(problem, plan, batch_size=batch_size)
    positive(regularization=regularization)
    release = problem.releases(plan, scale=noise)
    iterates = np.empty((steps, d)) if keep_iterates else None
    average, w = np.zeros(d), domain.project(np.zeros(d))
    for t in range(steps):
        average += w / steps
        if iterates is not None:
            iterates[t] = w
        batch = slice(t * batch_size, min((t + 1) * batch_size, n))
        released = release(problem.gradient(w, batch))
        # The sum of a batch of B rows is B gradients: η = B/λ on their mean.
        size = batch.stop - batch.start
        w = leader.follow(released / size, rate=size / regularization)
    return problem.solution(
        average if output == "average" else w,
        {"noise": noise, "steps": steps, "regularization": regularization},
        iterates=iterates,
        plan=plan,
    )


def best_regularization(problem: Problem, plan: Plan, *, batch_size: int) -> float:
    """λ = √(2na)/R of the regret bound in the module's docstring; public numbers only."""
    spread = error(plan.strategy, plan.steps).max
    private = plan.noise_multiplier * spread * math.sqrt(problem.d)
    a = problem.loss.lipschitz**2 * (batch_size + private)
    return math.sqrt(2 * problem.n * a) / problem.radius


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
