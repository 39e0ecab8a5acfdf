"""The clipped sum of one kind of batch as CUDA graphs over buffers that stay where they are.

    sum       per-example gradients, clip, sum                   → losses, then norms to the host

What comes behind is a graph of its own (`release`). Nothing here decides anything: order and guard
are those of `step`. State: the buffers, and what the last step left in them until the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.clipping.products import repeatable
from noshuffle.participation import Mask
from noshuffle.release.units import Ids
from noshuffle.training.compiled.flat import Sums, TotalFn
from noshuffle.training.compiled.graphs import (
    BatchBuffers,
    Captured,
    Signal,
    warmed,
    without_autocast_cache,
)
from noshuffle.training.compiled.release import CapturedRelease
from noshuffle.training.compiled.staged import StagedUsers
from noshuffle.training.compiled.update import Update
from noshuffle.training.step_parts import Parts

Rows = NDArray[np.float32]


class Program(BatchBuffers):
    """The graphs of one kind of batch, up to `capacity` rows.

    Guarantees: rows that are not kept contribute exactly zero, whatever a buffer holds.
    """

    def __init__(
        self,
        parts: Parts,
        batch: tuple[Any, ...],
        *,
        capacity: int,
        captures: bool,
    ) -> None:
        super().__init__(batch, capacity=capacity, device=parts.device)
        self.parts, self.captures = parts, captures
        self.users: StagedUsers | None = None
        if parts.groups_users:
            is_mean = parts.reduce == "mean"
            self.users = StagedUsers(capacity=capacity, device=parts.device, is_mean=is_mean)
        #: Which numbers of the report are norms of units.
        self.units: Ids | slice = slice(0)
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._report = self._host((3, capacity), torch.float32)
        self._losses = self._host((capacity,), torch.float32)
        # The same memory as NumPy sees it; to ask for such a view takes longer than to read it.
        self._told: tuple[Rows, Rows] = self._report.numpy(), self._losses.numpy()
        self._shown, self._summed = (Signal(self.device, captures=captures) for _ in range(2))
        self._is_shown = False
        self.sums: Sums | None = None
        self._sum = Captured(lambda: None, captures=False)
        #: Whether the sum draws random numbers, so that each step must set the generator.
        self.is_random = True
        #: What becomes of the sum.
        self.ending: CapturedRelease | None = None

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.captures, device="cpu")

    @property
    def values(self) -> dict[str, Tensor]:
        """The clipped sum, which must be ready."""
        assert self.sums is not None
        return self.sums.values

    # -- building ------------------------------------------------------------------------------

    def _captured(self, do: Callable[[], None]) -> Captured:
        return Captured(do, captures=self.captures, pool=self._pool)

    def find_draws(self) -> None:
        """Find out whether the sum, which must be ready, draws random numbers."""
        if self.captures:
            generator = torch.cuda.default_generators[self.device.index or 0]
            before = generator.get_state()
            self._sum()
            torch.cuda.synchronize(self.device)
            self.is_random = not torch.equal(generator.get_state(), before)
        self._reset()

    def capture_sum(self, total: TotalFn) -> None:
        """Ready the clipped sum by one of its forms; a former one is forgotten."""
        self._is_shown = False

        def do() -> None:
            sums = total(self.batch, self.keep)
            report = sums.report
            if report is None:
                report = torch.stack([t.float() for t in (sums.losses, sums.norms, sums.bad)])
            self._report.copy_(report, non_blocking=True)
            self._summed.raise_()
            self.sums = sums

        with repeatable(), without_autocast_cache():
            if self.captures:
                warmed(do, self.device)
            self._sum = self._captured(do)
        self._reset()

    def end_with(self, update: Update) -> None:
        """Ready what becomes of the sum, which must be ready."""
        self.ending = CapturedRelease(
            self.parts, lambda: self.values, captures=self.captures, pool=self._pool
        )
        self.forget()  # its place is given out as the private gradient from here on
        self.ending.capture(update)

    def show(self, losses: Tensor) -> None:
        """Send losses ahead, so that the host can read them while the backward pass runs."""
        self._losses.copy_(losses, non_blocking=True)
        self._shown.raise_()
        self._is_shown = True

    # -- one step ------------------------------------------------------------------------------

    def stage_units(self, size: int, keep: Mask | None, ids: Ids | None) -> None:
        """Say whose the rows are, where users are clipped."""
        self.units = slice(size) if keep is None else np.flatnonzero(keep)
        if self.users is not None:
            assert ids is not None
            self.users.stage(ids, keep)
            self.units = slice(self.users.count)

    def sum(self) -> None:
        """Start the clipped sum of what is staged."""
        self._shown.expect()
        self._summed.expect()
        self._sum()

    def forget(self) -> None:
        """Make the sum zero: it may not be released."""
        if self.sums is not None:
            torch._foreach_zero_(list(self.sums.values.values()))

    def _reset(self) -> None:
        """Expect nothing: what was run to try a graph has raised the signals."""
        for signal in (self._shown, self._summed):
            signal.reset()

    def report(self) -> Rows:
        """Losses, norms and non-finite marks of all rows, until the next step; waits."""
        self._summed.wait()
        return self._told[0]

    def losses(self) -> Rows:
        """Losses of all rows of the buffers, until the next step; waits for them alone."""
        if not self._is_shown:
            first: Rows = self.report()[0]
            return first
        self._shown.wait()
        return self._told[1]
