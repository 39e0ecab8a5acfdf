"""Dominating pairs of Gaussian mixtures: what one sampled Gaussian step looks like to an attacker.

    remove        P = (1 − q) N(0, σ²) + q N(1, σ²)      Q = N(0, σ²)
    add           the two exchanged (and mirrored, so that the loss still grows with x)
    replace       P = (1 − q) N(0, σ²) + q N(1, σ²)      Q = (1 − q) N(0, σ²) + q N(−1, σ²)
    mixture       P = Σ p_i N(c_i, σ²)                   Q = N(0, σ²)

The first two are the tight pair for Poisson sampling with add/remove neighbours (Zhu, Dong, Wang,
2022). The third is for replace-one neighbours: two contributions of the clip norm in opposite
directions, and no other replacement is worse (docs/proofs.md, "One unit for another"). The last is
for banded noise and other sums over several steps (Choquette-Choo et al., 2024). Losses are
computed so that small ones keep their relative accuracy. Batches of a fixed size are in
`fixed_size`. No state.

>>> pair = remove_pair(noise_multiplier=1.0, rate=0.5)
>>> float(pair.loss(np.array([0.5]))[0])
0.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from noshuffle.errors import InvalidInput, non_negative, positive, unit_rate

Array = np.ndarray
Mixture = tuple[tuple[float, float], ...]

#: Exponents above this are added up in logarithms.
_LARGE = 30.0


def _log_ratio(mixture: Mixture, x: Array, variance: float) -> Array:
    """log of (mixture density / N(0, σ²) density) at x."""
    small = np.zeros_like(x)
    exponents = []
    for weight, mean in mixture:
        if mean != 0:
            e = (2 * mean * x - mean**2) / (2 * variance)
            exponents.append((weight, e))
            small += weight * np.expm1(np.minimum(e, _LARGE))
    if not exponents:
        return small
    with np.errstate(divide="ignore"):
        out: Array = np.log1p(small)
    top = np.maximum.reduce([e for _, e in exponents])
    # with total weight one at means ≠ 0 the logarithm of 1 + small meets minus infinity
    large = (top > _LARGE) | (small < -0.5)
    if np.any(large):
        rest = sum(w for w, m in mixture if m == 0)
        logs = [np.full(int(large.sum()), math.log(rest))] if rest > 0 else []
        logs += [math.log(w) + e[large] for w, e in exponents]
        out[large] = np.logaddexp.reduce(logs)
    return out


@dataclass(frozen=True)
class Pair:
    """P over Q with one σ; each mixture is ((weight, mean), …). The loss grows with x."""

    sigma: float
    upper: Mixture
    lower: Mixture
    #: A loss that many outcomes share, put on the grid so that they need no rounding.
    anchor: float = 0.0
    #: Where the loss grows, if not everywhere; a `Joined` needs no other part of it.
    within: tuple[float, float] = (-math.inf, math.inf)

    def mirrored(self) -> Pair:
        """Q over P, mirrored, so that the loss still grows with x."""
        upper, lower = (
            tuple((weight, 0.0 - mean) for weight, mean in side)
            for side in (self.lower, self.upper)
        )
        return Pair(self.sigma, upper, lower, -self.anchor, (-self.within[1], -self.within[0]))

    def loss(self, x: Array) -> Array:
        """log P(x)/Q(x)."""
        variance = self.sigma**2
        return np.asarray(_log_ratio(self.upper, x, variance) - _log_ratio(self.lower, x, variance))

    def density(self, x: Array) -> Array:
        """Density of P at x."""
        out = np.zeros_like(x)
        scale = 1 / (self.sigma * math.sqrt(2 * math.pi))
        for weight, mean in self.upper:
            out += weight * scale * np.exp(-0.5 * ((x - mean) / self.sigma) ** 2)
        return out

    def inverse(self, losses: Array, x_low: float, x_high: float) -> Array:
        """x with the given losses, in closed form for plain Poisson sampling, else by search."""
        variance = self.sigma**2
        if self.lower == ((1.0, 0.0),) and len(self.upper) == 2 and self.upper[0][1] == 0:
            return _invert(losses, self.upper[1], variance)
        if self.upper == ((1.0, 0.0),) and len(self.lower) == 2 and self.lower[0][1] == 0:
            return _invert(-losses, self.lower[1], variance)
        table = np.linspace(x_low, x_high, 8193)
        values = np.maximum.accumulate(self.loss(table))
        k = np.clip(np.searchsorted(values, losses) - 1, 0, len(table) - 2)
        low, high = table[k], table[k + 1]
        for _ in range(48):  # bisection: the bracket is 1/8192 of the range to begin with
            middle = 0.5 * (low + high)
            is_less = self.loss(middle) < losses
            low = np.where(is_less, middle, low)
            high = np.where(is_less, high, middle)
        return np.where(losses <= values[0], x_low, np.where(losses >= values[-1], x_high, high))


@dataclass(frozen=True)
class Joined:
    """One pair whose curve H(e^ε) is that of `over` for ε ≥ 0 and of `under` for ε < 0.

    Both must agree at ε = 0, with `under` the steeper one there: then the curve is convex, and what
    the two do not explain of P is an atom at loss 0.
    """

    over: Pair
    under: Pair
    anchor: float = 0.0


def _invert(losses: Array, component: tuple[float, float], variance: float) -> Array:
    """x at which log(1 − q + q e^{(2mx − m²)/(2σ²)}) has the given values."""
    weight, mean = component
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.expm1(np.minimum(losses, _LARGE)) / weight
        # e^L/q leaves floating point before L does: large losses are inverted in logarithms
        large = losses + np.log1p((weight - 1) * np.exp(-np.maximum(losses, _LARGE)))
        e = np.where(losses > _LARGE, large - math.log(weight), np.log1p(np.maximum(inner, -1.0)))
    return np.asarray((e * variance + 0.5 * mean**2) / mean)


def remove_pair(*, noise_multiplier: float, rate: float) -> Pair:
    """Poisson sampling; the loss of a data set with the unit against the one without."""
    positive(noise_multiplier=noise_multiplier)
    unit_rate(rate=rate)
    upper = ((1 - rate, 0.0), (rate, 1.0)) if rate < 1 else ((1.0, 1.0),)
    anchor = math.log1p(-rate) if rate < 1 else 0.0
    return Pair(noise_multiplier, upper, ((1.0, 0.0),), anchor)


def add_pair(*, noise_multiplier: float, rate: float) -> Pair:
    """Poisson sampling; the loss of a data set without the unit against the one with it."""
    return remove_pair(noise_multiplier=noise_multiplier, rate=rate).mirrored()


def replace_pair(*, noise_multiplier: float, rate: float) -> Pair:
    """Poisson sampling, one unit replaced; noise counted in the clip norm of one contribution."""
    pair = remove_pair(noise_multiplier=noise_multiplier, rate=rate)
    return replace(pair, lower=pair.mirrored().lower, anchor=0.0)


def mixture_pairs(
    *, noise_multiplier: float, sensitivities: Sequence[float], weights: Sequence[float]
) -> tuple[Pair, Pair]:
    """(remove, add) for a step that moves the sum by c_i ≥ 0 with probability p_i."""
    positive(noise_multiplier=noise_multiplier)
    for c, p in zip(sensitivities, weights):
        non_negative(sensitivity=c, weight=p)
    if len(sensitivities) != len(weights) or abs(sum(weights) - 1) > 1e-9:
        raise InvalidInput(
            "weights must pair up with sensitivities and sum to 1, got "
            f"{list(weights)!r} for {list(sensitivities)!r}"
        )
    kept = sorted((float(c), float(p)) for c, p in zip(sensitivities, weights) if p > 0)
    total = sum(p for _, p in kept)
    upper = tuple((p / total, c) for c, p in kept)
    if upper[-1][1] == 0:
        raise InvalidInput("at least one sensitivity with positive weight must be above 0")
    anchor = math.log(upper[0][0]) if upper[0][1] == 0 else 0.0
    remove = Pair(noise_multiplier, upper, ((1.0, 0.0),), anchor)
    return remove, remove.mirrored()
