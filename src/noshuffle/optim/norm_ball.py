"""Balls of any norm of `norms`: what l_p balls do, on the sizes of parts, directions kept.

    project   directions of w, sizes of w projected on the l_p ball            (Euclidean distance)
    lmo       directions of g, sizes of the l_p ball's minimiser (negative)

Minimising ‖x − w‖² or ⟨g, x⟩ over a set that only asks for sizes takes the directions of w (or −g):
⟨x, w⟩ is largest then for given sizes (`norms`), and what is left is a problem of sizes. Sizes of a
matrix come in falling order and so do those of its projection. No state.

>>> from noshuffle.optim.norms import Groups, SingularValues
>>> ball(1.0, 1, Groups((0, 0, 1))).project(np.array([3.0, 4.0, 0.0])).round(6)
array([0.6, 0.8, 0. ])
>>> ball(2.0, 1, SingularValues(2, 2)).lmo(np.diag([1.0, 3.0]).ravel()).round(6) + 0.0
array([ 0.,  0.,  0., -2.])
>>> ball(2.0, 1), ball(2.0, 3), ball(2.0, math.inf)
(L1Ball(radius=2.0), LpBall(radius=2.0, p=3), Box(low=-2.0, high=2.0))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import positive
from noshuffle.optim.constraints import (
    Array,
    Box,
    Constraint,
    L1Ball,
    L2Ball,
    Sized,
    flatten,
    unflatten,
)
from noshuffle.optim.lp_ball import LpBall
from noshuffle.optim.norms import ENTRIES, Decomposition, Entries, Norm

#: What putting sizes and directions together again may add to a norm.
_ROUNDING = 2.0**-40


def ball(radius: float, p: float, parts: Decomposition = ENTRIES) -> Constraint:
    """‖w‖ ≤ radius in the norm of order p, 1 ≤ p ≤ ∞, of its entries or other parts."""
    positive(radius=radius)
    if not isinstance(parts, Entries) and p != 2:
        return NormBall(radius, Norm(p, parts))
    if p == 1 or p == 2:
        return L1Ball(radius) if p == 1 else L2Ball(radius)
    return Box(-radius, radius) if p == math.inf else LpBall(radius, p)


@dataclass(frozen=True)
class NormBall(Sized):
    """norm(θ) ≤ radius, over all tensors together.

    Guarantees: projections are inside, by a factor of 1 − 2⁻⁴⁰.
    """

    in_norm: Norm

    @property
    def norm(self) -> Norm:
        return self.in_norm

    inexact = 1e-10

    def nearest(self, values: Sequence[Tensor]) -> list[Tensor]:
        vector = flatten(values).cpu().numpy()
        if not np.isfinite(vector).all():
            return [torch.full_like(v, math.nan) for v in values]
        sizes, join = self.norm.parts.split(vector)
        new = ball(self.radius, self.norm.p).project(sizes)
        if np.array_equal(new, sizes):
            return list(values)
        rounding = max(torch.finfo(v.dtype).eps for v in values) + _ROUNDING
        return unflatten(torch.from_numpy(join(new * (1 - rounding))), values)

    def lmo(self, g: Array) -> Array:
        sizes, join = self.norm.parts.split(g)
        return join(ball(self.radius, self.norm.p).lmo(sizes) * (1 - _ROUNDING))
