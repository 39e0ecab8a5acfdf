"""Sampler: secret draws of the units of each step, made again from a key; and natural order.

    in_order(n, batch_size)   consecutive slices, the same every epoch; the remainder is left out
    Sampler                   the secret draws of a sampled participation:
        Poisson               every example joins by its own coin flip
        FixedSize             a uniform subset of a fixed size
        TruncatedPoisson      coin flips, and a random part of batches that are too large
        CyclicPoisson         coin flips among one of several groups that take turns
        BallsInBins           everybody at one secret position, the same in every epoch

Natural order is public and needs no randomness. The secret draws are what amplification rests on:
they come from the ChaCha20 stream of a 256-bit key, one nonce per step, so that step t can be drawn
again but not guessed; they are written nowhere. A sampler iterates over index arrays from `start`
on, as torch's `batch_sampler` does. State: the key, and the last draws.

>>> [batch.tolist() for batch in in_order(7, 3)]
[[0, 1, 2], [3, 4, 5]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
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

#: The key of the secret draw of a step (`keys.Keys.draw_key`).
KeyFn = Callable[[int], bytes]
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


class Sampler:
    """The secret draws of a run, each a function of its key and step.

    Guarantees (every random word is 64 independent uniform bits):

        Poisson            flips are independent across examples and steps; the probability is the
                           planned rate rounded down to a multiple of 2⁻⁶⁴ (a rate of 1 takes
                           everybody). A draw may be empty.
        FixedSize          the smallest of `population` words, so every subset is equally likely up
                           to ties, whose probability is below population²·2⁻⁶⁵.
        TruncatedPoisson   Poisson before the cut. Words of drawn units are uniform below the
                           threshold, so every subset of `cap` of them is equally likely up to ties,
                           whose probability is below population²·2⁻⁶⁵/rate.
        CyclicPoisson      Poisson within the group whose turn it is (example i is in group i mod
                           groups); no example of another group is drawn.
        BallsInBins        positions are drawn with the key of the first step, independent and
                           uniform up to 2⁻⁶⁴ a position. A draw may be empty.
    """

    def __init__(
        self, participation: Participation, *, key_fn: KeyFn, population: int | None = None
    ) -> None:
        if not isinstance(participation, tuple(_DRAWS)):
            raise Unsupported(
                f"{participation.kind} is not sampled: feed data in the order that the plan "
                "promises"
            )
        planned = getattr(participation, "population", population)
        if population not in (None, planned):
            raise InvalidInput(f"the plan samples from {planned} examples, got {population}")
        groups = getattr(participation, "groups", 0)
        if planned is None or (groups and planned < groups):
            least = f", at least one a group ({groups})" if groups else ""
            raise InvalidInput(
                f"secret draws need the number of examples{least}, got {population}; give "
                "population="
            )
        whole(population=planned)
        self.participation, self.population, self.start = participation, planned, 0
        self._key_fn = key_fn
        self._draw_fn = next(fn for kind, fn in _DRAWS.items() if isinstance(participation, kind))
        self._drawn = lru_cache(AHEAD)(lambda step, key: self._draw_fn(self, step))

    @property
    def steps(self) -> int:
        """The planned number of draws."""
        return self.participation.steps

    def draw(self, step: int) -> Ids:
        """The units of this step, in increasing order; a copy, as a loop may shuffle its own."""
        drawn: Ids = self._drawn(step, self._key_fn(step))
        return drawn.copy()

    def __iter__(self) -> Iterator[Ids]:
        return (self.draw(step) for step in range(self.start, self.steps))

    def __len__(self) -> int:
        return self.steps - self.start

    # -- words ---------------------------------------------------------------------------------

    def _cipher(self, step: int) -> Any:
        """The step's own ChaCha20 stream (nonce: the step): a random word a unit."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # only to sample

        nonce = bytes(8) + step.to_bytes(8, "little")
        return Cipher(algorithms.ChaCha20(self._key_fn(step), nonce), mode=None).encryptor()

    def words(self, step: int) -> NDArray[np.uint64]:
        """One for each unit."""
        data = self._cipher(step).update(bytes(8 * self.population))
        return np.frombuffer(data, dtype="<u8")

    def flips(self, step: int, count: int, rate: float) -> Ids:
        """Those of units 0, 1, …, count − 1 whose coin falls on their side, in order.

        Coin i is word i < ⌊rate·2⁶⁴⌋, so its probability is the rate but for less than 2⁻⁶⁴.
        """
        if rate == 1:
            return np.arange(count)
        cipher, below = self._cipher(step), np.uint64(int(rate * 2**64))
        words, drawn = np.empty(min(count, _PIECE), dtype="<u8"), []
        for first in range(0, count, _PIECE):
            many = min(count - first, _PIECE)
            cipher.update_into(memoryview(_ZEROS)[: 8 * many], words[:many].view(np.uint8))
            drawn.append(np.flatnonzero(words[:many] < below) + first)
        return drawn[0] if len(drawn) == 1 else np.concatenate(drawn)


def _poisson(sampler: Sampler, step: int) -> Ids:
    assert isinstance(sampler.participation, Poisson | TruncatedPoisson)
    return sampler.flips(step, sampler.population, sampler.participation.rate)


def _fixed_size(sampler: Sampler, step: int) -> Ids:
    assert isinstance(sampler.participation, FixedSize)
    order = np.argsort(sampler.words(step), kind="stable")
    return np.sort(order[: sampler.participation.batch]).astype(np.int64)


def _truncated(sampler: Sampler, step: int) -> Ids:
    assert isinstance(sampler.participation, TruncatedPoisson)
    drawn, cap = _poisson(sampler, step), sampler.participation.cap
    if len(drawn) > cap:  # those with the smallest words stay
        order = np.argsort(sampler.words(step)[drawn], kind="stable")
        drawn = np.sort(drawn[order[:cap]])
    return drawn


def _cyclic(sampler: Sampler, step: int) -> Ids:
    assert isinstance(sampler.participation, CyclicPoisson)
    groups = sampler.participation.groups
    first = step % groups
    many = len(range(first, sampler.population, groups))
    return first + groups * sampler.flips(step, many, sampler.participation.rate)


def _in_bins(sampler: Sampler, step: int) -> Ids:
    assert isinstance(sampler.participation, BallsInBins)
    bins = sampler.participation.steps_per_epoch
    return np.flatnonzero(_scaled(sampler.words(0), bins) == step % bins)


def _scaled(words: NDArray[np.uint64], choices: int) -> NDArray[np.int64]:
    """⌊word · choices / 2⁶⁴⌋."""
    high, low = words >> np.uint64(32), words & np.uint64(2**32 - 1)
    scaled = high * np.uint64(choices) + (low * np.uint64(choices) >> np.uint64(32))
    return (scaled >> np.uint64(32)).astype(np.int64)


_DRAWS: dict[type[Participation], Callable[[Sampler, int], Ids]] = {
    FixedSize: _fixed_size,
    TruncatedPoisson: _truncated,
    Poisson: _poisson,
    BallsInBins: _in_bins,
    CyclicPoisson: _cyclic,
}
