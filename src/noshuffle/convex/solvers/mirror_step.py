"""The step of dual averaging in any norm, over any set: argmin_{x∈K} ⟨g, x⟩ + λψ(x − c).

Without a set x = c + ∇ψ*(−g/λ). Over K the conditions read g + u + λ∇ψ(x − c) = 0 with a multiplier
u of K at x: x(u) = c + ∇ψ*(−(g+u)/λ), and u minimises the convex

    λψ*(−(g+u)/λ) − ⟨u, c⟩ + max_{v∈K}⟨u, v⟩,

whose first two terms have gradient −x(u), 1/λ-Lipschitz (ψ is 1-strongly convex in ‖·‖_p ≥ ‖·‖₂).
Accelerated proximal steps of length λ (Beck, Teboulle 2009; Moreau's decomposition),

    y = u + λx(u),   u ← y − λΠ_K(y/λ),

started from the multiplier of the step before, need nothing but the projection on K. For p = 2 the
answer is a projection itself. All of it works on released numbers and is no part of a privacy
proof, but that x is inside of K, where the bounds of a loss hold: the last thing done is Π_K.

State: the multiplier of the last step.

>>> from noshuffle.optim.norm_ball import ball
>>> step = MirrorStep(Norm(1.5), ball(1.0, 1.5))
>>> step(np.array([-9.0, 0.0]), centre=np.zeros(2), strength=1.0).round(3)
array([1., 0.])
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.optim.constraints import Constraint, Everywhere
from noshuffle.optim.norms import Norm

#: How far a step may still move x(u), of the size of x, when it is taken as found.
TOLERANCE = 1e-3
_MOST = 30


class MirrorStep:
    """Steps of one phase, which share their multiplier."""

    def __init__(
        self, norm: Norm, domain: Constraint, *, most: int = _MOST, tolerance: float = TOLERANCE
    ) -> None:
        self.norm, self.domain = norm, domain
        self.most, self.tolerance = most, tolerance
        self._multiplier: Array | None = None

    def __call__(self, g: Array, *, centre: Array, strength: float) -> Array:
        def point(u: Array) -> Array:
            return centre + self.norm.dual_map(-(g + u) / strength)

        free = point(np.zeros_like(g))
        if isinstance(self.domain, Everywhere):
            return free
        inside = self.domain.project(free)
        if self.norm.p == 2 or np.array_equal(inside, free):
            self._multiplier = None
            return inside
        u = ahead = np.zeros_like(g) if self._multiplier is None else self._multiplier
        limit = strength * self.tolerance * float(np.linalg.norm(inside))
        momentum = 1.0
        for _ in range(self.most):
            y = ahead + strength * point(ahead)
            new = y - strength * self.domain.project(y / strength)
            moved = float(np.linalg.norm(new - ahead))
            after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead, u, momentum = new + (momentum - 1) / after * (new - u), new, after
            if moved <= limit:
                break
        self._multiplier = u
        return self.domain.project(point(u))
