"""The matrix that a noise stream really applies, read off by feeding it unit draws.

    Z = identity   ⇒   row t that leaves the stream is row t of M = C⁻¹,   Σ = M·Mᵀ

The stream is the one of training (`NoiseStream`, with its buffers, redrawn rows, taps, restarts and
completion); only its source is another: coordinate e of draw r is one if e = r and zero otherwise.
How many draws there are is learned from the stream too, by a first pass that writes down which rows
it asks for. Nothing is read from the strategy but its recipe, which is what training runs.

Draws are scaled by 2²⁰, so that the grid on which the stream rounds (2⁻¹⁰ of the noise) leaves 30
bits; what is left of rounding is that of float32, about 10⁻⁷ of an entry.

>>> from noshuffle.strategies import tree
>>> emitted_rows(tree("plain").recipe(3), steps=3).round(3)
array([[ 1.,  0.,  0.,  0.],
       [-1.,  0.,  1.,  0.],
       [ 0.,  0.,  0.,  1.]])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import whole
from noshuffle.noise.stream import NoiseStream

Array = NDArray[np.float64]
#: Who was in the data, by fair coins.
Coins = NDArray[np.bool_]

#: One, as a draw: large beside the grid of a stream with scale one.
_ONE = 2.0**20
_TILE = 1024


class UnitDraws:
    """A source for `NoiseStream` whose draw r is the r-th unit vector; `rows` counts what was used.

    Not private in any way, and says so.
    """

    kind, is_test, fingerprint = "unit", True, "unit"
    ring = ((0, "unit"),)

    def __init__(self) -> None:
        self.rows = 0
        self._first: list[int] = []

    def on(self, device: torch.device) -> UnitDraws:
        return self

    def check_names(self, names: Iterable[str]) -> None:
        return None

    def drawer(self, chunks: Sequence[Any], *, device: torch.device) -> UnitDraws:
        self._first = [chunk.first for chunk in chunks]
        return self

    def draw_(self, out: Tensor, *, chunk: int, row: int, weight: float, accumulate: bool) -> None:
        """out (+)= weight·e_row, in the part of the row that this chunk holds."""
        if weight:
            self.rows = max(self.rows, row + 1)
        if not accumulate:
            out.zero_()
        at = row - self._first[chunk] * _TILE
        if 0 <= at < out.numel():
            out.view(-1)[at] += weight * _ONE

    def jitters_(self, out: Tensor, *, step: float) -> None:
        """No coins: the nearest point of the grid."""
        out.zero_()


def emitted_rows(recipe: Any, *, steps: int, horizon: int | None = None) -> Array:
    """M: what the first `steps` steps of a run of `horizon` steps add, per unit of each draw."""
    whole(steps=steps)
    draws, _ = _driven(recipe, steps, horizon or steps, width=1)
    return _driven(recipe, steps, horizon or steps, width=draws.rows)[1]


def _driven(recipe: Any, steps: int, horizon: int, *, width: int) -> tuple[UnitDraws, Array]:
    """One pass over the stream: the source afterwards, and `width` coordinates of its rows."""
    source, rows = UnitDraws(), np.empty((steps, width))
    stream = NoiseStream(recipe, source, {"unit": (width,)}, scale=1.0, steps=horizon)
    for step in range(steps):
        row = torch.zeros(width, dtype=torch.float64, device="cpu")
        stream.add_({"unit": row})
        rows[step] = row.numpy() / _ONE
    return source, rows
