"""Secret subsets in time that goes with what is drawn, not with the data it is drawn from.

    count    N ~ Binomial(n, q): a number of 128 random bits against the distribution function
    subset   the first N distinct ones of numbers that are uniform below n

Coins of probability q, one a unit, give a subset of N units, and all subsets of one size are
equally likely: so do these two. How exact: numbers below n are exactly uniform (words that would
make small ones likelier are passed over), so a subset of a given size is exactly uniform. The
weights of the counts are whole numbers of 192 bits, multiplied from the most likely one outwards
with the rate as the fraction that the float is; the distribution function is rounded to 128 bits.
All of it moves a draw by a total variation below 2⁻⁹⁶ (fewer than 2³⁰ counts, each off by at most
2⁻¹²⁸ and by 2³⁰ units of weight), where coins of 64 bits are off by up to n·2⁻⁶⁴. No state but
the tables, which are public.

>>> table = counts(4, 0.5)
>>> [table.count(u << 124) for u in range(16)]
[0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: Bits of the weight of the most likely count, and of the distribution function.
_WEIGHT, BITS = 192, 128

#: So many fresh random words.
Words = Callable[[int], NDArray[np.uint64]]


@dataclass(frozen=True)
class Counts:
    """⌊2¹²⁸·P(N ≤ k)⌋ for k = first, first + 1, …; what lies beyond has weight 0."""

    first: int
    below: tuple[int, ...]

    def count(self, uniform: int) -> int:
        """N from a uniform number of 128 bits."""
        return self.first + bisect_right(self.below, uniform)


@lru_cache(maxsize=16)
def counts(units: int, rate: float) -> Counts:
    """The distribution of how many of so many units are drawn, for 0 < rate < 1.

    P(k + 1)/P(k) = (units − k)/(k + 1) · rate/(1 − rate).
    """
    up, whole = rate.as_integer_ratio()
    down = whole - up
    likeliest = (units + 1) * up // whole  # the ratio falls below 1 here
    above, weight, k = [1 << _WEIGHT], 1 << _WEIGHT, likeliest
    while weight and k < units:
        weight = weight * (units - k) * up // ((k + 1) * down)
        above.append(weight)
        k += 1
    under, weight, k = [], 1 << _WEIGHT, likeliest
    while weight and k > 0:
        weight = weight * k * down // ((units - k + 1) * up)
        under.append(weight)
        k -= 1
    total, passed, below = sum(above) + sum(under), 0, []
    for weight in [*reversed(under), *above]:
        passed += weight
        below.append((passed << BITS) // total)
    return Counts(likeliest - len(under), tuple(below[:-1]))  # the last is certain


def drawn_count(units: int, rate: float, words: Words) -> int:
    """How many of so many units are drawn; takes two words."""
    high, low = words(2).tolist()
    return counts(units, rate).count((high << 64) | low)


def drawn_subset(units: int, size: int, words: Words) -> NDArray[np.int64]:
    """A uniform subset of {0, …, units − 1}, in order; takes about as many words as it has units.

    The larger part of all units is what is left of the smaller one.
    """
    if 2 * size > units:
        is_in = np.ones(units, dtype=bool)
        is_in[drawn_subset(units, units - size, words)] = False
        return np.flatnonzero(is_in)
    if not size:
        return np.empty(0, dtype=np.int64)
    numbers = np.empty(0, dtype=np.int64)
    # Numbers that come twice count once; there are about size²/(2·units) of them.
    missing = size + size * size // units
    while True:
        numbers = np.concatenate([numbers, _below(units, words(missing + 16))])
        distinct, first = np.unique(numbers, return_index=True)
        if len(distinct) >= size:
            last = np.partition(first, size - 1)[size - 1]
            subset: NDArray[np.int64] = distinct[first <= last]
            return subset
        missing = size - len(distinct)


def _below(units: int, words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Uniform numbers below `units`; words of the last, incomplete round are passed over."""
    rest = 2**64 % units
    if rest:
        words = words[words < np.uint64(2**64 - rest)]
    return (words % np.uint64(units)).astype(np.int64)
