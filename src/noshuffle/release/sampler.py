"""Sampler: secret draws of the units of each step, made again from a key; and natural order.

    in_order(n, batch_size)   consecutive slices, the same every epoch; the remainder is left out
    PoissonSampler            every example joins by its own coin flip
    FixedSizeSampler          a uniform subset of a fixed size
    TruncatedSampler          coin flips, and a random part of batches that are too large
    CyclicSampler             coin flips among one of several groups that take turns
    BinsSampler               everybody at one secret position, the same in every epoch

Natural order is public and needs no randomness. The secret draws are what amplification rests on:
they come from the ChaCha20 stream of a 256-bit key, one nonce per step, so that step t can be drawn
again but not guessed; they are written nowhere. All samplers iterate over index arrays from `start`
on, as torch's `batch_sampler` does. State: the key, draws that were handed out for steps to come,
and secret positions once they are drawn.

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

from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.release.units import Ids

#: The key of a secret draw: one for all steps, or a function of the step (`keys.Keys.draw_key`).
SamplingKey = bytes | Callable[[int], bytes]
#: Draws that are remembered between their batch and its step: workers of a loader fetch ahead.
AHEAD = 32
#: Words that are drawn and compared at a time: they stay in the cache, and take no fresh memory.
_PIECE = 1 << 13
_ZEROS = bytes(8 * _PIECE)


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

    def _flipped(self, step: int, count: int, rate: float) -> Ids:
        """Those of units 0, 1, …, count − 1 whose coin falls on their side, in order.

        Coin i is word i < ⌊rate·2⁶⁴⌋, so its probability is the rate but for less than 2⁻⁶⁴.
        """
        if rate == 1:
            return np.arange(count)
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


class PoissonSampler(Sampler):
    """Every one of `population` examples by its own coin flip of probability `rate`.

    Guarantees: flips are independent across examples and steps; the probability is the planned
    rate rounded down to a multiple of 2⁻⁶⁴ (a rate of 1 takes everybody). A draw may be empty.
    """

    participation: Poisson

    def draw(self, step: int) -> Ids:
        return self._flipped(step, self.population, self.participation.rate)


class FixedSizeSampler(Sampler):
    """A uniform subset of `batch` out of `population`, without replacement.

    Guarantees: it holds the smallest of `population` independent 64-bit words, so every subset is
    equally likely up to ties, whose probability is below population²·2⁻⁶⁵.
    """

    participation: FixedSize

    def draw(self, step: int) -> Ids:
        order = np.argsort(self._words(step, self.population), kind="stable")
        return np.sort(order[: self.participation.batch]).astype(np.int64)


class TruncatedSampler(Sampler):
    """Coin flips; of more than `cap` units those with the smallest words stay.

    Guarantees: those of `PoissonSampler` before the cut. Words of drawn units are independent and
    uniform below the threshold, so every subset of `cap` of them is equally likely up to ties,
    whose probability is below population²·2⁻⁶⁵/rate.
    """

    participation: TruncatedPoisson

    def draw(self, step: int) -> Ids:
        part = self.participation
        drawn = self._flipped(step, self.population, part.rate)
        if len(drawn) > part.cap:
            words = self._words(step, self.population)[drawn]
            drawn = np.sort(drawn[np.argsort(words, kind="stable")[: part.cap]])
        return drawn


class CyclicSampler(Sampler):
    """Every example of the group whose turn it is by its own coin flip; example i is in group
    i mod groups.

    Guarantees: those of `PoissonSampler` within the group; no example of another group is drawn.
    """

    participation: CyclicPoisson

    def draw(self, step: int) -> Ids:
        groups = self.participation.groups
        first = step % groups
        many = len(range(first, self.population, groups))
        return first + groups * self._flipped(step, many, self.participation.rate)


class BinsSampler(Sampler):
    """Every example at its secret position, drawn once with the key of the first step.

    Guarantees: positions are independent and uniform up to 2⁻⁶⁴ a position. A batch may be empty.
    """

    participation: BallsInBins

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """As secret as the key (that of the first step)."""
        return _scaled(self._words(0, self.population), self.participation.steps_per_epoch)

    def draw(self, step: int) -> Ids:
        return np.flatnonzero(self.positions == step % self.participation.steps_per_epoch)


def _scaled(words: NDArray[np.uint64], choices: int) -> NDArray[np.int64]:
    """⌊word · choices / 2⁶⁴⌋."""
    high, low = words >> np.uint64(32), words & np.uint64(2**32 - 1)
    scaled = high * np.uint64(choices) + (low * np.uint64(choices) >> np.uint64(32))
    return (scaled >> np.uint64(32)).astype(np.int64)


_SAMPLERS: dict[type[Participation], type[Sampler]] = {
    FixedSize: FixedSizeSampler,
    TruncatedPoisson: TruncatedSampler,
    Poisson: PoissonSampler,
    BallsInBins: BinsSampler,
    CyclicPoisson: CyclicSampler,
}


def make_sampler(
    participation: Participation,
    *,
    key: SamplingKey,
    population: int | None = None,
) -> Sampler:
    """The sampler that a plan's participation asks for."""
    kind = next((k for k in _SAMPLERS if isinstance(participation, k)), None)
    if kind is None:
        raise Unsupported(
            f"{participation.kind} is not sampled: feed data in the order that the plan promises"
        )
    planned = getattr(participation, "population", population)
    if population not in (None, planned):
        raise InvalidInput(f"the plan samples from {planned} examples, got {population}")
    groups = getattr(participation, "groups", 0)
    if planned is None or (groups and planned < groups):
        least = f", at least one a group ({groups})" if groups else ""
        raise InvalidInput(
            f"secret draws need the number of examples{least}, got {population}; give population="
        )
    return _SAMPLERS[kind](participation, planned, key)
