"""The kinds of secret draws, one per participation.

    PoissonSampler            every example joins by its own coin flip
    FixedSizeSampler          a uniform subset of a fixed size
    TruncatedSampler          coin flips, and a random part of batches that are too large
    CyclicSampler             coin flips among one of several groups that take turns
    BinsSampler               everybody at one secret position, the same in every epoch

What they share, keys and words, is `sampler`. State: secret positions, once they are drawn.

>>> sampler = make_sampler(FixedSize(steps=4, batch=3, population=10), key=b"k" * 32)
>>> len(sampler.draw(2)), np.array_equal(sampler.draw(2), sampler.draw(2))
(3, True)
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.release.sampler import Sampler, SamplingKey
from noshuffle.release.sparse_draws import drawn_count, drawn_subset
from noshuffle.release.unit_ids import Ids


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
    groups = getattr(participation, "groups", 0)
    if planned is None or (groups and planned < groups):
        least = f", at least one a group ({groups})" if groups else ""
        raise InvalidInput(
            f"secret draws need the number of examples{least}, got {population}; give population="
        )
    return _SAMPLERS[kind](participation, planned, key, by_count=by_count)
