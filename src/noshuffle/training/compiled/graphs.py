"""What a CUDA graph needs: buffers that stay where they are, a capture to be replayed, a signal.

    BatchBuffers   batches of one kind, up to `capacity` rows; which rows count
    Captured       a function without arguments, captured once and replayed, or simply called
    Signal         a count that a device raises inside a graph, and that the host can wait for

Without capture, on any device, the same functions are simply called; the tests hold everything but
the capture itself that way. State: what was staged last; the counts.

>>> held = BatchBuffers((torch.ones(2, 3), 0.5), capacity=4, device=torch.device("cpu"))
>>> held.stage([torch.ones(2, 3), 0.5], 2); held.weigh(2, None)
>>> held.batch[0].sum(1).tolist(), held.keep.tolist()
([3.0, 3.0, 0.0, 0.0], [True, True, False, False])
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from noshuffle.clipping.graph_memory import holding
from noshuffle.errors import NoshuffleError
from noshuffle.participation import Mask

#: Looks at the count before other threads get their turn, and before the host lets the device tell.
_TURN, _PATIENCE = 256, 2**18
#: Lets others run, for a third of a microsecond if there are none; time.sleep(0) takes 57 of them.
_turn: Callable[[], Any] = getattr(os, "sched_yield", bool)


class BatchBuffers:
    """Batches like this one, in tensors that stay where they are."""

    def __init__(self, batch: tuple[Any, ...], *, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        leaves, self.spec = tree_flatten(batch)
        self._leaves = [
            torch.zeros((capacity, *v.shape[1:]), dtype=v.dtype, device=device)
            if isinstance(v, Tensor)
            else v
            for v in leaves
        ]
        self.tensors = [v for v in self._leaves if isinstance(v, Tensor)]
        self.keep = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._kept: tuple[int, bytes] = (0, b"")
        self._filled = 0

    @property
    def batch(self) -> tuple[Any, ...]:
        """The buffers in the structure of a batch."""
        whole: tuple[Any, ...] = tree_unflatten(self._leaves, self.spec)
        return whole

    def stage(self, leaves: Sequence[Any], size: int) -> None:
        """Put a batch of `size` rows (its leaves) into the buffers, zeros behind it."""
        given = [
            leaf.detach() if leaf.requires_grad else leaf  # or the buffers would belong to its pass
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
        filled, self._filled = self._filled, size
        if size == self.capacity:
            torch._foreach_copy_(self.tensors, given, non_blocking=True)
        else:
            for buffer, leaf in zip(self.tensors, given):
                buffer[:size].copy_(leaf, non_blocking=True)
                if size < filled:
                    buffer[size:filled].zero_()

    def weigh(self, size: int, keep: Mask | None) -> None:
        """Say which of the `size` rows count (None: all). The others are made zero."""
        key = (size, b"" if keep is None else keep.tobytes())
        if key != self._kept:
            before, marks = self._kept
            self._kept = key
            if keep is None and not marks:
                # Draws change their size in every step. A fill is queued, where a copy from the
                # host would wait until the device has done all that it was given before.
                low, high = sorted((before, size))
                self.keep[low:high].fill_(size > before)
            else:
                mask = np.zeros(self.capacity, dtype=bool)
                mask[:size] = True if keep is None else keep
                self.keep.copy_(torch.from_numpy(mask))
        if keep is not None:
            for buffer in self.tensors:
                buffer.masked_fill_(~self.keep.view(-1, *[1] * (buffer.dim() - 1)), 0)


def warmed(do: Callable[[], Any], device: torch.device) -> None:
    """Run twice aside: libraries make plans and workspaces when first used, a capture must not."""
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        do()
        do()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Cast every weight anew: a graph must not read casts that an eager pass left in the cache.

    They are of older weights, and freed when the caller leaves autocast (torch 2.6 to 2.13).
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is given up while another is captured ends that capture (torch resets it)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Captured:
    """A function without arguments, captured once and replayed, or simply called."""

    def __init__(self, do: Callable[[], None], *, captures: bool, pool: Any = None) -> None:
        self.do = do
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: list[Tensor] = []
        if captures:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads (a loader that pins memory) may go on using the device meanwhile.
            capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
            with _no_garbage_collection(), holding() as self._held, capture:
                do()

    def __call__(self) -> None:
        if self._graph is None:
            self.do()
        else:
            self._graph.replay()


class Signal:
    """Raised by the device, waited for by the host: no event can be, in the middle of a graph.

    The graph adds one to a counter on the device and copies it into the host's memory, after the
    copies of whatever it wants to tell. Copies of one stream are made in order, so a host that sees
    the new count finds the rest there too.

    >>> signal = Signal(torch.device("cpu"), captures=False)
    >>> signal.expect(); signal.raise_(); signal.wait()
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self._tick = torch.zeros(1, dtype=torch.int64, device=device)
        self._copy = torch.zeros(1, dtype=torch.int64, pin_memory=captures, device="cpu")
        self._told = self._copy.numpy()
        self._expected = 0
        self._device = device

    def raise_(self) -> None:
        """Tell the host; this is what a graph holds."""
        self._tick.add_(1)
        self._copy.copy_(self._tick, non_blocking=True)

    def expect(self) -> None:
        """The host starts a graph that raises this."""
        self._expected += 1

    def reset(self) -> None:
        """Start anew; nothing may be on its way."""
        self._tick.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._copy.fill_(-1)
        self._expected = 0

    def wait(self) -> None:
        """Return when the last graph that was started has raised it; raises if the device failed.

        Some milliseconds of looking, as an event's own wait does, then an ordinary wait.
        """
        told, expected, looks = self._told, self._expected, 0
        while told[0] != expected:
            looks += 1
            if looks % _TURN == 0:
                _turn()
            if looks == _PATIENCE:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                if told[0] != expected:
                    raise NoshuffleError("the device lost a step; go on from the last checkpoint")
