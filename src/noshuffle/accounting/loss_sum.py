"""The distribution of a sum of grid losses, by one tilted FFT, with every error accounted.

Let p be the masses of one step on the grid, M(t) = Σ p e^{t·loss}, and p̃ = p e^{λ·loss}/M(λ). The
cyclic convolution power of p̃ over N points is c(s) = Σ_k p̃*(s + kNh): what falls out of the
window comes in again at the other end, as extra positive mass. Hence with w(s) = (1 − e^{ε−s})₊

    Σ c(s) M^T e^{−λs} w(s)   ≥   the part of δ(ε) inside the window,

and exceeds it by at most P̃(outside) · max M^T e^{−λs} w(s). Both tails follow from Chernoff's
inequality with the grid's own moments: P̃(S ≥ b) ≤ (M(λ+t)/M(λ))^T e^{−tb}. The rounding of the
transforms is bounded in norm (relative error at most a constant times u·log₂N; the power T
multiplies it by T, Cauchy–Schwarz carries it to each point) and added to, or subtracted from,
every c(s). Upper bounds add, lower bounds subtract. λ, window and step h: `scout`. No state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import fft as sfft
from scipy.special import xlogy

from noshuffle.accounting.loss_distribution import GridLoss, above, below
from noshuffle.accounting.scout import (
    MOST_POINTS,
    OUTSIDE,
    Block,
    Scout,
    one_tail,
    scout_of,
)
from noshuffle.errors import Unsupported

Array = np.ndarray

#: Relative error of one grid mass (quadrature and rounding). An absolute error of an atom at loss 0
#: counts alike: with n of T steps replaced by "nothing happened" δ does not grow.
_MASS_ERROR = 2e-13
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Tail:
    """A bound on δ(ε) as sums over the grid points s_j = first + j·step, scaled by e^{reference}.

        δ(ε) = e^{reference} (above[j] − e^{ε−centre} shifted[j] − alias e^{−λ(ε−centre)}) + rest

    with the sums over the grid points from s_j > ε on (the last one empty). Below the first point
    `under` is added.
    """

    first: float
    step: float
    centre: float
    tilt: float
    reference: float
    above: Array
    shifted: Array
    alias: float
    rest: float
    under: float

    def delta(self, epsilon: Array | float) -> Array:
        """δ at one ε or at many."""
        epsilon = np.asarray(epsilon, dtype=float)
        j = np.clip(np.floor((epsilon - self.first) / self.step) + 1, 0, len(self.above) - 1)
        j, gap = j.astype(np.int64), epsilon - self.centre
        value = self.above[j] - np.exp(np.minimum(gap, 700.0)) * self.shifted[j]
        value = value - self.alias * np.exp(np.minimum(-self.tilt * gap, 700.0))
        with np.errstate(divide="ignore"):
            log_value = np.log(np.maximum(value, 0.0)) + self.reference
        missing = np.where(epsilon < self.first, self.under, 0.0)
        out = np.exp(np.minimum(log_value, 1.0)) + self.rest + missing
        return np.asarray(np.minimum(1.0, out))

    def epsilon(self, delta: float, *, is_upper: bool) -> float:
        """Where the curve meets delta, or the first point if it is always below; at least 0."""
        if delta <= self.rest:
            return math.inf
        goal = math.exp(min(math.log(delta - self.rest) - self.reference, 700.0))
        points = self.first + self.step * np.arange(len(self.above) - 2)
        gap = points - self.centre
        alias = self.alias * np.exp(-self.tilt * gap)
        # Far above the centre the factor would overflow; a smaller one keeps the curve too high.
        at_points = self.above[1:-1] - np.exp(np.minimum(gap, 700.0)) * self.shifted[1:-1] - alias
        higher = np.flatnonzero(~(at_points <= goal))  # ∞ − ∞ is not known to be below
        if not len(higher):
            return max(0.0, self.first) if is_upper else 0.0
        j = int(higher[-1])  # the alias only falls from here to the next point
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (self.above[j + 1] - alias[j] - goal) / self.shifted[j + 1]
        if not 0 < ratio < math.inf:  # rounding: the curve is not resolved here
            return math.inf if is_upper else 0.0
        root = self.centre + math.log(ratio)
        root += (1 if is_upper else -1) * 1e-13 * (1 + abs(self.centre))
        return max(0.0, root)


def epsilon_of(
    blocks: Sequence[Block],
    *,
    delta: float,
    is_upper: bool,
    step: float,
) -> float:
    """ε at δ of the composed blocks, from above or from below, on a grid of the given step."""
    scout = scout_of(blocks, log_delta=math.log(delta))
    return _tail(blocks, scout, is_upper, step).epsilon(delta, is_upper=is_upper)


def delta_of(blocks: Sequence[Block], *, epsilon: float, is_upper: bool, step: float) -> float:
    """δ at ε of the composed blocks, from above or from below, on a grid of the given step."""
    scout = scout_of(blocks, epsilon=epsilon)
    for _ in range(4):
        scout = replace(scout, log_delta=scout.log_delta - 10)
        tail = _tail(blocks, scout, is_upper, step)
        value = float(tail.delta(epsilon))
        # else Chernoff's δ was far too large: cut the tails later
        if tail.rest <= 1e-5 * value or scout.log_delta < -650:
            break
    return value


def curve_of(blocks: Sequence[Block], epsilons: Array, *, delta: float, step: float) -> Array:
    """δ at many ε of the composed blocks, from above, by one transform; sharpest near δ."""
    tail = _tail(blocks, scout_of(blocks, log_delta=math.log(delta)), True, step)
    return tail.delta(epsilons)


def _tail(blocks: Sequence[Block], scout: Scout, is_upper: bool, step: float) -> Tail:
    tail, build = one_tail(blocks, scout.log_delta), above if is_upper else below
    parts = [(build(pair, step=step, tail=tail), count) for pair, count in blocks]
    return tail_of(parts, scout, is_upper)


def tail_of(parts: Sequence[tuple[GridLoss, int]], scout: Scout, is_upper: bool) -> Tail:
    """The sum of steps that are on one grid; their jumps are left out."""
    step = parts[0][0].step

    def log_moment(t: float) -> float:
        return sum(count * part.log_moment(t) for part, count in parts)

    lam, up, down = scout.tilt, scout.up, scout.down
    log_m = log_moment(lam)
    log_up, log_down = log_moment(lam + up) - log_m, log_moment(lam - down) - log_m
    # the window of this grid's own sum: its moments differ a little from the scouted ones
    high = max(scout.high, (log_up - math.log(OUTSIDE)) / up)
    low = min(scout.low, -(log_down - math.log(OUTSIDE)) / down)
    points = sfft.next_fast_len(math.ceil((high - low) / step) + 2, real=True)
    points = min(points, 2 * MOST_POINTS)
    mass, rounding = _power(parts, lam, points)
    if not np.isfinite(mass).all():  # a comparison would pass over it, on the unsafe side
        raise Unsupported(
            "these losses could not be added up in floating point (0·∞ at the tilt taken); "
            "use RDP, or another delta"
        )

    anchor = sum(count * part.anchor for part, count in parts)
    index = math.floor((low - anchor) / step)
    mass = np.roll(mass, -(index % points))
    losses = anchor + step * (index + np.arange(points))
    top = float(losses[-1]) + step
    log_over = log_up - up * top
    log_under = log_down + down * float(losses[0] - step)
    keep = int(np.searchsorted(losses, scout.centre - 600.0 / (lam + 1)))  # no overflow below
    losses, mass = losses[keep:], mass[keep:]
    relative = 1 + sum(count for _, count in parts) * _MASS_ERROR
    mass = (mass + rounding) * relative if is_upper else (mass - rounding) / relative
    gap = losses - scout.centre
    weighted = np.maximum(mass, 0.0) * np.exp(-lam * gap)
    alias = rest = under = 0.0
    if is_upper:
        lost = math.exp(min(0.0, log_m + log_over - lam * top))
        rest = lost - math.expm1(sum(n * math.log1p(-part.infinity) for part, n in parts))
        log_below = log_m + log_down - (lam - down) * float(losses[0])
        under = 1.0 if lam >= down else math.exp(min(0.0, log_below))
    else:  # wrapped mass counts at most where e^{−λs}(1 − e^{ε−s}) is largest
        outside = math.exp(min(0.0, log_over)) + math.exp(min(0.0, log_under))
        alias = outside * math.exp(xlogy(lam, lam) - xlogy(1 + lam, 1 + lam))
    return Tail(
        first=float(losses[0]),
        step=step,
        centre=scout.centre,
        tilt=lam,
        reference=log_m - lam * scout.centre,
        above=np.append(np.cumsum(weighted[::-1])[::-1], 0.0),
        shifted=np.append(np.cumsum((weighted * np.exp(-gap))[::-1])[::-1], 0.0),
        alias=alias,
        rest=rest,
        under=under,
    )


def _power(parts: Sequence[tuple[GridLoss, int]], lam: float, points: int) -> tuple[Array, float]:
    """Tilted cyclic convolution of all parts, and a bound on the error of each of its points."""
    # Only frequencies whose power is above e^{−90} are followed: usually few.
    alive = np.arange(points // 2 + 1)
    log_f = np.zeros(len(alive), dtype=complex)
    per_step = 0.0
    for part, count in parts:
        tilted, there = np.zeros(len(part.mass)), part.mass > 0
        # masses in the exponent: e^{λ·loss}/M alone may overflow where they are tiny
        exponent = lam * part.losses[there] - part.log_moment(lam)
        tilted[there] = np.exp(exponent + np.log(part.mass[there]))
        index = (part.start + np.arange(len(tilted))) % points
        folded = np.bincount(index, tilted, points)
        transform = sfft.rfft(folded)[alive]
        is_alive = np.abs(transform) > math.exp(-90.0 / count)
        alive = alive[is_alive]
        log_f = log_f[is_alive] + count * np.log(transform[is_alive])
        per_step += count * float(np.linalg.norm(folded))
    spectrum = np.zeros(points // 2 + 1, dtype=complex)
    spectrum[alive] = np.exp(log_f)
    steps = sum(count for _, count in parts)
    return sfft.irfft(spectrum, points), power_error(spectrum, points, steps, per_step) + 1e-38


def power_error(spectrum: Array, points: int, steps: int, norms: float) -> float:
    """A bound on the rounding of each point: of the power `steps` by its half spectrum, where the
    norms of all factors add up to `norms`."""
    # ‖spectrum‖ / √N: twice the half spectrum, by Parseval
    size = math.sqrt(2.0 * float(np.sum(np.abs(spectrum) ** 2)) / points)
    mean = 2.0 * float(np.sum(np.abs(spectrum))) / points
    return 6 * _UNIT * math.log2(points) * size * (1 + 2 * norms) + 8 * _UNIT * (steps + 50) * mean
