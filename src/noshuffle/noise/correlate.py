"""One `StepPlan` on one chunk of tensors: correlate and scale what was drawn, in float32, in place.

    v = u + Σ_inner c·S_b        y = scale·gain·v + Σ_outer scale·d·S_b
    S_b ← θ_b·S_b + u            or      S_store ← v

with u = Σ w·z drawn before. Products and sums are rounded one by one, never fused, so that the C
loop and the torch form agree bit for bit on every machine. The buffers S are the only state.

>>> state = Buffers([torch.full((1, TILE), 3.0)])
>>> y, u = torch.empty(1, TILE), torch.ones(1, TILE)
>>> plan = StepPlan(draws=((0, 1.0),), inner=((0, 0.5),), gain=2.0, decays=(0.1,))
>>> correlate_in_torch_(y, u=u, plan=plan, state=state, scale=1.0)
>>> y[0, 0].item(), round(state.tensors[0][0, 0].item(), 3)
(5.0, 1.3)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch  # noqa: F401  (the doctest uses it)
from torch import Tensor

from noshuffle.noise.constants import TILE  # noqa: F401  (the doctest uses it)
from noshuffle.noise.step_plan import StepPlan, dense


class Buffers:
    """The buffers of one chunk, each a contiguous view of tiles × 1024, and their addresses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.addresses = (ctypes.c_void_p * len(pointers))(*pointers)


def correlate_in_torch_(
    y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float
) -> None:
    """Write scale times the noise of a step into `y` and bring the buffers forward.

    `u` holds the drawn sum. A buffer that is stored to is not among the outer ones. In torch
    operations, for every device (`loops.correlate_` takes the C loop where there is one).
    """
    buffers = state.tensors
    y.copy_(u)
    for b, c in sorted(plan.inner):
        y.add_(buffers[b] * c)
    for b, theta in enumerate(plan.decays):
        buffers[b].mul_(theta).add_(u)
    if plan.store >= 0:
        buffers[plan.store].copy_(y)
    y.mul_(plan.gain * scale)
    for b, d in sorted(plan.outer):
        y.add_(buffers[b] * (d * scale))


def correlate_in_c_(
    library: ctypes.CDLL, y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float
) -> None:
    """The same by the compiled loop."""
    count = len(state.tensors)
    decays = (ctypes.c_float * count)(*plan.decays) if plan.decays else None
    library.correlate(
        y.data_ptr(),
        u.data_ptr(),
        state.addresses,
        count,
        dense(plan.inner, count, 1.0),
        decays,
        dense(plan.outer, count, scale),
        plan.store,
        plan.gain * scale,
        y.shape[0],
    )
