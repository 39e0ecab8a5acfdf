"""Sampler: secret draws of the units of each step, made again from a key; and natural order.

    in_order(n, batch_size)   consecutive slices, the same every epoch; the remainder is left out
    Sampler                   what all secret draws share; the kinds of them: `sampler_kinds`

Natural order is public and needs no randomness. The secret draws are what amplification rests on:
they come from the ChaCha20 stream of a 256-bit key from the operating system, one nonce per step,
so that step t can be drawn again (after a crash, by the guard, by `verify`) but not guessed. All
samplers iterate over index arrays from `start` on, as torch's `batch_sampler` does. A draw takes
time in proportion to the data, or to the batch where that is a small part of it (`sparse_draws`).
State: the key, and draws that were handed out for steps to come.

>>> [batch.tolist() for batch in in_order(7, 3)]
[[0, 1, 2], [3, 4, 5]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, whole
from noshuffle.participation import Participation
from noshuffle.release.sparse_draws import Words, drawn_count, drawn_subset
from noshuffle.release.unit_ids import Ids

#: The key of a secret draw: one for all steps, or a function of the step (`keys.KeyRing`).
SamplingKey = bytes | Callable[[int], bytes]
#: The fact in a ledger whose run has samplers `by_count`: its name and value.
DRAWS = ("draws", "by count")
#: Draws that are remembered between their batch and its step: workers of a loader fetch ahead.
AHEAD = 32
#: Words that are drawn and compared at a time: they stay in the cache, and take no fresh memory.
_PIECE = 1 << 13
_ZEROS = bytes(8 * _PIECE)
#: Units below which coins are drawn for all, and the rate above which they are: 1/_RARE.
_COINS, _RARE = 1 << 13, 32


def in_order(population: int, batch_size: int) -> list[NDArray[np.int64]]:
    """Index arrays of one epoch in natural order; the last, incomplete batch is left out."""
    whole(population=population, batch_size=batch_size)
    if batch_size > population:
        raise InvalidInput(
            f"batch_size must be at most the number of examples ({population}), got {batch_size}"
        )
    count = population // batch_size
    return [np.arange(i * batch_size, (i + 1) * batch_size) for i in range(count)]


@dataclass
class Sampler:
    """Secret draws, reproducible from the key and the step."""

    participation: Participation
    population: int
    key: SamplingKey = field(repr=False)
    start: int = 0
    #: Whether few of many are drawn by their count (`sparse_draws`). Runs that were begun before
    #: there was such a thing draw a word for every unit to their end: their ledgers do not name it.
    by_count: bool = True

    def __post_init__(self) -> None:
        whole(population=self.population)

    @property
    def steps(self) -> int:
        """The planned number of draws."""
        return self.participation.steps

    def draw(self, step: int) -> Ids:
        """The units of this step, in increasing order."""
        raise NotImplementedError

    def hand_out(self, step: int) -> Ids:
        """The units of this step for a training loop, remembered for the guard: one draw a step."""
        drawn = self.draw(step)
        while len(self._handed) >= AHEAD:
            self._handed.pop(next(iter(self._handed)))
        self._handed[step] = self._key(step), drawn
        return drawn.copy()  # a loop may shuffle its own

    def handed_out(self, step: int) -> Ids:
        """What was handed out for this step under the same key, or drawn again: for the guard."""
        key, drawn = self._handed.get(step, (b"", None))
        return self.draw(step) if drawn is None or key != self._key(step) else drawn

    @cached_property
    def _handed(self) -> dict[int, tuple[bytes, Ids]]:
        return {}

    def _key(self, step: int) -> bytes:
        return self.key if isinstance(self.key, bytes) else self.key(step)

    def _cipher(self, step: int) -> Any:
        """The step's own ChaCha20 stream (nonce: the step): a random word a unit."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # only to sample

        nonce = bytes(8) + step.to_bytes(8, "little")
        return Cipher(algorithms.ChaCha20(self._key(step), nonce), mode=None).encryptor()

    def _words(self, step: int, count: int) -> NDArray[np.uint64]:
        """The words of so many units."""
        cipher = self._cipher(step)
        return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8")

    def _stream(self, step: int) -> Words:
        """The words of a step, as many as are asked for, one after the other."""
        cipher = self._cipher(step)
        return lambda many: np.frombuffer(cipher.update(bytes(8 * many)), dtype="<u8")

    def _is_sparse(self, count: int, rate: float) -> bool:
        """Whether so few of so many units are drawn that coins for all of them would take longer.

        A part of the definition of draws: another answer is another batch.
        """
        return self.by_count and count > _COINS and rate <= 1 / _RARE

    def _flipped(self, step: int, count: int, rate: float) -> Ids:
        """Those of units 0, 1, …, count − 1 whose coin falls on their side, in order.

        Coin i is word i < ⌊rate·2⁶⁴⌋, so its probability is the rate but for less than 2⁻⁶⁴. Few of
        many are drawn by their count instead.
        """
        if rate == 1:
            return np.arange(count)
        if self._is_sparse(count, rate):
            stream = self._stream(step)
            return drawn_subset(count, drawn_count(count, rate, stream), stream)
        cipher, below = self._cipher(step), np.uint64(int(rate * 2**64))
        words, found = np.empty(min(count, _PIECE), dtype="<u8"), []
        for first in range(0, count, _PIECE):
            many = min(count - first, _PIECE)
            cipher.update_into(memoryview(_ZEROS)[: 8 * many], words[:many].view(np.uint8))
            found.append(np.flatnonzero(words[:many] < below) + first)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def __iter__(self) -> Iterator[Ids]:
        return (self.hand_out(step) for step in range(self.start, self.steps))

    def __len__(self) -> int:
        return self.steps - self.start
