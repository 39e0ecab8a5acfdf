"""A step of noise chunk by chunk: the form for every device, source and type of value.

    value ← grid(value + row t of scale·C⁻¹Z)

A chunk is some tiles of 1024 numbers that stay in the cache between drawing, correlating and adding
(`layout`, `native`, `grid`). It is the slow twin of the whole step in C (`whole_step`) and of the
kernel (`fused`), with the same bits, and runs where neither of them does. Chunks are shared among a
few threads. State: the buffers that it is given, and scratch memory.

>>> from noshuffle.noise.source import test_source
>>> layout = Layout.of({"w": (3,)}, chunk_tiles=1)
>>> state = torch.zeros(0, layout.tiles, TILE)                      # no buffers: independent noise
>>> step = ChunkStep(layout, source=test_source(seed=1), state=state, workers=1)
>>> value = torch.zeros(3)
>>> step.add_({"w": value}, plan=StepPlan(draws=((0, 1.0),)), scale=0.5)
>>> bool(value.all()), bool((value % grid_of(StepPlan(draws=((0, 1.0),)), scale=0.5) == 0).all())
(True, True)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from noshuffle.noise.gaussian import TILE
from noshuffle.noise.grid import add_on_grid_
from noshuffle.noise.layout import Layout, share
from noshuffle.noise.native import Buffers, correlate_
from noshuffle.noise.source import AnySource
from noshuffle.noise.step_plan import StepPlan, grid_of


class ChunkStep:
    """The chunks of a layout, ready to receive noise; `state` is (buffers, tiles, 1024).

    Guarantees: `add_` changes every element of every value exactly once, by a number that does not
    depend on the chunks, on the number of workers or on which of them came to it.
    """

    def __init__(self, layout: Layout, *, source: AnySource, state: Tensor, workers: int) -> None:
        self._chunks, self._buffers = layout.chunks, state.shape[0]
        self._workers = max(1, min(workers, len(self._chunks)))
        self._drawer = source.drawer(self._chunks, device=state.device, workers=self._workers)
        self._views = [
            Buffers([state[b, c.first : c.first + c.tiles] for b in range(self._buffers)])
            for c in self._chunks
        ]
        largest = max((c.tiles for c in self._chunks), default=0)
        shape = (self._workers, 3, largest, TILE)
        scratch = torch.empty(shape, dtype=torch.float32, device=state.device)
        # The scratch that each chunk is worked on in: item i is always worker i mod workers.
        self._scratch = []
        for i, c in enumerate(self._chunks):
            y, u, coins = scratch[i % self._workers, :, : c.tiles].unbind()
            parts = [(y.view(-1)[p.place], coins.view(-1)[p.place]) for p in c.pieces]
            self._scratch.append((y, u, coins, parts))

    def add_(self, targets: Mapping[str, Tensor], *, plan: StepPlan, scale: float) -> None:
        """Add the noise of one step to flat tensors on the grid, and bring the buffers forward."""

        def add(worker: int, index: int) -> None:
            self._add_chunk(targets, plan=plan, scale=scale, index=index, worker=worker)

        share(add, items=len(self._chunks), workers=self._workers)

    def _add_chunk(
        self,
        targets: Mapping[str, Tensor],
        *,
        plan: StepPlan,
        scale: float,
        index: int,
        worker: int,
    ) -> None:
        y, u, coins, parts = self._scratch[index]
        step = grid_of(plan, scale=scale)
        # Without buffers the weights can carry gain and scale, and u is the noise itself.
        into, factor = (u, 1.0) if self._buffers else (y, plan.gain * scale)
        for i, (row, w) in enumerate(plan.draws):
            self._drawer.draw_(
                into, chunk=index, row=row, weight=w * factor, accumulate=i > 0, worker=worker
            )
        if self._buffers:
            correlate_(y, u=u, plan=plan, state=self._views[index], scale=scale)
        self._drawer.jitters_(coins, step=step, worker=worker)
        for piece, (noise, jitters) in zip(self._chunks[index].pieces, parts):
            target = targets[piece.name]
            if piece.end - piece.begin != target.numel():
                target = target[piece.begin : piece.end]
            add_on_grid_(target, noise, jitters=jitters, step=step)
