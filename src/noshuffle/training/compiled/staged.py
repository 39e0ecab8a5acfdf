"""Which rows of a batch belong to which user, in tensors that a graph reads.

    G_u = Σ_{b of u} g_b        (their mean with reduce="mean")

The rows of a user are read in the order of the batch, by index and by nothing else: what another
user holds, NaN included, is never touched. State: what was staged last.

>>> whose = StagedUsers(capacity=3, device=torch.device("cpu"), is_mean=False)
>>> whose.stage(np.array([7, 4, 7]), None)
>>> whose.sums(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3))[0].flatten().tolist()
[2.0, 4.0, 0.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.participation import Mask
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
        self.units = torch.zeros(capacity, dtype=torch.int64, device="cpu")
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
        self._table.copy_(torch.from_numpy(table))
        self.units.fill_(min(self.count, self.capacity - 1))  # rows that do not count: of nobody
        rows = torch.from_numpy(table[: len(own)].astype(np.int64))
        self.units[rows] = torch.from_numpy(np.cumsum(is_first) - 1)
        self._last = table.tobytes()

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
        owner = torch.repeat_interleave(torch.arange(users, device="cpu"), many)
        rows = self._table[: len(owner)].long()
        out = matrix.new_zeros(users, width).index_add_(0, owner, matrix[rows])
        own = losses.new_zeros(users).index_add_(0, owner, losses[rows] * 0.0)
        return out / many.clamp_min(1)[:, None] if self._is_mean else out, own, present
