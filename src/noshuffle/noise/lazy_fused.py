"""Lazy noise on a GPU: the touches of `lazy`, each by two kernels and hardly any waiting.

The law, the checks and the numbers are those of `LazyNoise`, bit for bit. The map of a row is
looked up on the device by the length of its sleep, so nothing has to come back to the host for it
(unless every step has a gain or a rate of its own, or a row slept longer than the table is).

State kept: that of `LazyNoise`, and the table of maps by length, up to 2^14 steps.

>>> from noshuffle.noise.source import test_source
>>> from noshuffle.strategies.recipe import Buffered
>>> noise = lazy_noise(Buffered((0.9,), (-0.3,)), test_source(seed=1), (8, 4), scale=1.0, steps=9,
...                    name="table", device="cpu")
>>> type(noise).__name__                               # on a GPU with Triton: FusedLazyNoise
'LazyNoise'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import Unsupported
from noshuffle.noise import lazy_kernels
from noshuffle.noise.fused import is_ready
from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.philox import split_seed
from noshuffle.noise.source import Source
from noshuffle.strategies.recipe import Recipe

#: Lengths whose maps lie on the device, and by how many the table grows.
MOST_LENGTHS, GROWTH = 2**14, 2**8
#: Elements of a program, and numbers of a flush that are worked on together.
SIZE, CHUNK = 256, 2**27


def lazy_noise(
    recipe: Recipe,
    source: Source,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> LazyNoise:
    """`LazyNoise` with these arguments, by kernels where they can run."""
    place = torch.device(device)
    is_fused = is_ready(place) and source.on(place).kind == "philox"
    kind = FusedLazyNoise if is_fused else LazyNoise
    return kind(recipe, source, shape, device=place, **settings)


class FusedLazyNoise(LazyNoise):
    """Lazy noise with kernels for its touches; build it with `lazy_noise`.

    Guarantees: those of `LazyNoise`, with the same bits for the same touches. The state of one is
    the state of the other.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if self._draws.source.kind != "philox":
            raise Unsupported(f"the kernels draw from philox, got {self._draws.source.kind}")
        self._words = torch.zeros(7, dtype=torch.int64, device=self._device)
        self._scale = torch.tensor([self.scale], dtype=torch.float64, device=self._device)
        d = self.buffers
        self._maps = torch.empty((0, d + 1, 2 * d + 1), dtype=torch.float64, device=self._device)

    def _advance_(self, rows: Tensor, done: Tensor, step: int, *, onto: Tensor) -> Tensor:
        d, width, count, out = self.buffers, self._width, len(rows), onto
        if not count:
            return out
        maps, which = self._maps_of(done, step + 1)
        columns = min(step + 1, d + 1)
        drawn, coined = -(-columns * width // 4), -(-width // 4)
        fresh = torch.empty((count, 4 * drawn), dtype=torch.float32, device=self._device)
        coins = torch.empty((count, 4 * coined), dtype=torch.float32, device=self._device)
        words = [*split_seed(self._draws.seed(step)), self._draws.blocks, drawn, step]
        self._words.copy_(torch.tensor(words, device="cpu"))
        kernels, blocks, elements = lazy_kernels, count * drawn, count * width
        is_cuda = self._device.type == "cuda" and torch.version.hip is None
        self._is_broken = True
        kernels.normals[(-(-blocks // SIZE),)](
            rows + self.start, self._words, fresh, coins, coined, blocks,
            SIZE=SIZE, ASSEMBLY=is_cuda, enable_fp_fusion=False,
        )  # fmt: skip
        kernels.advance[(-(-elements // SIZE),)](
            rows, which, maps, fresh, self._state, coins, out, self._scale,
            self._grid_at(step), width, 4 * drawn, 4 * coined, elements,
            D=d, COLUMNS=columns, SIZE=SIZE, enable_fp_fusion=False,
        )  # fmt: skip
        self._done.index_fill_(0, rows, step + 1)
        self._is_broken = False
        return out

    def _maps_of(self, done: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Maps on the device, and for each row which of them is its own."""
        if not self._skips.is_varied and stop <= MOST_LENGTHS:
            if len(self._maps) <= stop:
                self._grow(stop)
            return self._maps, stop - done.to(torch.int64)
        starts, which = torch.unique(done, return_inverse=True)
        found = self._skips.between(starts.cpu().numpy(), stop=stop)
        return torch.from_numpy(found).to(self._device), which

    def _grow(self, stop: int) -> None:
        """Have the maps of all lengths up to `stop`, and of some more to come."""
        known = len(self._maps)
        lengths = np.arange(known, max(stop + 1, known + GROWTH))
        most = int(lengths[-1])
        more = torch.from_numpy(self._skips.between(most - lengths, stop=most))
        self._maps = torch.cat([self._maps, more.to(self._device)])

    def _rows_at_once(self) -> int:
        return max(1, CHUNK // ((self.buffers + 2) * self._width))
