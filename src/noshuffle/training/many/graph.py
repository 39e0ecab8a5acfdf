"""The step of a whole study as one CUDA graph.

    host      stage the batch ─ announce the step ─ replay
    device    per-example gradients of all runs, clip, sum, noise, update

Unlike a step of `compiled` nothing happens in between, since a study keeps no ledger. Off CUDA the
work is simply called. State: the buffers, the graph and what it writes its losses to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from noshuffle.training.compiled.graphs import UNKNOWN, BatchBuffers, Captured, warmed

Work = Callable[[tuple[Any, ...], Tensor], Tensor]


class StudyGraph(BatchBuffers):
    """One kind of batch, up to `capacity` rows.

    Guarantees: rows that are not kept have weight zero in the captured work, whatever lies there.
    """

    kind: tuple[Any, ...]
    _out: Tensor
    _replay: Captured

    def put(self, batch: tuple[Any, ...], keep: Tensor | None, *, size: int) -> None:
        """Stage a batch of `size` rows, all of them or those in `keep`."""
        self.stage(tree_leaves(batch), size)
        if keep is None:
            self.weigh(size, None)
        else:
            self.keep[:size].copy_(keep)
            self.keep[size:] = False
            self._kept = UNKNOWN

    def capture(self, warm: Work, work: Work) -> None:
        """Capture `work` on what is staged; `warm` is the part of it that releases nothing."""
        is_captured = self.device.type == "cuda"
        if is_captured:
            warmed(lambda: warm(self.batch, self.keep), self.device)

        def do() -> None:
            self._out = work(self.batch, self.keep)

        self._replay = Captured(do, captures=is_captured)

    def replay(self) -> Tensor:
        """Do the work on what is staged; its answer, a copy."""
        self._replay()
        return self._out.clone()


def kind_of(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """What a batch must have in common with the captured one."""
    own = [(v.shape[1:], v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves]
    return (str(spec), *own)
