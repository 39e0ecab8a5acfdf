"""Philox words for the tiles of a layout: what depends on the chunk only is built once.

    word of (name, row, tile, block) = Philox(counter = (tile·256 + block, row, tag), key)

with key and tag the 128 bits derived from the secret and the name (`philox`), as `aes.AesWords` has
a cipher for each name. State: per chunk a table of the first block, the key and the tag of each of
its tiles, on the device that draws.

>>> from noshuffle.noise.layout import Layout
>>> layout = Layout.of({"w": (TILE,)}, chunk_tiles=1)
>>> zeros = PhiloxWords(layout.chunks, seeds={"w": bytes(32)}, device=torch.device("cpu"))
>>> words = torch.empty(1, TILE, dtype=torch.int32)
>>> zeros.fill_(words, chunk=0, row=0)
>>> f"{int(words[0, 0]):08x}"                                   # the first word of Philox(0; 0)
'6627e8d5'
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from noshuffle.noise.constants import TILE  # noqa: F401  (the doctest uses it)
from noshuffle.noise.layout import Chunk
from noshuffle.noise.loops import philox_words_
from noshuffle.noise.philox import BLOCKS, address, split_seed


class PhiloxWords:
    """Fills chunks with words on a device.

    Guarantees: no two (row, tile) of a name share a counter; rows and tiles beyond the fields of
    the counter are refused.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *, seeds: dict[str, bytes], device: torch.device
    ) -> None:
        self._device = device
        self._chunks = [self._columns(chunk, seeds) for chunk in chunks]

    def _columns(self, chunk: Chunk, seeds: dict[str, bytes]) -> Tensor:
        """Per tile: first block, key and tag; a (5, tiles, 1) tensor."""
        columns: list[tuple[int, ...]] = []
        for piece in chunk.pieces:
            address(row=0, tile=piece.tile + piece.tiles - 1)
            words = split_seed(seeds[piece.name])
            columns += [((piece.tile + i) * BLOCKS, *words) for i in range(piece.tiles)]
        table = torch.tensor(columns, dtype=torch.int64, device=self._device)
        return table.t().contiguous().unsqueeze(-1)

    def fill_(self, words: Tensor, *, chunk: int, row: int) -> None:
        """Write the words of one row for the tiles of one chunk (tiles × 1024, int32)."""
        _, row = address(row=row, tile=0)
        philox_words_(words, columns=self._chunks[chunk], row=row)
