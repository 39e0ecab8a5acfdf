"""The step of a whole study as one CUDA graph.

    host      stage the batch ─ announce the step ─ replay
    device    per-example gradients of all runs, clip, sum, noise, update

Unlike a step of `compiled` nothing happens in between, since a study keeps no ledger. Batches of up
to the captured number of rows are staged in buffers that stay where they are; rows behind them have
weight zero. Off CUDA the work is simply called; the tests hold everything but the capture that way.

State: the buffers, the graph and what it writes its losses to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Work = Callable[[tuple[Any, ...], Tensor], Tensor]


class StudyGraph:
    """One kind of batch, up to `capacity` rows.

    Guarantees: rows that are not kept have weight zero in the captured work, whatever lies there.
    """

    def __init__(self, batch: tuple[Any, ...], *, capacity: int, device: torch.device) -> None:
        leaves, self._spec = tree_flatten(batch)
        self.kind = kind_of(leaves, self._spec)
        self.capacity = capacity
        self._leaves = [
            torch.zeros((capacity, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self._keep = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._kept = -1
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None
        self._work: Work | None = None

    @property
    def batch(self) -> tuple[Any, ...]:
        """The buffers in the structure of a batch."""
        whole: tuple[Any, ...] = tree_unflatten(self._leaves, self._spec)
        return whole

    def stage(self, batch: tuple[Any, ...], keep: Tensor | None, *, size: int) -> None:
        """Put a batch of `size` rows into the buffers."""
        for buffer, leaf in zip(self._leaves, tree_flatten(batch)[0]):
            if isinstance(buffer, Tensor):
                buffer[:size].copy_(leaf, non_blocking=True)
        if keep is not None:
            self._keep[:size].copy_(keep)
            self._keep[size:] = False
            self._kept = -1
        elif self._kept != size:
            self._keep[:size] = True
            self._keep[size:] = False
            self._kept = size

    def capture(self, warm: Work, work: Work) -> None:
        """Run `warm` twice on what is staged, then capture `work`.

        Libraries make plans and workspaces when first used, which a capture must not; `warm` is the
        part of the work that releases nothing.
        """
        self._work = work
        if self._device.type != "cuda":
            return
        side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                warm(self.batch, self._keep)
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._out = work(self.batch, self._keep)
        self._graph = graph

    def replay(self) -> Tensor:
        """Do the work on what is staged; its answer, a copy."""
        if self._graph is None:
            assert self._work is not None
            return self._work(self.batch, self._keep)
        assert self._out is not None
        self._graph.replay()
        return self._out.clone()


def kind_of(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """What a batch must have in common with the captured one."""
    own = [(v.shape[1:], v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves]
    return (str(spec), *own)
