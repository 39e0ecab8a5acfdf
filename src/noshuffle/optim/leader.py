"""The regularized leader in float64: what estimators and solvers play, one released sum at a time.

    S ← S + η ĝ        h ← h + η
    θ = argmin_{θ∈K} ⟨S, θ⟩ + h·(r(θ) + (l2/2)‖θ‖²) + ½‖θ‖²

Algorithm 1 of Kairouz et al. 2021 (arXiv 2103.00039) with θ₀ = 0 and without momentum; `ftrl.FTRL`
is the same for the parameters of a torch model (the tests compare them). The quadratic part is
taken in closed form: with c = 1 + h·l2 the step is that of `composite.solve` at −S/c with weight
h/c. The last `free` coordinates (intercepts) have neither set nor penalty: there θ = −S.

State: `total` S, `weight` h. Everything here is post-processing of what was released.

>>> from noshuffle.optim import lasso
>>> leader = Leader(2, composite=lasso(0.25))
>>> [float(v) for v in leader.follow(np.array([1.0, 2.0]), rate=0.5)]
[-0.375, -0.875]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput
from noshuffle.optim.composite import Composite, GroupLasso, check_closed_form, solve
from noshuffle.optim.constraints import Array, Constraint


class Leader:
    """`groups` holds the indices of each group of a `GroupLasso` (a row of a matrix is a group)."""

    def __init__(
        self,
        size: int,
        *,
        free: int = 0,
        l2: float = 0.0,
        composite: Composite | None = None,
        constraint: Constraint | None = None,
        groups: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        check_closed_form(composite, constraint)
        if isinstance(composite, GroupLasso) and groups is None:
            raise InvalidInput("a group penalty needs groups: one group number per coordinate")
        self.total, self.weight = np.zeros(size), 0.0
        self._bound, self._l2 = size - free, l2
        self._composite, self._constraint = composite, constraint
        self._groups = groups if isinstance(composite, GroupLasso) else None

    def follow(self, gradient: Array, *, rate: float) -> Array:
        """Take in a released gradient of weight η = rate; the new iterate."""
        self.total += rate * gradient
        self.weight += rate
        theta, shrunk = -self.total, 1.0 + self.weight * self._l2
        if self._l2:
            theta[: self._bound] /= shrunk
        if self._composite is not None or self._constraint is not None:
            bound = theta[: self._bound]
            bound[:] = self._solved(bound, self.weight / shrunk)
        return theta

    def _solved(self, point: Array, weight: float) -> Array:
        groups: Sequence[Any] = [slice(None)] if self._groups is None else self._groups
        found = solve(
            [torch.from_numpy(point[group]) for group in groups],
            weight=weight,
            composite=self._composite,
            constraint=self._constraint,
        )
        out = np.zeros(len(point))
        for group, part in zip(groups, found):
            out[group] = part.numpy()
        return out
