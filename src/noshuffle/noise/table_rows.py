"""Rows of a table: what may be named as such, and adding to them.

    table[rows] += change        for distinct rows of a table of shape (rows, …)

`lazy` and `sparse_sgd` are handed tables, row numbers and gradients by their caller; what cannot be
meant is refused before any noise is drawn for it. No state.

>>> table, rows = torch.zeros(4, 2), torch.tensor([3, 0])
>>> add_rows_(table, checked_rows(rows, count=4), torch.ones(2, 2))
>>> table[:, 0]
tensor([1., 0., 0., 1.])
>>> checked_rows(torch.tensor([3, 3]), count=4)
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: rows must be named once; sum the gradients of equal rows first
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import InvalidInput


def checked_rows(rows: Tensor, *, count: int) -> Tensor:
    """The rows, if they are distinct rows of a table of `count` rows; one wait for a device."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise InvalidInput("rows must be a one-dimensional tensor of int64 row numbers")
    if len(rows):
        if rows.device.type == "cpu":  # sorts a thousand rows in a tenth of torch's time
            own = np.sort(rows.numpy())
            low, high, twice = int(own[0]), int(own[-1]), bool((own[1:] == own[:-1]).any())
        else:
            ordered = rows.sort().values
            is_twice = (ordered[1:] == ordered[:-1]).any().to(torch.int64)
            low, high, twice = torch.stack([ordered[0], ordered[-1], is_twice]).tolist()
        if low < 0 or high >= count:
            raise InvalidInput(f"rows must be from 0 to {count - 1}, got {low} to {high}")
        if twice:
            raise InvalidInput("rows must be named once; sum the gradients of equal rows first")
    return rows


def check_shape(shape: Sequence[int], **named: Tensor) -> None:
    """Refuse tensors that are not floating point of this shape."""
    for name, value in named.items():
        if tuple(value.shape) != tuple(shape) or not value.is_floating_point():
            raise InvalidInput(
                f"{name} must be floating point of shape {tuple(shape)}, got {value.dtype} of "
                f"{tuple(value.shape)}"
            )


def add_rows_(table: Tensor, rows: Tensor, change: Tensor) -> None:
    """table[rows] += change for distinct rows; low precision is raised and rounded once."""
    new = table.index_select(0, rows).to(change.dtype).add_(change)
    table.index_copy_(0, rows, new.to(table.dtype))
