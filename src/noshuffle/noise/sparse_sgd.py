"""Plain SGD on one sparse table with lazy noise: a step works on the rows of its batch only.

    w ← w − lr·rate_t·(Σ clipped g + y_t) / divisor

with the noise of skipped steps made up for when a row is read; `lazy` says why that has the law of
eager noise, and what it asks of the caller. State: that of the noise.

>>> from noshuffle.noise.source import test_source
>>> from noshuffle.strategies.recipe import Buffered
>>> noise = LazyNoise(Buffered((0.9,), (-0.3,)), test_source(seed=1), (8, 4), scale=1.0, steps=9,
...                   name="table")
>>> sgd = SparseSGD(noise=noise, lr=0.1, divisor=2)
>>> table, rows = torch.zeros(8, 4), torch.tensor([5])
>>> sgd.read_(table, rows, 3)                               # the forward pass may read row 5 now
>>> sgd.apply_(table, rows, torch.ones(1, 4), 3)
>>> sgd.release_(table, 3)                                  # and now everybody may read all rows
>>> int((table != 0).any(dim=1).sum())
8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noshuffle.errors import positive, whole
from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.table_rows import add_rows_


@dataclass(frozen=True, kw_only=True)
class SparseSGD:
    """Plain SGD on one table with lazy noise: w ← w − lr·rate_t·(Σ clipped g + y_t) / divisor.

    The learning rate is part of the record, and a schedule is `rates` of the noise, because the
    noise of skipped steps must be weighed by their own rates. `divisor` is the planned batch size.
    One step is `read_` (before the forward pass), then `apply_`; `release_` before anyone sees the
    table. With `is_stale`, `apply_` also takes rows that were not read: private, but not the law of
    eager training, since the gradients were taken at a value without the skipped noise.

    Guarantees: the gradient rows must already be clipped and summed, scale = z·clip norm in the
    noise. Each row of `rows` gets its noise whatever the gradient is; NaN stays NaN.
    """

    noise: LazyNoise
    lr: float
    divisor: float
    is_stale: bool = False

    def __post_init__(self) -> None:
        positive(lr=self.lr, divisor=self.divisor)

    @torch.no_grad()
    def read_(self, table: Tensor, rows: Tensor, step: int) -> None:
        """Bring rows up to date with step − 1, so that step `step` reads what eager SGD would."""
        self.noise.check_table(table)
        whole(at_least=0, step=step)
        behind, noise = self.noise.catch_up_(rows, step - 1)
        if len(behind):
            with self.noise.to_the_end():
                add_rows_(table, behind, noise.mul_(-self.lr / self.divisor))

    @torch.no_grad()
    def apply_(self, table: Tensor, rows: Tensor, gradients: Tensor, step: int) -> None:
        """Update rows with their clipped gradient sums of this step, and with their noise."""
        self.noise.check_table(table)
        rows = rows.to(table.device)
        self.noise.check_gradients(gradients, rows=len(rows))
        noisy = self.noise.touch_(rows, step, onto=gradients, is_read=not self.is_stale)
        with self.noise.to_the_end():
            add_rows_(table, rows, noisy.mul_(-self.lr / self.divisor))

    @torch.no_grad()
    def release_(self, table: Tensor, step: int) -> None:
        """Bring the whole table up to date with `step`; only then may it be shown."""
        self.noise.flush_(step, out=table, factor=-self.lr / self.divisor)
