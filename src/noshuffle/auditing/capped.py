"""ε of Poisson batches that are cut to a cap: an attack, and a world that is worse than any.

k others of n were drawn, by coins of probability q, and a unit that is drawn too has a place with
probability B/(k + 1) where k ≥ B. Of a full batch it takes the place of another.

    the others send nothing    it takes part with probability q·E min(1, B/(k + 1))
    the others oppose it       all of them send −c, the unit c, and the attacker sees the sum alone
    k is told                  a label: c at rate q where k < B, else 2c at rate q·B/(k + 1)

The first two are attacks that the mechanism allows, with n − 1 others: ε is at least what the
better one shows. Of the third, the unit's place and who goes for it, given all else that is drawn,
is one coin, and whoever goes moves the sum by at most 2c: ε is at most that, with n − 1 or n
others. Labels k ≥ B are binned, with the largest rate of each. No state; nothing is shared with
`accounting`.

>>> size = {"rate": 0.1, "cap": 3, "population": 100}                  # batches are always full
>>> found = epsilon_of_capped([0.5], **size, delta=1e-3, numbers=10**5)
>>> 0.11 < found.low < 0.15 < found.high < 0.18
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

from noshuffle.auditing.emitted import Array
from noshuffle.auditing.likelihood import NUMBERS, EpsilonRange, widest
from noshuffle.auditing.turns import Labelled, Turn, epsilon_of_turns, plain

#: Bins of labels k ≥ B, and what is so rare that it is put to its neighbour.
_BINS, _RARE = 8, 1e-15
#: Points between which log densities are linear.
_POINTS = 2**14


@dataclass(frozen=True)
class Opposed:
    """A step whose other units, k of `others`, all send the opposite of the unit: −c each."""

    kind: str
    rate: float
    cap: int
    others: int
    shift: float

    def loss(self, x: Array) -> tuple[Array, Array]:
        at, there, without = _tables(self.rate, self.cap, self.others, self.shift)
        p, q = np.interp(x, at, there), np.interp(x, at, without)
        return (q - p, q) if self.kind == "add" else (p - q, p)

    def grid(self, tilt: float, points: int = 2**14) -> Array:
        at = _tables(self.rate, self.cap, self.others, self.shift)[0]
        return np.linspace(at[0], at[-1], points)


@lru_cache(maxsize=16)
def _tables(rate: float, cap: int, others: int, shift: float) -> tuple[Array, Array, Array]:
    """Points, and log densities over N(0, 1) with the unit and without it; 0 is a full batch."""
    k, chance = _drawn(others, rate)
    places = np.minimum(cap / (k + 1), 1.0)
    took, full = chance * rate * places, np.minimum(k, cap)
    low, high = float(np.min(cap - full)), float(np.max(cap - full)) + 2
    at = np.linspace(shift * low - 10 - 60 * shift, shift * high + 10 + 60 * shift, _POINTS)

    def density(weights: Array, means: Array) -> Array:
        steps = np.unique(means)
        own = np.array([weights[means == one].sum() for one in steps])
        exponents = np.outer(at, shift * steps) - (shift * steps) ** 2 / 2
        return np.asarray(logsumexp(exponents, axis=1, b=own[None]))

    with_unit = np.concatenate([chance - took, took])
    means = np.concatenate([cap - full, cap - np.minimum(k, cap - 1) + 1])
    return at, density(with_unit, means), density(chance, cap - full)


def _drawn(others: int, rate: float) -> tuple[Array, Array]:
    """How many others may be drawn, and how likely."""
    k = np.arange(others + 1)
    if others > 10_000:
        spread = 12 * math.sqrt(others * rate) + 40
        k = k[(k > others * rate - spread) & (k < others * rate + spread)]
    chance = binom.pmf(k, others, rate)
    kept = chance > _RARE
    return k[kept].astype(float), chance[kept] / chance[kept].sum()


@lru_cache(maxsize=1024)
def _alone(rate: float, cap: int, others: int, kind: str, shift: float) -> Labelled:
    """One step in which the others send nothing."""
    k, chance = _drawn(others, rate)
    return plain(Turn(kind, float(chance @ np.minimum(cap / (k + 1), 1.0)) * rate, shift))


def _opposed(rate: float, cap: int, others: int, kind: str, shift: float) -> Labelled:
    return plain(Opposed(kind, rate, cap, others, shift))


@lru_cache(maxsize=1024)
def _told(rate: float, cap: int, others: int, kind: str, shift: float) -> Labelled:
    """One step in which everybody knows how many others were drawn."""
    width = max(1, math.ceil(2 * math.sqrt(others * rate * (1 - rate)) / _BINS))
    starts = range(cap, others + 1, width)[:_BINS]
    tails = [*(float(binom.sf(start - 1, others, rate)) for start in starts), 0.0]
    parts = [(1 - tails[0], Turn(kind, rate, shift))]
    for start, tail, after in zip(starts, tails, tails[1:]):
        parts.append((tail - after, Turn(kind, rate * cap / (start + 1), 2 * shift)))
    return tuple(part for part in parts if part[0] > _RARE)


def epsilon_of_capped(
    shifts: Sequence[float],
    *,
    rate: float,
    cap: int,
    population: int,
    delta: float,
    numbers: int = NUMBERS,
) -> EpsilonRange:
    """At least what the better attack shows, at most what it would be if all else were told."""

    def shown(step: Callable[..., Labelled], others: int) -> EpsilonRange:
        worlds = [[step(rate, cap, others, kind, c) for c in shifts] for kind in ("remove", "add")]
        return widest([epsilon_of_turns(one, delta=delta, numbers=numbers) for one in worlds])

    is_full = binom.sf(cap - 1, population - 1, rate) > 1e-6
    found = [shown(step, population - 1) for step in (_alone, _opposed)[: 1 + int(is_full)]]
    above = [shown(_told, others) for others in (population - 1, population)]
    return EpsilonRange(widest(found).low, widest(above).high)
