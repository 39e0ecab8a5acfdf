"""Frank–Wolfe on the l1 ball with a binary tree of gradients (Asi, Feldman, Koren, Talwar 2021).

    phase t = 1 … T: walk a complete binary tree of depth t depth first.
        root          mean gradient at the current x on a batch of b rows
        left child    copies its parent (value and the point x at which it was taken)
        right child   value of parent + mean[∇f(x; S) − ∇f(x_parent; S)], fresh S of b/2^depth rows
        leaf          x ← (1−η_k)x + η_k·(noisy argmin over vertices of ⟨v, value⟩), η_k = 2/(k+1)

(arXiv 2103.01516, l1 setting; k counts leaves since the start.) The recursion is nested instead of
serial: an estimate is a sum of at most t differences, and a row is seen by few leaves. In an l1
ball of radius D a root row moves every score by cL₀D/b in 2^t leaves, a row of a right child at
depth j by 4L₁D²η·2^t/b at most in 2^{t−j}; with Gumbel noise of scale s and fresh rows per phase

    s = √(max over nodes of leaves·move²/(2ρ))                            (docs/proofs-convex.md).

Rate √(ln d/n)·ln n + (ln d·ln²n·√ln(1/δ)/(εn))^{2/3} with the published amplification by shuffling,
which is left out here (nothing is shuffled): composition by zCDP takes its place. State: x and one
estimate per depth.

>>> import numpy as np
>>> from noshuffle.convex.losses import linear
>>> from noshuffle.convex.solvers.domains import L1Ball
>>> x = np.tile([[0.1, -1.0, 0.2]], (4096, 1))
>>> run = frank_wolfe_tree(linear(order=math.inf), x, None, epsilon=1.0, delta=1e-6,
...                        domain=L1Ball(1.0), test_seed=0)
>>> bool(run.weights[1] > 0.7), run.statement.epsilon <= 1
(True, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import ONE_PASS, Solution, contribution
from noshuffle.convex.solvers.noisy_max import choose
from noshuffle.convex.solvers.problem import Problem, solver
from noshuffle.errors import InvalidInput, Unsupported, whole


@dataclass(frozen=True)
class TreePhase:
    """One tree: its depth, root batch, and the number of leaves walked before it."""

    depth: int
    batch: int
    before: int

    def size(self, depth: int) -> int:
        """Rows of a node at this depth; never none."""
        return max(1, self.batch >> depth)

    @property
    def rows(self) -> int:
        """Rows of the whole tree: the root, and 2^{j−1} right children at depth j."""
        right = (2 ** (j - 1) * self.size(j) for j in range(1, self.depth + 1))
        return int(self.batch + sum(right))

    def noise(self, loss: Loss, *, radius: float, rho: float, neighbours: str) -> float:
        """Scale of the Gumbel noise on scores: the worst node of the tree; see the docstring."""
        c = contribution(neighbours)
        leaves = 2**self.depth
        worst = leaves * (c * loss.lipschitz * radius / self.batch) ** 2
        for j in range(1, self.depth + 1):
            below = 2 ** (self.depth - j)
            # At most the diameter; the first leaf of the phase has its largest step.
            drift = min(below * 2 * radius * step_size(self.before), 2 * radius)
            move = c * radius * loss.smoothness * drift / self.size(j)
            worst = max(worst, below * move**2)
        return math.sqrt(worst / (2 * rho))


def step_size(leaf: int) -> float:
    """η of the leaf with this index (from 0): 2/(k + 2), at most 1."""
    return 2 / (leaf + 2)


def phase_plan(rows: int, *, phases: int) -> list[TreePhase]:
    """Trees of depth 1 … `phases` that share the rows equally, each with its root batch."""
    out, before = [], 0
    for depth in range(1, phases + 1):
        share = rows // phases
        batch = max(1, int(2 * share / (depth + 2)))
        phase = TreePhase(depth=depth, batch=batch, before=before)
        while phase.rows > share and batch > 1:
            batch -= max(1, batch // 64)
            phase = TreePhase(depth=depth, batch=batch, before=before)
        if phase.rows > share:
            raise InvalidInput(f"{rows} rows are too few for {phases} phases; use fewer phases")
        out.append(phase)
        before += 2**depth
    return out


@solver()
def frank_wolfe_tree(problem: Problem, *, phases: int | None = None) -> Solution:
    """Single pass; `phases` defaults to ½ lg n, i.e. about √n Frank–Wolfe steps.

    Guarantees: ρ-zCDP of all chosen vertices, hence of all iterates, for any smooth loss.
    """
    loss, domain = problem.loss, problem.domain
    if not domain.is_polytope:
        raise Unsupported(f"this solver needs L1Ball or Simplex, got {type(domain).__name__}")
    problem.require("tree Frank–Wolfe", rows=math.inf, smooth=True)
    n, d, rho = problem.n, problem.d, problem.rho
    if phases is None:
        phases = max(1, n.bit_length() // 2 - 1)
    whole(phases=phases, at_most=40)
    plan = phase_plan(n, phases=phases)
    w, used, scale = domain.start(d), 0, 0.0

    def fresh(count: int) -> slice:
        nonlocal used
        used += count
        return slice(used - count, used)

    for phase in plan:
        scale = phase.noise(loss, radius=domain.size, rho=rho, neighbours=problem.neighbours)
        root = problem.gradient(w, fresh(phase.batch)) / phase.batch
        values: list[Array] = [root] * (phase.depth + 1)
        points: list[Array] = [w] * (phase.depth + 1)
        for leaf in range(2**phase.depth):
            # Depth-first: the path changes from the depth of the lowest bit that just turned on.
            turned = phase.depth if leaf == 0 else (leaf & -leaf).bit_length() - 1
            top = phase.depth - turned
            if leaf:  # a right child at depth `top`; everything below it is a left copy
                size = phase.size(top)
                batch = fresh(size)
                change = problem.gradient(w, batch) - problem.gradient(points[top - 1], batch)
                values[top] = values[top - 1] + change / size
                points[top] = w
            for j in range(top + 1, phase.depth + 1):
                values[j], points[j] = values[j - 1], points[j - 1]
            scores = -domain.scores(values[phase.depth] + loss.ridge * w)
            v = domain.vertex(choose(scores, scale=scale, noise="gumbel", draws=problem.draws), d)
            eta = step_size(phase.before + leaf)
            w = (1 - eta) * w + eta * v
    return problem.solution(
        w,
        {"noise": scale, "phases": float(phases), "rows_used": float(used)},
        rho=rho,
        sensitivity=problem.c * loss.lipschitz * domain.size / plan[-1].batch,
        noise=scale,
        mechanism=f"{phases} trees of gradients, vertices by report-noisy-max with Gumbel noise",
        participation=ONE_PASS,
    )
