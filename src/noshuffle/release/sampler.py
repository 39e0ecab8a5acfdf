"""Which examples go into which step: natural order, or a secret draw.

    in_order(n, batch_size)   consecutive slices, the same every epoch; the remainder is left out
    PoissonSampler            every example joins by its own coin flip
    FixedSizeSampler          a uniform subset of a fixed size
    BinsSampler               everybody at one secret position, the same in every epoch
    CyclicSampler             coin flips among one of several groups that take turns
    TruncatedSampler          coin flips, and a random part of batches that are too large
    SeparatedSampler          everybody at a fresh secret position in every epoch of its own
    StagedSampler             one of them after another, each with words of its own

Natural order is public and needs no randomness. The secret draws are what amplification rests on:
they come from the ChaCha20 stream of a 256-bit key from the operating system, one nonce per step,
so that step t can be drawn again (after a crash, by the guard, by `verify`) but not guessed. All
samplers iterate over index arrays from `start` on, as torch's `batch_sampler` does. A draw takes
time in proportion to the data, or to the batch where that is a small part of it (`sparse_draws`).

>>> [batch.tolist() for batch in in_order(7, 3)]
[[0, 1, 2], [3, 4, 5]]
>>> sampler = make_sampler(FixedSize(steps=4, batch=3, population=10), key=b"k" * 32)
>>> len(sampler.draw(2)), np.array_equal(sampler.draw(2), sampler.draw(2))
(3, True)
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
    DrawnStages,
    FixedSize,
    Participation,
    Poisson,
    SeparatedBins,
    TruncatedPoisson,
    stages_of,
)
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
    #: Of a stage: its number and its first step in the run, by which words and keys are its own.
    stage: int = 0
    begins: int = 0
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
        return self.key if isinstance(self.key, bytes) else self.key(self.begins + step)

    def _cipher(self, step: int, *, key_of: int | None = None) -> Any:
        """The step's own ChaCha20 stream (nonce: stage and step): a random word a unit."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # only to sample

        key = self._key(step if key_of is None else key_of)
        nonce = bytes(8) + ((self.stage << 48) + step).to_bytes(8, "little")
        return Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

    def _words(self, step: int, count: int, *, key_of: int | None = None) -> NDArray[np.uint64]:
        """The words of so many units."""
        cipher = self._cipher(step, key_of=key_of)
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


class PoissonSampler(Sampler):
    """Every one of `population` examples by its own coin flip of probability `rate`.

    Guarantees: flips are independent across examples and steps; the probability is the planned
    rate rounded down to a multiple of 2⁻⁶⁴ (a rate of 1 takes everybody). A draw may be empty. Of
    more than 8,192 examples at a rate of at most 1/32 a binomial number is drawn, and a uniform
    subset of that size: the same distribution, up to a total variation of 2⁻⁹⁶.
    """

    participation: Poisson

    def draw(self, step: int) -> Ids:
        return self._flipped(step, self.population, self.participation.rate)


class FixedSizeSampler(Sampler):
    """A uniform subset of `batch` out of `population`, without replacement.

    Guarantees: every subset is equally likely (`sparse_draws.drawn_subset`). In runs without
    `by_count` it holds the smallest of `population` independent 64-bit words, and that is so up to
    ties, whose probability is below population²·2⁻⁶⁵.
    """

    participation: FixedSize

    def draw(self, step: int) -> Ids:
        if self.by_count:
            return drawn_subset(self.population, self.participation.batch, self._stream(step))
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
        if self._is_sparse(self.population, part.rate):  # a part of a uniform subset is one
            stream = self._stream(step)
            count = drawn_count(self.population, part.rate, stream)
            return drawn_subset(self.population, min(count, part.cap), stream)
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


class SeparatedSampler(Sampler):
    """Every example at a secret position of the epoch of its own that covers the step.

    Guarantees: positions are independent over examples and epochs, uniform up to 2⁻⁶⁴ a position,
    any two of one example at least `separation` steps apart. The epochs that begin in one stretch
    of steps_per_epoch steps are drawn together, by one nonce, with the key of the run's first step.
    """

    participation: SeparatedBins

    def draw(self, step: int) -> Ids:
        b = self.participation.steps_per_epoch
        stretch, place = divmod(step, b)
        phase = np.arange(self.population, dtype=np.int64) % b
        # Whose own epoch began in this stretch, and whose in the one before (which has nonce 0
        # before the run): where it is now.
        own = np.where(phase <= place, self._stretch(stretch + 1), self._stretch(stretch))
        return np.flatnonzero((place - phase) % b == own)

    def _stretch(self, nonce: int) -> NDArray[np.int64]:
        if nonce not in self._cache:
            words = self._words(nonce, self.population, key_of=0)
            kept = {each: self._cache[each] for each in self._cache if each == nonce - 1}
            self._cache = {**kept, nonce: _scaled(words, self.participation.choices)}
        return self._cache[nonce]

    @cached_property
    def _cache(self) -> dict[int, NDArray[np.int64]]:
        return {}


class StagedSampler(Sampler):
    """The draws of one stage after another.

    Guarantees: those of the sampler of each stage. No word serves two stages: the number of the
    stage is part of the nonce, also where they have one key.
    """

    participation: DrawnStages

    def draw(self, step: int) -> Ids:
        number, first, _ = self.participation.at(step)
        return self._stages[number].draw(step - first)

    @cached_property
    def _stages(self) -> list[Sampler]:
        return [
            _SAMPLERS[type(own)](
                own, self.population, self.key, stage=number, begins=first, by_count=self.by_count
            )
            for number, (first, own) in enumerate(self.participation.starts())
        ]


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
    SeparatedBins: SeparatedSampler,
    CyclicPoisson: CyclicSampler,
    DrawnStages: StagedSampler,
}


def make_sampler(
    participation: Participation,
    *,
    key: SamplingKey,
    population: int | None = None,
    by_count: bool = True,
) -> Sampler:
    """The sampler that a plan's participation asks for; `by_count`: see `Sampler`."""
    kind = next((k for k in _SAMPLERS if isinstance(participation, k)), None)
    if kind is None:
        raise Unsupported(
            f"{participation.kind} is not sampled: feed data in the order that the plan promises"
        )
    planned = getattr(participation, "population", population)
    if population not in (None, planned):
        raise InvalidInput(f"the plan samples from {planned} examples, got {population}")
    groups = max(getattr(own, "groups", 0) for own in stages_of(participation))
    if planned is None or (groups and planned < groups):
        least = f", at least one a group ({groups})" if groups else ""
        raise InvalidInput(
            f"secret draws need the number of examples{least}, got {population}; give population="
        )
    return _SAMPLERS[kind](participation, planned, key, by_count=by_count)
