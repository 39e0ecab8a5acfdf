"""Sums of losses of which a few are rare and large: at most one of them is followed exactly.

At small sampling rates the sum of T losses is narrow unless the unit is drawn and seen in one of
the steps, which the far tail of one step alone decides. No exponential tilt suits both. So the
atoms p of a step are cut at a cap, p = b + r with r above it, and

    p^T = b^T + Σ_i b^(T−1) r_i + (two jumps or more),      P(two or more) ≤ (Σ r)²/2

(powers are convolutions). The first term is a tilted transform as in `loss_sum`, with the moments
of b only; in the second δ_b(ε − l) is averaged over the jumps l. Both are rigorous:

    upper   δ of T − 1 steps is at most that of T steps plus ‖r‖, since a mean of a convex function
            is not below its value at the mean; the last term is added
    lower   δ of T − 1 steps is at least that of T steps less δ_b(0) of one; the last is dropped

Where ε − l lies below all of the bulk, δ_b(e) = ‖b‖^T − e^e Q(b)^T + E(e^{e−S} − 1)₊, whose last
mean is between 0 and M(−t) e^{te}. Where no grid is fine enough for the bulk, a lower bound takes
all of it for one outcome. No state.

>>> from noshuffle.accounting.mixture import remove_pair
>>> block = [(remove_pair(noise_multiplier=0.646, rate=3e-6), 237_501)]
>>> round(epsilon_of(block, delta=1.9e-9, is_upper=True), 3)
0.055
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from noshuffle.accounting.bisection import bracket
from noshuffle.accounting.loss_distribution import GridLoss, above, below, merged
from noshuffle.accounting.loss_sum import Tail, tail_of
from noshuffle.accounting.mixture import Joined, Pair
from noshuffle.accounting.scout import (
    ACCURACY,
    MOST_POINTS,
    Block,
    Scout,
    one_tail,
    outline,
    scout_of,
)

Array = np.ndarray

#: Two jumps have at most this share of δ.
_TWO_JUMPS = 1e-4
#: Jumps are followed apart where Chernoff's ε falls below this share without them.
_WORTH_IT = 0.9
_ROUNDING = 1e-9
#: Larger rates are as well served by one grid.
_RATE = 1e-3
_MOST_BLOCKS = 4


def cap_of(blocks: Sequence[Block], *, delta: float) -> float | None:
    """The loss above which jumps are counted apart; None where that would gain nothing."""
    log_delta = math.log(delta)
    if len(blocks) > _MOST_BLOCKS or max(map(_rate, blocks)) > _RATE:  # one grid does for all
        return None
    cap = _exceeded(blocks, log_delta, math.sqrt(2 * _TWO_JUMPS * delta))
    if not cap > 0:
        return None
    narrow = scout_of(blocks, log_delta=log_delta, cap=cap)
    plain = scout_of(blocks, log_delta=log_delta)
    return cap if narrow.epsilon < _WORTH_IT * plain.epsilon else None


def _rate(block: Block) -> float:
    pair = block[0].over if isinstance(block[0], Joined) else block[0]
    return pair.upper[-1][0] if isinstance(pair, Pair) else 1.0


def _exceeded(blocks: Sequence[Block], log_delta: float, number: float) -> float:
    """The loss that all steps together exceed about so many times; 0 where none is known."""
    found = [(outline(pair, one_tail(blocks, log_delta)), count) for pair, count in blocks]
    losses = np.concatenate([loss for (loss, _), _ in found])
    masses = np.concatenate([count * np.exp(log_p) for (_, log_p), count in found])
    order = np.argsort(-losses)
    is_rare = np.cumsum(masses[order]) <= number
    return float(losses[order][is_rare][-1]) if is_rare.any() else 0.0


def epsilon_of(blocks: Sequence[Block], *, delta: float, is_upper: bool) -> float:
    """ε at δ, from above or from below; infinite (0 from below) where nothing is gained.

    Guarantees: δ of the same bound, evaluated at the result, is at most (from below: above) δ.
    """
    cap = cap_of(blocks, delta=delta)
    if cap is None:
        return math.inf if is_upper else 0.0
    bounds: list[_OneJump | _OneOutcome] = [_bound(blocks, cap, delta=delta, is_upper=is_upper)]
    if not is_upper:
        bounds += [_merged(blocks, share, delta=delta) for share in (1e-2, 1e-4, 1e-6)]
    most = scout_of(blocks, log_delta=math.log(delta)).epsilon

    def fits(epsilon: float) -> bool:
        return not max(bound.delta(epsilon) for bound in bounds) > delta

    if not fits(most):
        return math.inf if is_upper else most
    low, high = bracket(fits, 0.0, most, tolerance=1e-6)
    return high if is_upper else low


def delta_of(blocks: Sequence[Block], *, epsilon: float, is_upper: bool) -> float | None:
    """δ at ε, from above or from below; None where one grid does as well."""
    near, best = math.exp(max(scout_of(blocks, epsilon=epsilon).log_delta, -650.0)), None
    cap = None
    for _ in range(8):  # Chernoff's δ is far too large where single steps decide
        cap = cap_of(blocks, delta=near) if near < 1 else None
        if cap is not None or near < 1e-250:
            break
        near *= 0.02
    for _ in range(4):  # each bound is made for a δ: go on from what it shows
        if cap is None:
            break
        found = _bound(blocks, cap, delta=near, is_upper=True).delta(epsilon)
        best = found if best is None else min(best, found)
        if not 1e-250 < found < 1 or abs(math.log(found / near)) < 0.3:
            break
        near, cap = found, cap_of(blocks, delta=found)
    if best is None or is_upper:
        return best if best is None else min(1.0, best)
    cap = cap_of(blocks, delta=best) or 0.0
    if not cap > 0:
        return None
    bounds: list[_OneJump | _OneOutcome] = [_bound(blocks, cap, delta=best, is_upper=False)]
    bounds += [_merged(blocks, share, delta=best) for share in (1e-2, 1e-4, 1e-6)]
    return max(0.0, *(bound.delta(epsilon) for bound in bounds))


@dataclass(frozen=True)
class _OneJump:
    """δ of the bulk by several transforms, and the jumps with their expected numbers."""

    tails: tuple[Tail, ...]
    is_upper: bool
    jumps: Array
    numbers: Array
    correction: float
    rest: float
    mass: float
    other_mass: float
    log_moment: float
    order: float

    def bulk(self, epsilon: Array) -> Array:
        known = self.mass - np.exp(np.minimum(epsilon, 700.0)) * self.other_mass
        found = [tail.delta(epsilon) for tail in self.tails]
        if not self.is_upper:
            return np.asarray(np.maximum.reduce([*found, known]))
        far = np.exp(np.minimum(self.log_moment + self.order * epsilon, 700.0))
        return np.asarray(np.minimum.reduce([*found, known + far]))

    def delta(self, epsilon: float) -> float:
        alone = float(self.bulk(np.array([epsilon]))[0])
        after = self.bulk(epsilon - self.jumps) + self.correction
        return alone + float(self.numbers @ np.clip(after, 0.0, 1.0)) + self.rest


@dataclass(frozen=True)
class _OneOutcome:
    """One jump, and a bulk that is one outcome a step."""

    jumps: Array
    numbers: Array

    def delta(self, epsilon: float) -> float:
        return float(self.numbers @ np.maximum(-np.expm1(epsilon - self.jumps), 0.0))


def _merged(blocks: Sequence[Block], share: float, *, delta: float) -> _OneOutcome:
    cap = _exceeded(blocks, math.log(delta), share)
    if not cap > 0:
        return _OneOutcome(np.zeros(0), np.zeros(0))
    tail = one_tail(blocks, math.log(delta))
    seen = [(*merged(pair, cap=cap, tail=tail), count) for pair, count in blocks]
    log_mass = sum(count * math.log(mass[0]) for _, mass, count in seen)
    shift = sum(count * loss[0] for loss, _, count in seen)
    shift -= max(0.0, *(loss[0] for loss, _, _ in seen)) + 1e-13 * len(seen)
    jumps = np.concatenate([loss[1:] + shift for loss, _, _ in seen])
    numbers = np.concatenate([count * mass[1:] for _, mass, count in seen])
    return _OneOutcome(jumps, numbers * math.exp(log_mass) * (1 - _ROUNDING))


def _bound(blocks: Sequence[Block], cap: float, *, delta: float, is_upper: bool) -> _OneJump:
    scout = scout_of(blocks, log_delta=math.log(delta), cap=cap)
    steps, width = sum(count for _, count in blocks), scout.high - scout.low
    step = math.sqrt(12 * ACCURACY * max(scout.epsilon, 0.02 * width) / (steps * (scout.tilt + 1)))
    step = min(step, 0.2 / (scout.tilt + 1))
    if not is_upper:  # several points inside the bulk
        step = min([step, *(abs(pair.anchor) / 4 for pair, _ in blocks if pair.anchor)])
    step = max(step, 2 * max(width, cap) / MOST_POINTS)
    build, tail = above if is_upper else below, one_tail(blocks, scout.log_delta)
    parts = [(build(pair, step=step, tail=tail, cap=cap), count) for pair, count in blocks]
    tails = [tail_of(parts, each, is_upper) for each in (scout, _level(blocks, cap, scout))]

    sign = 1 if is_upper else -1
    number = sum(count * float(part.jumps[1].sum()) for part, count in parts)
    # T − 1 steps instead of T: see above
    missing = max(float(part.jumps[1].sum()) + part.infinity for part, _ in parts)
    gained = max(float(part.mass @ np.maximum(-np.expm1(-part.losses), 0)) for part, _ in parts)
    order = max(1.0, scout.down - scout.tilt)
    return _OneJump(
        tails=tuple(tails),
        is_upper=is_upper,
        jumps=np.concatenate([part.jumps[0] for part, _ in parts]),
        numbers=np.concatenate([count * part.jumps[1] for part, count in parts])
        * (1 + sign * _ROUNDING),
        correction=missing if is_upper else -gained,
        rest=number**2 / 2 if is_upper else 0.0,
        mass=1.0 if is_upper else _power(parts, 0.0) * (1 - _ROUNDING),
        other_mass=_power(parts, -1.0) * (1 - sign * _ROUNDING),
        log_moment=sum(count * part.log_moment(-order) for part, count in parts) + _ROUNDING,
        order=order,
    )


def _power(parts: Sequence[tuple[GridLoss, int]], t: float) -> float:
    """Π M(t)^count of the bulk."""
    return math.exp(sum(count * part.log_moment(t) for part, count in parts))


def _level(blocks: Sequence[Block], cap: float, scout: Scout) -> Scout:
    """The same with hardly a tilt: sharp in the middle of the bulk, where jumps look."""
    flat = scout_of(blocks, epsilon=0.0, cap=cap)
    return replace(flat, log_delta=scout.log_delta)
