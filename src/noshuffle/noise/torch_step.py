"""A step of noise in operations of torch: for every device, source and type of value.

    value ← grid(value + row t of scale·C⁻¹Z)

by chunks, some tiles of 1024 numbers that stay in a cache between drawing, correlating and adding
(`layout`, `step_plan`, `grid`). It is the slow twin of the step in C (`c_step`) and of the kernel
(`fused`), with the same bits, and runs where neither of them does. Products and sums are rounded
one by one, never fused. State: the buffers that it is given, and scratch memory.

>>> from noshuffle.noise.source import test_source
>>> layout = Layout.of({"w": (3,)}, chunk_tiles=1)
>>> state = torch.zeros(0, layout.tiles, TILE)                      # no buffers: independent noise
>>> step = TorchStep(layout, source=test_source(seed=1), state=state)
>>> value = torch.zeros(3)
>>> step.add_({"w": value}, plan=StepPlan(draws=((0, 1.0),)), scale=0.5)
>>> bool(value.all()), bool((value % grid_of(StepPlan(draws=((0, 1.0),)), scale=0.5) == 0).all())
(True, True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from noshuffle.noise.gaussian import TILE
from noshuffle.noise.grid import add_on_grid_
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import AnySource
from noshuffle.noise.step_plan import StepPlan, grid_of


class TorchStep:
    """The chunks of a layout, ready to receive noise; `state` is (buffers, tiles, 1024).

    Guarantees: `add_` changes every element of every value exactly once, by a number that does not
    depend on the chunks.
    """

    def __init__(self, layout: Layout, *, source: AnySource, state: Tensor) -> None:
        self._chunks, self._state = layout.chunks, state
        self._drawer = source.drawer(self._chunks, device=state.device)
        largest = max((chunk.tiles for chunk in self._chunks), default=0)
        self._scratch = torch.empty((3, largest, TILE), dtype=torch.float32, device=state.device)

    def add_(self, targets: Mapping[str, Tensor], *, plan: StepPlan, scale: float) -> None:
        """Add the noise of one step to flat tensors on the grid, and bring the buffers forward."""
        for index in range(len(self._chunks)):
            self._add_chunk(targets, plan=plan, scale=scale, index=index)

    def _add_chunk(
        self, targets: Mapping[str, Tensor], *, plan: StepPlan, scale: float, index: int
    ) -> None:
        chunk, step = self._chunks[index], grid_of(plan, scale=scale)
        y, u, coins = self._scratch[:, : chunk.tiles].unbind()
        buffers = self._state[:, chunk.first : chunk.first + chunk.tiles].unbind()
        # Without buffers the weights can carry gain and scale, and u is the noise itself.
        into, factor = (u, 1.0) if buffers else (y, plan.gain * scale)
        for i, (row, w) in enumerate(plan.draws):
            self._drawer.draw_(into, chunk=index, row=row, weight=w * factor, accumulate=i > 0)
        if buffers:
            correlate_(y, u=u, plan=plan, buffers=buffers, scale=scale)
        self._drawer.jitters_(coins, step=step)
        for piece in chunk.pieces:
            noise, jitters = y.view(-1)[piece.place], coins.view(-1)[piece.place]
            target = targets[piece.name][piece.begin : piece.end]
            add_on_grid_(target, noise, jitters=jitters, step=step)


def correlate_(
    y: Tensor, *, u: Tensor, plan: StepPlan, buffers: Sequence[Tensor], scale: float
) -> None:
    """One step of scale·C⁻¹Z on a chunk, from the sum u of its draws; see `step_plan`.

    >>> y, u, buffer = torch.empty(3), torch.ones(3), torch.full((3,), 3.0)
    >>> plan = StepPlan(draws=((0, 1.0),), inner=((0, 0.5),), gain=2.0, decays=(0.1,))
    >>> correlate_(y, u=u, plan=plan, buffers=[buffer], scale=1.0)
    >>> y[0].item(), round(buffer[0].item(), 3)
    (5.0, 1.3)
    """
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
