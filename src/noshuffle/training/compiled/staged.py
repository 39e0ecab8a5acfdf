"""What changes from step to step besides the batch, in tensors that a graph reads.

    StagedUsers  which rows belong to which user; the gradients of a user are added up
                     G_u = Σ_{b of u} g_b   (their mean with reduce="mean")
    StagedClip   a clip norm ζ that moves: the sum leaves as ζ·(sum/ζ + noise), its digest covers
                 ζ and the count that the next ζ is learned from, which the device takes itself

The rows of a user are read in the order of the batch, by index and by nothing else: what another
user holds, NaN included, is never touched. State: what was staged last.

>>> whose = StagedUsers(capacity=3, device=torch.device("cpu"), is_mean=False)
>>> whose.stage(np.array([7, 4, 7]), None)
>>> whose.sums(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3))[0].flatten().tolist()
[2.0, 4.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping.adaptive import BIT_SENSITIVITY
from noshuffle.release.guard import Mask
from noshuffle.release.units import Ids
from noshuffle.training.compiled import kernels

COLUMNS = 1024


class StagedUsers:
    """Rows of a batch by user.

    Guarantees: row u of `sums` is a function of the rows of user u alone; rows outside the mask
    belong to nobody.
    """

    def __init__(self, *, capacity: int, device: torch.device, is_mean: bool) -> None:
        self.capacity, self.count, self._is_mean = capacity, 0, is_mean
        # Rows user by user, then where the rows of each user begin.
        self._table = torch.zeros(2 * capacity + 1, dtype=torch.int32, device=device)
        self.units = torch.zeros(capacity, dtype=torch.int64)
        self._last = b""

    def stage(self, whose: Ids, keep: Mask | None) -> None:
        """Say whose the first rows are, and which of them count (None: all)."""
        kept = None if keep is None else np.flatnonzero(keep)
        own = whose if kept is None else whose[kept]
        order = np.argsort(own, kind="stable")
        ordered, is_first = own[order], np.ones(len(own), dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        self.count = len(starts)
        table = np.zeros(2 * self.capacity + 1, dtype=np.int32)
        table[: len(own)] = order if kept is None else kept[order]
        table[self.capacity :] = len(own)
        table[self.capacity : self.capacity + len(starts)] = starts
        if table.tobytes() == self._last:
            return
        self._last = table.tobytes()
        self._table.copy_(torch.from_numpy(table))
        self.units.fill_(min(self.count, self.capacity - 1))  # rows that do not count: of nobody
        rows = torch.from_numpy(table[: len(own)].astype(np.int64))
        self.units[rows] = torch.from_numpy(np.cumsum(is_first) - 1)

    def sums(self, matrix: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, columns] → [users, columns]; 0 or NaN per user by its losses; who has a row."""
        users, width = self.capacity, matrix.shape[1]
        starts = self._table[self.capacity :]
        present = starts[1:] > starts[:-1]
        if matrix.is_cuda and kernels.HAS_TRITON:
            out, own = matrix.new_empty(users, width), losses.new_empty(users)
            launch: Any = kernels.user_sum
            launch[(users, -(-width // COLUMNS))](
                matrix, width, self._table, self.capacity, losses, out, own,
                IS_MEAN=self._is_mean, COLUMNS=COLUMNS,
            )  # fmt: skip
            return out, own, present
        many = (starts[1:] - starts[:-1]).long()
        owner = torch.repeat_interleave(torch.arange(users), many)
        rows = self._table[: len(owner)].long()
        out = matrix.new_zeros(users, width).index_add_(0, owner, matrix[rows])
        own = losses.new_zeros(users).index_add_(0, owner, losses[rows] * 0.0)
        return out / many.clamp_min(1)[:, None] if self._is_mean else out, own, present


class StagedClip:
    """The clip norm of the coming step, and the count of the last one."""

    def __init__(self, *, device: torch.device, divisor: float) -> None:
        self._divisor = divisor
        self.before, self.after = (torch.ones((), device=device) for _ in range(2))
        self._count, self._norm = (
            torch.zeros(1, dtype=torch.float64, device=device) for _ in range(2)
        )
        self._estimate = torch.zeros(1, dtype=torch.float32, device=device)
        #: Told of every clip norm: what aims at it.
        self.aims: list[Callable[[float], None]] = []

    @property
    def printed(self) -> list[Tensor]:
        """What the digest of a sum covers besides the sum."""
        return [self._count, self._norm]

    def stage(self, norm: float, estimate: float) -> None:
        """Clip the coming step to this norm, and count the norms up to an estimate."""
        for aim in self.aims:
            aim(norm)
        self.before.fill_(1.0 / norm)
        self.after.fill_(norm / self._divisor)
        self._norm.fill_(norm)
        self._estimate.fill_(estimate)

    def count_(self, norms: Tensor, keep: Tensor) -> None:
        """Count the norms of the rows that are kept, where they lie: `adaptive.shifted_count`."""
        below = (norms.float() <= self._estimate) & keep
        self._count.copy_(below.sum() - BIT_SENSITIVITY * keep.sum(dtype=torch.float64))

    def counted(self, count: float) -> None:
        """The count of this step is known."""
        self._count.fill_(count)
