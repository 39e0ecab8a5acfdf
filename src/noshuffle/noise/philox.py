"""Philox4x32-10: four random words from a counter and a key, in plain torch operations.

One round maps (x0, x1, x2, x3) under the round key (k0, k1) to

    (hi(M1·x2) ^ x1 ^ k0,  lo(M1·x2),  hi(M0·x0) ^ x3 ^ k1,  lo(M0·x0))

and the key grows by (W0, W1) between rounds (Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Ten rounds. Words live in int64 tensors with values below
2³², because torch has no unsigned multiply; the same code runs on any device and gives the same
bits there. Philox is fast on a GPU and statistically strong, but not a cipher.

Counter and key of block c (256 of them make a tile) of row r of the tensor called `name`:

    counter = (c, r, tag_lo, tag_hi),  key = (key_lo, key_hi)

with the 128 bits of key and tag derived from the secret and the name. Row and block have 32 bits
of their own each, so two streams of one name can never meet; two names meet only if all their 128
bits agree, which `Source.check_names` rules out for the names in use.

>>> zero = torch.zeros(1, dtype=torch.int64)
>>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), key=(zero, zero))]
['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
"""

from __future__ import annotations

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.gaussian import TILE

#: Blocks (counters) in one tile; each gives four words.
BLOCKS = TILE // 4
#: Rows, and blocks of one stream, that the counter has room for.
FIELD = 2**32

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words4, *, key: tuple[Tensor, Tensor]) -> Words4:
    """Philox4x32 of int64 tensors that hold 32-bit words and broadcast together."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product may wrap past 2⁶³; its 64 bits are right, and the masks drop the sign.
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x2 = ((p1 >> 32) ^ x1 ^ k0) & _MASK, ((p0 >> 32) ^ x3 ^ k1) & _MASK
        x1, x3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return x0, x1, x2, x3


def address(*, row: int, tile: int) -> tuple[int, int]:
    """First counter words (block, row) of a tile; refuses what does not fit its field."""
    if not 0 <= row < FIELD:
        raise InvalidInput(f"row must be below 2^32 for the philox generator, got {row}; use aes")
    if not 0 <= tile < FIELD // BLOCKS:
        raise InvalidInput(
            f"the philox generator numbers at most 2^34 elements of a tensor, got tile {tile}; "
            "use aes or split the tensor"
        )
    return tile * BLOCKS, row


def split_seed(seed: bytes) -> tuple[int, int, int, int]:
    """(key_lo, key_hi, tag_lo, tag_hi) from the first 128 bits of a derived seed."""
    words = [int.from_bytes(seed[i : i + 4], "little") for i in range(0, 16, 4)]
    return words[0], words[1], words[2], words[3]


def fill_words_(words: Tensor, *, columns: Tensor, row: int) -> None:
    """Fill tiles with words; `columns` is (5, tiles, 1): first block, key and tag of each tile."""
    first, k0, k1, tag0, tag1 = columns
    block = first + torch.arange(BLOCKS, dtype=torch.int64, device=words.device)
    counter = (block, torch.full_like(block[:1, :1], row), tag0, tag1)
    lanes = words.view(-1, 4, BLOCKS)
    for lane, value in enumerate(philox(counter, key=(k0, k1))):
        # Values of 2³¹ and above become the negative number with the same bits.
        lanes[:, lane].copy_(value - ((value >> 31) << 32))
