"""The recursive gradient estimate of single-pass Frank–Wolfe, and how far one row can move it.

    d_0 = mean gradient of a first batch at x_0
    d_t = (1−η)(d_{t−1} + mean[∇f(x_t; z) − ∇f(x_{t−1}; z)]) + η·mean ∇f(x_t; z)    fresh batches
        = (1−η)^t d_0 + Σ_{s≤t} (1−η)^{t−s} w_s,     w_s = (1−η)·Δ_s + η·g_s

(Cutkosky, Orabona 2019; Bassily, Guzmán, Nandi 2021.) One row sits in one batch. In the dual norm,
with x in a set of radius D, ‖x_t − x_{t−1}‖ = η‖v − x‖ ≤ 2ηD, so a row's share of w_s is at most
η(2L₁D(1−η) + L₀)/batch, and replacing it moves w_s by

    step_reach = c·η(2L₁D + L₀)/batch,          first_reach = c·L₀/first,      c = 2 (zero-out: 1)

(`first` rows in the first batch). All later d_t inherit the move times (1−η)^{t−s}. The variance of
d_t stays near η/batch·(…)², i.e. 1/n for η ≈ ln n/T: single-pass, optimal. With η = ln n/(2T) the
start keeps a weight of 1/√n, which is what sampling costs at least; twice the step forgets it
further and jumps twice as far between vertices, which cost more on all tables that were tried.

>>> plan = Recursion.plan(rows=1000, steps=10)
>>> plan.first, plan.batch, round(plan.rate, 3)
(500, 50, 0.345)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.base import contribution
from noshuffle.convex.solvers.decayed_sums import squares
from noshuffle.convex.solvers.problem import Problem
from noshuffle.errors import InvalidInput, unit_rate, whole


@dataclass(frozen=True)
class Recursion:
    """Sizes of the pass: `first` rows, then `steps` batches of `batch` rows, step size `rate`."""

    first: int
    batch: int
    steps: int
    rate: float

    def __post_init__(self) -> None:
        whole(first=self.first, batch=self.batch, steps=self.steps)
        unit_rate(rate=self.rate)

    @classmethod
    def plan(cls, *, rows: int, steps: int | None, rate: float | None = None) -> Recursion:
        """Half of the rows first, the rest in equal batches; η = ln(rows)/(2·steps), at most 1.

        There are √rows steps where no number is given.
        """
        whole(at_least=2, rows=rows)
        steps = math.isqrt(rows) if steps is None else steps
        whole(steps=steps)
        first = rows // 2
        batch = (rows - first) // steps
        if batch < 1:
            raise InvalidInput(f"{rows} rows allow at most {rows - first} steps, got {steps}")
        if rate is None:
            rate = min(math.log(rows) / (2 * steps), 1.0)
        return cls(first=first, batch=batch, steps=steps, rate=rate)

    def slices(self) -> tuple[slice, list[slice]]:
        """The rows of the first batch, and those of every later step."""
        ends = [self.first + t * self.batch for t in range(self.steps + 1)]
        return slice(0, self.first), [slice(a, b) for a, b in pairwise(ends)]

    def reaches(self, loss: Loss, *, radius: float, neighbours: str) -> tuple[float, float]:
        """(first_reach, step_reach) of the docstring, in the dual norm."""
        c = contribution(neighbours)
        step = self.rate * (2 * loss.smoothness * radius + loss.lipschitz) / self.batch
        return c * loss.lipschitz / self.first, c * step

    def increment(self, loss: Loss, x: Array, previous: Array, rows: Array, labels: Array) -> Array:
        """w_s of one batch."""
        new = loss.data_gradient(x, rows, labels) / self.batch
        old = loss.data_gradient(previous, rows, labels) / self.batch
        return (1 - self.rate) * (new - old) + self.rate * new

    def decayed_squares(self) -> float:
        """Σ_{t≤T} (1−η)^{2t}: how often, in squares, one row counts over all later releases."""
        return squares(steps=self.steps + 1, decay=1 - self.rate)

    def walk(self, problem: Problem, pick: Callable[[int, Array, Array], Array]) -> Iterator[Array]:
        """All iterates of x ← (1−η)x + η·v, the start first.

        `pick(t, share, x)` is given d_0 at t = 0 and w_t afterwards, and chooses v.
        """
        head, batches = self.slices()
        x = previous = problem.domain.start(problem.d)
        yield x
        share = problem.gradient(x, head) / self.first
        for t in range(self.steps + 1):
            if t > 0:
                rows = batches[t - 1]
                share = self.increment(problem.loss, x, previous, problem.x[rows], problem.y[rows])
            v = pick(t, share, x)
            previous, x = x, (1 - self.rate) * x + self.rate * v
            yield x
