"""Fresh normals for single rows of a table: a function of (key, name, row, step), nothing else.

A step that touches a thousand rows out of ten million must not draw tiles of 1024 numbers for each
of them. So a row owns exactly the counter blocks it needs, each giving four random words:

    block of (row, i) = row·blocks + i,   i < blocks = ⌈count / 4⌉         counter = (step, block)

under the seed of "name⟨NUL⟩lazy", which no tensor of an eager stream has. Different (row, step)
have different counters by construction. The step takes the place that a row of Z has in a stream:
with a ring of keys it says under which of them the numbers of a touch are drawn (`source`). The
first two words of a block give radii, the others angles, together four normals (`gaussian`); which
rows are drawn together, in which order, and how many of their numbers, changes no bit.

>>> from noshuffle.noise.source import test_source
>>> draws = RowDraws(test_source(seed=1), name="table", count=6, rows=100, device="cpu")
>>> both, _ = draws.normals_and_coins(torch.tensor([7, 3]), step=5)
>>> one, _ = draws.normals_and_coins(torch.tensor([3]), step=5)
>>> both.shape, bool((both[1:] == one).all())
(torch.Size([2, 6]), True)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.grid import jitters_
from noshuffle.noise.native import normals_
from noshuffle.noise.philox import BLOCKS, FIELD, philox, split_seed
from noshuffle.noise.source import Source
from noshuffle.noise.words import aes_encryptor


class RowDraws:
    """Draws `count` standard normals for any rows of a table of `rows` rows.

    Coins are made for the first `coins` numbers of a row, or for all.

    Guarantees: no two (row, step) share a generator input, nor does any of them with a tensor of a
    `NoiseStream` under the same key; rows and steps beyond their counter fields are refused.
    """

    def __init__(
        self,
        source: Source,
        *,
        name: str,
        count: int,
        rows: int,
        device: torch.device | str,
        coins: int | None = None,
    ) -> None:
        if not name or "\0" in name:
            raise InvalidInput(f"name must be a string without NUL characters, got {name!r}")
        self._device = torch.device(device)
        self._source = source.on(self._device)
        self._seeds = [
            self._source.seed(f"{name}\0lazy", segment) for segment in range(self._source.segments)
        ]
        self._source.check_names([name, f"{name}\0lazy"])
        self._count, self._blocks = count, -(-count // 4)
        self._coins = count if coins is None else coins
        self._field = FIELD if self._source.kind == "philox" else 2**62
        if rows * self._blocks > self._field:
            raise InvalidInput(
                f"the {self._source.kind} generator numbers {self._field} blocks of a table, "
                f"{rows} rows need {rows * self._blocks}; use aes or split the table by name"
            )

    @property
    def source(self) -> Source:
        return self._source

    def seed(self, step: int) -> bytes:
        return self._seeds[self._source.segment(step)]

    @property
    def blocks(self) -> int:
        return self._blocks

    def normals_and_coins(
        self, rows: Tensor, *, step: int, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Float32 normals of shape (len(rows), count), or the `first` of them in each row.

        `rows` are row numbers of the whole table. With the coins between −½ and ½ that the words
        of the first of them have to spare (`grid`).
        """
        count = self._count if first is None else first
        if not 0 <= step < self._field or not 0 <= count <= self._count:
            raise InvalidInput(
                f"step must be from 0 to below {self._field} and first at most {self._count}, "
                f"got step {step} and first {count}"
            )
        per_row = -(-count // 4)
        used = len(rows) * per_row
        if not used:
            nothing = torch.empty((len(rows), count), dtype=torch.float32, device=self._device)
            return nothing, nothing
        index = torch.arange(per_row, dtype=torch.int64, device=rows.device)
        blocks = (rows.unsqueeze(1) * self._blocks + index).view(-1)
        tiles = -(-used // BLOCKS)
        words_fn = self._aes if self._source.kind == "aes" else self._philox
        words = words_fn(blocks, step, tiles * BLOCKS)
        tossed = min(count, self._coins)
        heads = words.view(-1, 4)[:used].view(len(rows), per_row, 4)[:, : -(-tossed // 4)]
        heads = heads.reshape(-1, 4)
        coins = torch.empty(heads.shape, dtype=torch.float32, device=words.device)
        jitters_(coins, words=heads, step=1.0)
        coins = coins.view(len(rows), -1)[:, :tossed]
        # Radii of all blocks into the first halves of tiles, angles into the second, and back; two
        # words at a time, as one long.
        longs = words.view(torch.int64).view(tiles, BLOCKS, 2)
        words = longs.transpose(1, 2).contiguous().view(torch.int32).view(tiles, TILE)
        found = torch.empty((tiles, TILE), dtype=torch.float32, device=words.device)
        normals_(found, words=words)
        longs = found.view(torch.int64).view(tiles, 2, BLOCKS)
        found = longs.transpose(1, 2).contiguous().view(torch.float32).view(-1)[: 4 * used]
        found = found.view(len(rows), 4 * per_row)[:, :count]
        return found.to(self._device), coins.to(self._device)

    def _aes(self, blocks: Tensor, step: int, size: int) -> Tensor:
        """Words of the blocks, then zeros, `size` blocks in all."""
        counters = np.empty((len(blocks), 2), dtype=">u8")
        counters[:, 0] = step
        counters[:, 1] = blocks.cpu().numpy()
        # Scattered counters cannot be run through CTR mode; encrypting the counter blocks one by
        # one is what CTR mode does, and no counter occurs twice.
        stream = bytearray(size * 16 + 15)
        aes_encryptor(self.seed(step), counts=False).update_into(counters.data.cast("B"), stream)
        return torch.from_numpy(np.frombuffer(stream, dtype="<i4", count=size * 4))

    def _philox(self, blocks: Tensor, step: int, size: int) -> Tensor:
        """Words of the blocks, then zeros, `size` blocks in all."""
        words4 = split_seed(self.seed(step))
        k0, k1, tag0, tag1 = (torch.tensor(w, device=blocks.device) for w in words4)
        row = torch.tensor(step, device=blocks.device)
        words = torch.zeros((size, 4), dtype=torch.int32, device=blocks.device)
        for lane, value in enumerate(philox((blocks, row, tag0, tag1), key=(k0, k1))):
            words[: len(blocks), lane] = value - ((value >> 31) << 32)
        return words
