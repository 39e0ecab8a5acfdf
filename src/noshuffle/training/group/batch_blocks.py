"""A batch cut into blocks of units, so that its sum does not depend on who computes which.

    rows           `block` consecutive examples, or all rows of `block` users
    fingerprint    of the rows of a block and of their ids
    block_rng      random numbers (dropout) seeded by the place of the block in its step

All three are the same whichever rank of a team a block falls to, and in a replay. No state.

>>> [rows.tolist() for rows in blocks_of(5, None, block=2)]
[[0, 1], [2, 3], [4]]
>>> [rows.tolist() for rows in blocks_of(5, np.array([7, 3, 7, 9, 3]), block=2)]
[[0, 1, 2, 4], [3]]
"""

from __future__ import annotations

import hashlib
import itertools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from noshuffle.clipping.layers import tensors
from noshuffle.clipping.objective import take
from noshuffle.release import digest, fingerprint
from noshuffle.release.unit_ids import Ids
from noshuffle.training.generators import seeded


def blocks_of(size: int, users: Ids | None, *, block: int) -> list[Ids]:
    """The rows of every block: `block` consecutive examples, or all rows of `block` users."""
    place = np.arange(size)
    if users is not None:
        _, first, inverse = np.unique(users, return_index=True, return_inverse=True)
        order = np.empty(len(first), dtype=np.int64)
        order[np.argsort(first)] = np.arange(len(first))  # users in order of appearance
        place = order[inverse]
    of = place // block
    return [np.flatnonzero(of == b) for b in range(int(of.max()) + 1 if size else 0)]


def rows_of(batch: tuple[Any, ...], rows: Ids) -> tuple[Any, ...]:
    """Some rows of a batch; consecutive ones are not copied."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):  # they are in order, each once
        return take(batch, slice(int(rows[0]), int(rows[-1]) + 1))
    return take(batch, torch.from_numpy(rows))


def block_prints(
    batch: tuple[Any, ...], blocks: list[Ids], ids: Ids | None, *, secret: bytes
) -> list[bytes]:
    """Fingerprints of the blocks; a device is waited for once."""
    parts = [rows_of(batch, rows) for rows in blocks]
    digests: Any = itertools.repeat(None)
    held = [tensors(part) for part in parts]
    if all(t.is_cuda for own in held for t in own):
        every = iter(digest.of_tensors(list(itertools.chain(*held)), secret))
        digests = [[next(every) for _ in own] for own in held]
    return [
        fingerprint.of_batch(part, None if ids is None else ids[rows], secret=secret, digests=known)
        for part, rows, known in zip(parts, blocks, digests)
    ]


def block_rng(place: str, *, key: bytes, device: torch.device) -> AbstractContextManager[None]:
    """Random numbers of the block at a place: the same whoever computes it, and in a replay."""
    word = hashlib.blake2b(place.encode(), key=key, digest_size=7).digest()
    return seeded(int.from_bytes(word, "little"), device)
