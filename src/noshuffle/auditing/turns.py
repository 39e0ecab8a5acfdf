"""ε of independent turns, each of one number with normal noise, by Monte Carlo.

    log dP/dQ = Σ_turns log(1 − q + q e^{c x − c²/2}),          x ~ N(0, 1) in Q

A label that everybody sees may decide which of several turns is met. Losses that matter are rare:
turns are drawn from about P·e^{λ·loss} and weighed by the exact ratio of densities (importance
sampling), λ by Chernoff; so are labels. No state.

>>> turns = [plain(Turn("remove", 0.1, 1.0))] * 8
>>> found = epsilon_of_turns(turns, delta=1e-3, numbers=10**6)
>>> found.low < 1.4338 < found.high < 1.45
True
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import log_ndtr, logsumexp

from noshuffle.auditing.emitted import Array
from noshuffle.auditing.likelihood import NUMBERS, EpsilonRange, count_of, interval, samples

_NODES, _REACH = 2**13, 8.5
_TILTS = np.geomspace(0.02, 256, 30)
#: In how many runs labels that promise more are drawn instead.
_RARER = 0.2


class OneNumber(Hashable, Protocol):
    """What a turn shows: a number x, of which the two worlds have different laws."""

    def loss(self, x: Array) -> tuple[Array, Array]:
        """log P/Q of the world that x is drawn from to the other; log of its density over N."""

    def grid(self, tilt: float, points: int = 2**14) -> Array:
        """Evenly spaced points between which the world and e^{λ·loss} times it lie."""


#: Turns with the probabilities of the labels by which they are met.
Labelled = tuple[tuple[float, OneNumber], ...]


def plain(turn: OneNumber) -> Labelled:
    """Without a label."""
    return ((1.0, turn),)


@dataclass(frozen=True)
class Turn:
    """One step in which a unit takes part with probability `rate`, and shifts x by `shift`.

    `kind`: "remove" is drawn from the world with the unit, "add" from that without it; "replace"
    is compared with a world in which it sends the opposite. "opposed" is drawn from the world with
    a unit in whose place somebody sends the opposite, and compared with one in which it sends
    nothing and keeps the place: shifts of two and one; "against" is drawn from the latter.
    """

    kind: str
    rate: float
    shift: float

    def log_ratio(self, x: Array, times: float = 1.0) -> Array:
        shift = times * self.shift
        exponent = shift * x - shift**2 / 2
        if self.rate == 1:
            return exponent
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + exponent)

    def loss(self, x: Array) -> tuple[Array, Array]:
        own = self.log_ratio(x)
        if self.kind == "add":
            return -own, np.zeros_like(x)
        if self.kind in ("opposed", "against"):
            there = self.log_ratio(x, times=2.0)
            return (there - own, there) if self.kind == "opposed" else (own - there, own)
        return (own - self.log_ratio(-x) if self.kind == "replace" else own), own

    def grid(self, tilt: float, points: int = 2**14) -> Array:
        reach = 10 + (tilt + 1) * self.shift * (2 if self.kind in ("opposed", "against") else 1)
        return np.linspace(-reach, reach, points)


def _log_moment(turn: OneNumber, tilt: float) -> float:
    """log E e^{λ·loss}."""
    x = turn.grid(tilt, 2**11)  # it decides what is drawn, not what is found
    loss, base = turn.loss(x)
    exponents = tilt * loss + base - x * x / 2
    top = float(exponents.max())
    mass = float(np.exp(exponents - top).sum()) * float(x[1] - x[0]) / math.sqrt(2 * math.pi)
    return top + math.log(mass)


class _Tilted:
    """x = T(n) of a normal n, with a law near that of the turn times e^{λ·loss}.

    What this adds to the turn's own law is made so large that one in `turns` comes from it. T grows
    and is linear between nodes, so its density is known exactly, whatever T is.
    """

    def __init__(self, turn: OneNumber, tilt: float, turns: int) -> None:
        x = turn.grid(tilt)
        loss, base = turn.loss(x)
        bulk, gain = base - x * x / 2, np.maximum(tilt * loss, 0.0)
        top = float(np.max(bulk + gain))
        mass, more = np.exp(bulk - top), np.exp(bulk + gain - top) * -np.expm1(-gain)
        share = min(0.9, 1 / turns)
        if (enough := share / (1 - share) * mass.sum()) < more.sum():
            mass = np.exp(bulk + tilt * loss - top)
        else:
            mass += more * (enough / more.sum())
        below, above = (np.cumsum(part) - part / 2 for part in (mass, mass[::-1]))
        nodes = np.linspace(-_REACH, _REACH, _NODES + 1)
        with np.errstate(divide="ignore"):
            left = np.interp(log_ndtr(nodes), np.log(below / mass.sum()), x)
            right = np.interp(log_ndtr(-nodes), np.log(above / mass.sum()), x[::-1])
        self._at = np.where(nodes < 0, left, right)
        self._at = np.maximum.accumulate(self._at) + nodes * 1e-7
        self._slope = np.diff(self._at) * (_NODES / (2 * _REACH))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """x, and log of (standard normal density of x over the density of x)."""
        n = rng.standard_normal(count)
        where = (n + _REACH) * (_NODES / (2 * _REACH))
        node = np.clip(where.astype(np.int64), 0, _NODES - 1)
        slope = self._slope[node]
        x = self._at[node] + (where - node) * (2 * _REACH / _NODES) * slope
        return x, (n * n - x * x) / 2 + np.log(slope)


class _Law:
    """Labels and numbers of one turn; labels that promise more than the first come more often.

    Not as often as P·e^{λ·loss} has them, which may be always.
    """

    def __init__(self, turn: Labelled, tilt: float, turns: int) -> None:
        self.turn = turn
        self._tilted = [_Tilted(one, tilt, turns) for _, one in turn]
        own = np.array([chance for chance, _ in turn])
        logs = np.array([_log_moment(one, tilt) for _, one in turn]) if len(turn) > 1 else own
        more = own * np.expm1(np.clip(logs - logs[0], 0.0, 700.0))
        more *= _RARER / turns / max(float(more.sum()), 1e-300)
        self._chances = (own + more) / (own + more).sum()
        self._weights = np.log(own / self._chances)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Losses, and logarithms of P over the law."""
        if len(self.turn) == 1:
            return self._numbers(rng, 0, count)
        labels = rng.choice(len(self.turn), size=count, p=self._chances)
        losses, weights = np.empty(count), np.empty(count)
        for label in range(len(self.turn)):
            at = np.flatnonzero(labels == label)
            losses[at], weights[at] = self._numbers(rng, label, len(at))
        return losses, weights + self._weights[labels]

    def _numbers(self, rng: np.random.Generator, label: int, count: int) -> tuple[Array, Array]:
        x, weight = self._tilted[label].draw(rng, count)
        loss, base = self.turn[label][1].loss(x)
        return loss, weight + base


def epsilon_of_turns(
    turns: Sequence[Labelled], *, delta: float, numbers: int = NUMBERS
) -> EpsilonRange:
    """ε of independent turns, drawn from the world of each."""
    each = Counter(turns)

    def log_moment(turn: Labelled, tilt: float) -> float:
        return float(logsumexp([math.log(p) + _log_moment(one, tilt) for p, one in turn]))

    costs = [
        (sum(own * log_moment(turn, tilt) for turn, own in each.items()) - math.log(delta)) / tilt
        for tilt in _TILTS
    ]
    tilt = 0.85 * float(_TILTS[int(np.argmin(costs))])  # Chernoff's is for P(loss > ε), above δ
    laws = {turn: _Law(turn, tilt, len(turns)) for turn in each}
    rng, count = np.random.default_rng(), count_of(numbers, len(turns))
    losses, weights = np.zeros(count), np.zeros(count)
    for turn in turns:
        loss, weight = laws[turn].draw(rng, count)
        losses += loss
        weights += weight
    return interval(samples(losses, weights), delta)
