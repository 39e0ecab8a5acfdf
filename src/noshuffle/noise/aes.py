"""AES-256 in counter mode: random words that nobody without the key can tell from noise.

The keystream of a tensor is AES-256 under a key derived from the secret and the name, applied to

    counter block (128 bits, big-endian) = row (64 bits) · block (64 bits)

so different rows, and different places of a row, are different counter values under one key, by
construction; different names have different 256-bit keys. 256 blocks of 16 bytes make a tile of
1024 words (little-endian). Standard: NIST SP 800-38A. With the AES instructions of any processor
of the last decade this is also the fastest generator on a CPU; it releases the interpreter lock.

State: one cipher context for each piece of each chunk, positioned anew for every row.

>>> counter_block(row=1, tile=2).hex()
'00000000000000010000000000000200'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise.constants import TILE
from noshuffle.noise.layout import Chunk

#: AES blocks in one tile of 1024 words.
BLOCKS = TILE * 4 // 16
_FIELD = 2**64


def counter_block(*, row: int, tile: int) -> bytes:
    """The initial counter of a tile; refuses what does not fit its field."""
    if not 0 <= row < _FIELD or not 0 <= tile < _FIELD // BLOCKS // 2:
        raise InvalidInput(f"row and tile must fit 64-bit fields, got row {row}, tile {tile}")
    return row.to_bytes(8, "big") + (tile * BLOCKS).to_bytes(8, "big")


def _context(key: bytes) -> Any:
    """An AES-256-CTR encryptor; the import is late because not every user draws from AES."""
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
        zeros = memoryview(bytes(max((c.tiles for c in chunks), default=0) * TILE * 4))
        # Per piece: cipher, second half of the counter, input of the right size, place of output.
        self._pieces = [
            [
                (
                    _context(seeds[p.name]),
                    counter_block(row=0, tile=p.tile)[8:],
                    zeros[: p.tiles * TILE * 4],
                    slice(p.at * TILE * 4, (p.at + p.tiles) * TILE * 4),
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
