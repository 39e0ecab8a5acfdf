"""ε of a plan with secret draws, by Monte Carlo of the attacker's likelihood ratio.

The rows that the stream emits, whitened (Σ = M·Mᵀ), are N(0, 1) without a unit (Q) and, with it, a
mixture over what may have been drawn (P). Where the turns of a unit touch different rows

    log dP/dQ = Σ_turns log(1 − q + q e^{c x − c²/2}),      c² = (Σ⁻¹)_tt / z²,    x ~ N(0, 1) in Q

(twice c where a batch keeps its size: whoever comes in replaces somebody). For one secret position,

    dP/dQ = (1/b) Σ_j e^{X_j − K_jj/2},       X ~ N(0, K) in Q,       K = sums of Σ⁻¹ / z²

Either way δ(ε) = E_P (1 − e^{ε − loss})₊, and the same from Q: "remove" and "add"; under
replace-one the other world sends −c. Losses that matter are rare: turns are drawn from about
P·e^{λ·loss} and weighed by the exact ratio of densities (importance sampling), λ by Chernoff. Two
limits that the normal error of the mean passes once in a million turn δ into an interval for ε.
That these worlds are the worst ones is proved in docs/proofs.md and not looked at again here. No
state; nothing is shared with `accounting`.

>>> found = epsilon_of_turns("remove", rate=0.1, shifts=[1.0] * 8, delta=1e-3, numbers=10**6)
>>> found.low < 1.4338 < found.high < 1.45
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from scipy.special import log_ndtr, logsumexp

from noshuffle.auditing.emitted import Array

#: Normal deviations of an interval that chance passes once in a million, on each side.
_DEVIATIONS = 4.75
#: Random numbers of one estimate, and its samples at most.
NUMBERS, _MOST = 20_000_000, 500_000
#: Inner products of two turns, beside their sizes, that are nothing but rounding.
_APART = 1e-4
_NODES, _REACH = 2**13, 8.5
#: ε beyond which the answer is said to be infinite.
_LARGEST = 1e4
_TILTS = np.geomspace(0.02, 256, 30)
_SCALES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)

#: e^{−loss} and weight of so many samples.
Draws = tuple[Array, Array]


@dataclass(frozen=True)
class EpsilonRange:
    """ε of one attack: below `low` or above `high` by chance once in a million each."""

    low: float
    high: float


@dataclass(frozen=True)
class Turn:
    """One step in which a unit takes part with probability `rate`, and shifts x by `shift`."""

    kind: str
    rate: float
    shift: float

    def log_ratio(self, x: Array) -> Array:
        exponent = self.shift * x - self.shift**2 / 2
        if self.rate == 1:
            return exponent
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + exponent)

    def loss(self, x: Array) -> tuple[Array, Array]:
        """log P/Q of the world that x is drawn from to the other; log of its density over N."""
        own = self.log_ratio(x)
        if self.kind == "add":
            return -own, np.zeros_like(x)
        return (own - self.log_ratio(-x) if self.kind == "replace" else own), own

    def grid(self, tilt: float, points: int = 2**14) -> Array:
        reach = 10 + (tilt + 1) * self.shift
        return np.linspace(-reach, reach, points)

    def log_moment(self, tilt: float) -> float:
        """log E e^{λ·loss}."""
        x = self.grid(tilt, 2**12)
        loss, base = self.loss(x)
        step = math.log((x[1] - x[0]) / math.sqrt(2 * math.pi))
        return float(logsumexp(tilt * loss + base - x * x / 2)) + step


class _Tilted:
    """x = T(n) of a normal n, with a law near that of the turn times e^{λ·loss}.

    What this adds to the turn's own law is made so large that one in `turns` comes from it. T grows
    and is linear between nodes, so its density is known exactly, whatever T is.
    """

    def __init__(self, turn: Turn, tilt: float, turns: int) -> None:
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


def epsilon_of_draws(
    part: Any, factor: Array, *, neighbours: str, delta: float, numbers: int = NUMBERS
) -> EpsilonRange | None:
    """ε of the rows that `factor` whitens (Σ_t = F⁻¹F⁻ᵀ·z²); None where nothing is known of them.

    The unit is in the group of a cyclic draw whose turns shift its rows most. Participations are
    recognised by `kind`: another version, which is audited, may lack some classes.
    """
    if not np.all(np.abs(factor) < _LARGEST):
        return EpsilonRange(math.inf, math.inf)
    steps = np.arange(len(factor))
    if part.kind == "balls-in-bins" and neighbours != "replace-one":
        b = part.steps_per_epoch
        shifts = np.stack([factor[:, steps % b == j].sum(axis=1) for j in range(b)])
        return epsilon_of_positions(shifts @ shifts.T, delta=delta, numbers=numbers)
    if part.kind not in ("poisson", "fixed-size", "cyclic-poisson"):
        return None
    groups = part.groups if part.kind == "cyclic-poisson" else 1
    turns = [factor[:, steps % groups == group] for group in range(min(groups, len(factor)))]
    own = max(turns, key=lambda columns: float(np.sum(columns**2)))
    K = own.T @ own
    sizes = np.sqrt(np.diag(K))
    if np.any(np.abs(K - np.diag(sizes**2)) > _APART * np.outer(sizes, sizes)):
        return None
    kinds = ["remove", "add"]
    if neighbours == "replace-one" and part.kind == "fixed-size":
        sizes, kinds = 2 * sizes, ["remove", "add", "remove add"]
    elif neighbours == "replace-one":
        kinds = ["replace"]
    return widest(
        [
            epsilon_of_turns(kind, rate=part.rate, shifts=sizes, delta=delta, numbers=numbers)
            for kind in kinds
        ]
    )


def epsilon_of_turns(
    kind: str,
    *,
    rate: float,
    shifts: Sequence[float] | Array,
    delta: float,
    numbers: int = NUMBERS,
) -> EpsilonRange:
    """ε of independent turns with these shifts, seen from one world: "remove", "add", "replace".

    Several, as "remove add", take turns.
    """
    kinds = cycle(kind.split())
    turns = [Turn(next(kinds), rate, float(f"{shift:.6g}")) for shift in shifts]
    each = {turn: turns.count(turn) for turn in set(turns)}
    costs = [
        (sum(own * turn.log_moment(tilt) for turn, own in each.items()) - math.log(delta)) / tilt
        for tilt in _TILTS
    ]
    tilt = 0.85 * float(_TILTS[int(np.argmin(costs))])  # Chernoff's is for P(loss > ε), above δ
    laws = {turn: _Tilted(turn, tilt, len(turns)) for turn in each}
    rng = np.random.default_rng()
    count = max(2000, min(_MOST, numbers // len(turns)))
    losses, weights = np.zeros(count), np.zeros(count)
    for turn in turns:
        x, weight = laws[turn].draw(rng, count)
        loss, base = turn.loss(x)
        losses += loss
        weights += weight + base
    return _interval(_draws(losses, weights), delta)


def epsilon_of_positions(K: Array, *, delta: float, numbers: int = NUMBERS) -> EpsilonRange:
    """ε of one secret, uniform position; K holds the inner products of its shifts."""
    count = max(2000, min(_MOST, numbers // len(K)))
    found = []
    for law in (_remove, _add):
        errors = [_error(law(K, scale, 4000), delta) for scale in _SCALES]
        scale = _SCALES[int(np.argmin(errors))]
        found.append(_interval(law(K, scale, count), delta))
    return widest(found)


def widest(found: Sequence[EpsilonRange]) -> EpsilonRange:
    """That of the better attack."""
    return EpsilonRange(max(one.low for one in found), max(one.high for one in found))


def _remove(K: Array, scale: float, count: int) -> Draws:
    """From the world with the unit: a position, whose shift is made larger by `scale`."""
    rng = np.random.default_rng()
    X = (
        rng.standard_normal((count, len(K))) @ _root(K)
        + scale * K[rng.integers(len(K), size=count)]
    )
    log_ratio = _log_mean(X - np.diag(K) / 2)
    return _draws(log_ratio, log_ratio - _log_mean(scale * X - scale**2 * np.diag(K) / 2))


def _add(K: Array, scale: float, count: int) -> Draws:
    """From the world without it: all positions are made less likely."""
    mean = K.mean(axis=0)
    X = np.random.default_rng().standard_normal((count, len(K))) @ _root(K) - scale * mean
    weights = scale * X.mean(axis=1) + scale**2 * mean.mean() / 2
    return _draws(-_log_mean(X - np.diag(K) / 2), weights)


def _root(K: Array) -> Array:
    """Symmetric square root."""
    values, vectors = np.linalg.eigh(K)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T)


def _log_mean(X: Array) -> Array:
    top = X.max(axis=1)
    return np.asarray(top + np.log(np.exp(X - top[:, None]).mean(axis=1)))


def _draws(losses: Array, log_weights: Array) -> Draws:
    return np.exp(np.minimum(-losses, 700.0)), np.exp(np.minimum(log_weights, 700.0))


def _delta(draws: Draws, epsilon: float) -> tuple[float, float]:
    """δ at ε and its deviation."""
    ratios, weights = draws
    gains = np.maximum(1 - math.exp(min(epsilon, 700.0)) * ratios, 0.0) * weights
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))


def _error(draws: Draws, delta: float) -> float:
    """The relative deviation of δ where it is that of the plan."""
    mean, deviation = _delta(draws, _root_of(draws, delta))
    return deviation / mean if mean else math.inf


def _interval(draws: Draws, delta: float) -> EpsilonRange:
    """From where the estimate is δ outwards, to where its limits are."""

    def reach(side: float) -> float:
        def is_above(epsilon: float) -> bool:
            mean, deviation = _delta(draws, epsilon)
            return mean + side * _DEVIATIONS * deviation > delta

        near, far, step = found, found, 1e-4 * found + 1e-6
        while is_above(far) == (side > 0):
            near, far, step = far, far + side * step, 2 * step
            if not 0 < far < _LARGEST:
                return 0.0 if far <= 0 else math.inf
        for _ in range(10):
            middle = (near + far) / 2
            near, far = (middle, far) if is_above(middle) == (side > 0) else (near, middle)
        return far

    found = _root_of(draws, delta)
    return EpsilonRange(reach(-1.0), reach(1.0))


def _root_of(draws: Draws, delta: float) -> float:
    """ε at which the estimate is δ; it falls in ε."""
    low, high = 0.0, 1.0
    while _delta(draws, high)[0] > delta and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(draws, middle)[0] > delta else (low, middle)
    return high
