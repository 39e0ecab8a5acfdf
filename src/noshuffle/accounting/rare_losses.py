"""Sums of losses of which a few are rare and large: at most one of them is followed exactly.

At small sampling rates the sum of T losses is narrow unless the unit is drawn and seen in one of
the steps, which the far tail of one step alone decides. No exponential tilt suits both. So the
atoms p of a step are cut at a cap, p = b + r with r (the jumps) above it, and

    p^T = b^T + Σ_i b^(T−1) r_i + (two jumps or more),      P(two or more) ≤ (Σ r)²/2

(powers are convolutions). The first term is a tilted transform as in `loss_sum`, with the moments
of b only. In the second δ_b(ε − l) is averaged over the jumps l; δ of T − 1 steps is at most that
of T steps plus ‖r‖, since a mean of a convex function is not below its value at the mean. The last
term is added. Where ε − l lies below all of the bulk, δ_b(e) ≤ 1 − e^e Q(b)^T + E(e^{e−S} − 1)₊,
and that mean is at most M(−t) e^{te}. All are upper bounds. No state.

>>> from noshuffle.accounting.mixture import remove_pair
>>> block = [(remove_pair(noise_multiplier=0.646, rate=3e-6), 237_501)]
>>> round(epsilon_of(block, delta=1.9e-9), 3)
0.055
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noshuffle.accounting.bisection import bracket
from noshuffle.accounting.loss_distribution import above
from noshuffle.accounting.loss_sum import Tail, tail_of
from noshuffle.accounting.mixture import Joined, Pair
from noshuffle.accounting.scout import ACCURACY, MOST_POINTS, Block, one_tail, outline, scout_of

Array = np.ndarray

#: Two jumps have at most this share of δ.
_TWO_JUMPS = 1e-4
#: Jumps are followed apart where Chernoff's ε falls below this share without them.
_WORTH_IT = 0.9
_ROUNDING = 1e-9
#: Larger rates are as well served by one grid.
_RATE = 1e-3
_MOST_BLOCKS = 4


def epsilon_of(blocks: Sequence[Block], *, delta: float) -> float:
    """ε at δ, from above; infinite where nothing is gained."""
    cap = _cap_of(blocks, delta)
    if cap is None:
        return math.inf
    bound = _bound(blocks, cap, delta)
    most = scout_of(blocks, log_delta=math.log(delta)).epsilon

    def fits(epsilon: float) -> bool:
        return bound.delta(epsilon) <= delta

    if not fits(most):
        return math.inf
    return 0.0 if fits(0.0) else bracket(fits, 0.0, most, tolerance=1e-6)[1]


def delta_of(blocks: Sequence[Block], *, epsilon: float) -> float:
    """δ at ε, from above; infinite where nothing is gained."""
    near, best = math.exp(max(scout_of(blocks, epsilon=epsilon).log_delta, -650.0)), math.inf
    for _ in range(12):  # each bound is made for a δ: go on from what it shows
        cap = _cap_of(blocks, near) if near < 1 else None
        if cap is not None:
            found = _bound(blocks, cap, near).delta(epsilon)
            best = min(best, found)
            if found < 1e-250 or abs(math.log(found / near)) < 0.3:
                break
            near = found
        elif best < math.inf or near < 1e-250:
            break
        else:  # Chernoff's δ is far too large where single steps decide
            near *= 0.02
    return best


def _cap_of(blocks: Sequence[Block], delta: float) -> float | None:
    """The loss above which jumps are counted apart; None where that would gain nothing."""
    if len(blocks) > _MOST_BLOCKS or max(map(_rate, blocks)) > _RATE:  # one grid does for all
        return None
    log_delta = math.log(delta)
    found = [(outline(pair, one_tail(blocks, log_delta)), count) for pair, count in blocks]
    losses = np.concatenate([loss for (loss, _), _ in found])
    numbers = np.concatenate([count * np.exp(log_p) for (_, log_p), count in found])
    order = np.argsort(-losses)
    rare = losses[order][np.cumsum(numbers[order]) <= math.sqrt(2 * _TWO_JUMPS * delta)]
    if not len(rare) or rare[-1] <= 0:
        return None
    cap = float(rare[-1])
    narrow = scout_of(blocks, log_delta=log_delta, cap=cap)
    plain = scout_of(blocks, log_delta=log_delta)
    return cap if narrow.epsilon < _WORTH_IT * plain.epsilon else None


def _rate(block: Block) -> float:
    pair = block[0].over if isinstance(block[0], Joined) else block[0]
    return pair.upper[-1][0] if isinstance(pair, Pair) else 1.0


@dataclass(frozen=True)
class _OneJump:
    """δ of the bulk by several transforms, and the jumps with their expected numbers."""

    tails: tuple[Tail, ...]
    jumps: Array
    numbers: Array
    correction: float
    rest: float
    other_mass: float
    log_moment: float
    order: float

    def bulk(self, epsilon: Array) -> Array:
        known = 1.0 - np.exp(np.minimum(epsilon, 700.0)) * self.other_mass
        far = np.exp(np.minimum(self.log_moment + self.order * epsilon, 700.0))
        found = [tail.delta(epsilon) for tail in self.tails]
        return np.asarray(np.minimum.reduce([*found, known + far]))

    def delta(self, epsilon: float) -> float:
        alone = float(self.bulk(np.array([epsilon]))[0])
        after = self.bulk(epsilon - self.jumps) + self.correction
        return min(1.0, alone + float(self.numbers @ np.clip(after, 0.0, 1.0)) + self.rest)


def _bound(blocks: Sequence[Block], cap: float, delta: float) -> _OneJump:
    """The bound with jumps above the cap, sharpest near δ."""
    scout = scout_of(blocks, log_delta=math.log(delta), cap=cap)
    steps, width = sum(count for _, count in blocks), scout.high - scout.low
    step = math.sqrt(12 * ACCURACY * max(scout.epsilon, 0.02 * width) / (steps * (scout.tilt + 1)))
    step = max(min(step, 0.2 / (scout.tilt + 1)), 2 * max(width, cap) / MOST_POINTS)
    tail = one_tail(blocks, scout.log_delta)
    parts = [(above(pair, step=step, tail=tail, cap=cap), count) for pair, count in blocks]
    # with hardly a tilt: sharp in the middle of the bulk, where jumps look
    flat = scout_of(blocks, epsilon=0.0, cap=cap)
    number = sum(count * float(part.jumps[1].sum()) for part, count in parts)
    order = max(1.0, scout.down - scout.tilt)
    return _OneJump(
        tails=tuple(tail_of(parts, each, is_upper=True) for each in (scout, flat)),
        jumps=np.concatenate([part.jumps[0] for part, _ in parts]),
        numbers=np.concatenate([n * part.jumps[1] for part, n in parts]) * (1 + _ROUNDING),
        correction=max(float(part.jumps[1].sum()) + part.infinity for part, _ in parts),
        rest=number**2 / 2,
        other_mass=math.exp(sum(n * part.log_moment(-1.0) for part, n in parts)) * (1 - _ROUNDING),
        log_moment=sum(n * part.log_moment(-order) for part, n in parts) + _ROUNDING,
        order=order,
    )
