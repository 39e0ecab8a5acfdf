"""Random words for the tiles of a layout: AES-256 in counter mode, or Philox; 1024 words a tile.

    aes      block of 16 bytes = AES(key of the name, row (64 bits) · block (64 bits), big-endian)
    philox   four words = Philox(counter = (block, row, tag), key); key and tag of the name

so different rows, and different places of a row, are different counters under one key, by
construction. AES (NIST SP 800-38A, words little-endian) is a cipher, and with the instructions of
today's processors the fastest generator on a CPU; it releases the interpreter lock. Philox
(`philox`) is the fastest on a GPU. State: what depends on the chunk only, built once.

>>> counter_block(row=1, tile=2).hex()
'00000000000000010000000000000200'
>>> from noshuffle.noise.layout import Layout
>>> layout = Layout.of({"w": (TILE,)}, chunk_tiles=1)
>>> zeros = PhiloxWords(layout.chunks, seeds={"w": bytes(32)}, device=torch.device("cpu"))
>>> words = torch.empty(1, TILE, dtype=torch.int32)
>>> zeros.fill_(words, chunk=0, row=0)
>>> f"{int(words[0, 0]):08x}"                                   # the first word of Philox(0; 0)
'6627e8d5'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import philox
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.layout import Chunk

#: AES blocks in one tile of 1024 words.
AES_BLOCKS = TILE * 4 // 16
_FIELD = 2**64


def counter_block(*, row: int, tile: int) -> bytes:
    """The initial AES counter of a tile; refuses what does not fit its field."""
    if not 0 <= row < _FIELD or not 0 <= tile < _FIELD // AES_BLOCKS // 2:
        raise InvalidInput(f"row and tile must fit 64-bit fields, got row {row}, tile {tile}")
    return row.to_bytes(8, "big") + (tile * AES_BLOCKS).to_bytes(8, "big")


def aes_encryptor(key: bytes) -> Any:
    """AES-256 in counter mode; not every user draws from AES."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:  # pragma: no cover - a declared dependency
        raise Unsupported("the aes generator needs the cryptography package; install it") from error
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


class AesWords:
    """Fills chunks with AES keystream, in ordinary memory; copied over for other devices."""

    def __init__(self, chunks: Sequence[Chunk], *, seeds: dict[str, bytes]) -> None:
        if sys.byteorder != "little":  # pragma: no cover
            raise Unsupported("the aes generator reads words in little-endian order")
        size = TILE * 4
        zeros = memoryview(bytes(max((c.tiles for c in chunks), default=0) * size))
        # Per piece: cipher, second half of the counter, input of the right size, place of output.
        self._pieces = [
            [
                (
                    aes_encryptor(seeds[p.name]),
                    counter_block(row=0, tile=p.tile)[8:],
                    zeros[: p.tiles * size],
                    slice(p.at * size, (p.at + p.tiles) * size),
                )
                for p in chunk.pieces
            ]
            for chunk in chunks
        ]

    def fill_(self, words: Tensor, *, chunk: int, row: int) -> None:
        """Write the words of one row for the tiles of one chunk (tiles × 1024, int32)."""
        target = words if words.device.type == "cpu" else words.new_empty(words.shape, device="cpu")
        view = target.numpy().data.cast("B")
        head = counter_block(row=row, tile=0)[:8]
        for context, tail, zeros, place in self._pieces[chunk]:
            context.reset_nonce(head + tail)
            context.update_into(zeros, view[place])
        if target is not words:
            words.copy_(target)


class PhiloxWords:
    """Fills chunks with words on a device.

    Guarantees: no two (row, tile) of a name share a counter; rows and tiles beyond the fields of
    the counter are refused.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *, seeds: dict[str, bytes], device: torch.device
    ) -> None:
        self._chunks = [_columns(chunk, seeds).to(device) for chunk in chunks]

    def fill_(self, words: Tensor, *, chunk: int, row: int) -> None:
        """Write the words of one row for the tiles of one chunk (tiles × 1024, int32)."""
        _, row = philox.address(row=row, tile=0)
        philox.fill_words_(words, columns=self._chunks[chunk], row=row)


def _columns(chunk: Chunk, seeds: dict[str, bytes]) -> Tensor:
    """Per tile: first block, key and tag; a (5, tiles, 1) tensor."""
    columns: list[tuple[int, ...]] = []
    for piece in chunk.pieces:
        philox.address(row=0, tile=piece.tile + piece.tiles - 1)
        words = philox.split_seed(seeds[piece.name])
        columns += [((piece.tile + i) * philox.BLOCKS, *words) for i in range(piece.tiles)]
    table = torch.tensor(columns, dtype=torch.int64, device="cpu")
    return table.t().contiguous().unsqueeze(-1)
