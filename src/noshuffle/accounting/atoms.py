"""Loss distributions of any mechanism: a few outcomes, a label that is known, a privacy profile.

    Atoms       losses with their P-masses, and the mass at infinity
    Blend       a known label decides which pair is met: δ(ε) = Σ w_i δ_i(ε)

    randomized_response   ±ε, and with probability δ everything: the worst (ε, δ)-private mechanism
                          (Kairouz, Oh, Viswanath 2015)
    discrete              P and Q over finitely many outcomes
    laplace               one number with Laplace noise: an atom at ±ε₀, a density between them
    profile               any mechanism with δ(ε_k) ≤ δ_k in both directions: the chords of these
                          points in e^ε ("connect the dots", Doroshenko et al. 2022)
    truncated_pairs       Poisson batches that are cut to a cap

A profile for ε ≥ 0 in both directions is one curve: H(e^−ε) = 1 − e^−ε (1 − δ(ε)). Its points lie
above a convex curve, so the convex hull from below does too; the hull's kinks at γ = e^ε have the
Q-mass by which the slope grows there, and γ times as much P-mass.

Poisson batches of rate q from n units with a cap B, the rest left out at random: whoever joins
moves the sum by one clip norm, or by two where a full batch loses another for it. With the others'
batch and order known, that is one sampled Gaussian step, of noise z at rate q where fewer than B
others came, of noise z/2 at rate q B/(k + 1) where k ≥ B came. The others are n − 1 or n; with one
more coin for n − 1 of them, K ~ Binomial(n, q) is k or k + 1, so a label K < B is met with (z, q)
and K ≥ B with (z/2, q B/K) at most. Labels are binned, with the largest rate of each bin; they
are the same with and without the unit, and the curve is jointly convex.

A unit that is zeroed out keeps its place: of a full batch another goes for it all the same. There
the pair is that of `fixed_size`, of noise z at rate q B/K, which is not below (z, q) at K = B. No
state.

>>> response = randomized_response(epsilon=1.0)
>>> round(float(response.masses.sum()), 12), response.infinity
(1.0, 0.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import bdtrc

from noshuffle.accounting import fixed_size
from noshuffle.accounting.mixture import Joined, Pair, add_pair, remove_pair
from noshuffle.errors import InvalidInput, non_negative, positive, unit_rate, whole

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Atoms:
    """P-masses at finite losses, and P-mass where Q has none."""

    losses: Array
    masses: Array
    infinity: float = 0.0
    anchor: float = 0.0

    def delta(self, epsilon: float) -> float:
        """δ(ε) of one such mechanism."""
        gains = -np.expm1(np.minimum(epsilon - self.losses, 0.0))
        return float(self.masses @ gains) + self.infinity


@dataclass(frozen=True)
class Blend:
    """Pairs with weights that sum to one; which one is met is known to everybody."""

    parts: tuple[tuple[float, Pair | Joined], ...]

    @property
    def anchor(self) -> float:
        return self.parts[0][1].anchor


#: What one step may look like.
Loss = Pair | Joined | Blend | Atoms


def randomized_response(*, epsilon: float, delta: float = 0.0) -> Atoms:
    """The pair that dominates every (ε, δ)-private mechanism."""
    non_negative(epsilon=epsilon, delta=delta)
    if delta > 1:
        raise InvalidInput(f"delta must be at most 1, got {delta!r}")
    more = 1 / (1 + math.exp(-epsilon))
    return Atoms(np.array([-epsilon, epsilon]), (1 - delta) * np.array([1 - more, more]), delta)


def discrete(upper: Array, lower: Array) -> tuple[Atoms, Atoms]:
    """P over Q, and Q over P, of two distributions on the same finitely many outcomes."""
    p, q = (np.asarray(each, dtype=float) for each in (upper, lower))
    for mass in (p, q):
        if mass.ndim != 1 or mass.shape != p.shape or not np.all(mass >= 0):
            raise InvalidInput("upper and lower must be probabilities of the same outcomes")
        if abs(float(mass.sum()) - 1) > 1e-9:
            raise InvalidInput(f"probabilities must sum to 1, got {float(mass.sum())!r}")

    def over(p: Array, q: Array) -> Atoms:
        both = (p > 0) & (q > 0)
        short = 1 - float(p.sum())  # what is missing of 1, beyond rounding, is charged
        lost = float(p[q == 0].sum()) + (short if short > 1e-14 else 0.0)
        return Atoms(np.log(p[both] / q[both]), p[both], lost)

    return over(p, q), over(q, p)


def laplace(*, scale: float, sensitivity: float = 1.0, cells: int = 4096) -> Atoms:
    """One number with Laplace noise, from above; both directions are alike.

    The density of the loss l under P is e^{(l − ε₀)/2}/4 between −ε₀ and ε₀; P and Q of every cell
    are kept and moved to its ends.
    """
    positive(scale=scale, sensitivity=sensitivity)
    whole(cells=cells)
    top = sensitivity / scale
    ends = np.linspace(-top, top, cells + 1)
    p = np.diff(np.exp((ends - top) / 2)) / 2
    q = -np.diff(np.exp(-(ends + top) / 2)) / 2
    width = float(ends[1] - ends[0])
    right = np.clip((p - q * np.exp(ends[:-1])) / -math.expm1(-width), 0.0, p)
    masses = np.zeros(cells + 1)
    masses[:-1] += p - right
    masses[1:] += right
    masses[0] += math.exp(-top) / 2
    masses[-1] += 0.5
    return Atoms(ends, masses)


def profile(epsilons: Array, deltas: Array) -> Atoms:
    """A mechanism of which only δ(ε_k) ≤ δ_k is known, in both directions, at increasing ε_k ≥ 0.

    Guarantees: its curve, and that of any composition, is not above the result's.
    """
    e, d = (np.asarray(each, dtype=float) for each in (epsilons, deltas))
    fine = e.ndim == 1 and e.shape == d.shape and len(e) > 0 and bool(np.all(np.isfinite(e)))
    if not fine or e[0] < 0 or np.any(np.diff(e) <= 0) or np.any(d < 0) or not np.all(d <= 1):
        raise InvalidInput("a profile needs increasing finite ε ≥ 0, and a δ in [0, 1] for each")
    back = e > 0
    gamma = np.concatenate([[0.0], np.exp(-e[back][::-1]), np.exp(e)])
    mirror = 1 - np.exp(-e[back]) * (1 - d[back])
    H = np.concatenate([[1.0], mirror[::-1], d])
    kept: list[int] = []
    for i in range(len(gamma)):  # the convex hull from below
        while len(kept) > 1 and _turns_up(gamma, H, kept[-2], kept[-1], i):
            kept.pop()
        kept.append(i)
    gamma, H = gamma[kept], np.minimum.accumulate(H[kept])
    slopes = np.append(np.diff(H) / np.diff(gamma), 0.0)
    kink = np.maximum(np.diff(slopes), 0.0)
    losses, masses = np.log(gamma[1:]), gamma[1:] * kink
    return Atoms(losses, masses, max(float(H[-1]), 1 - float(masses.sum())))


def _turns_up(x: Array, y: Array, a: int, b: int, c: int) -> bool:
    """Whether b lies on or above the line from a to c."""
    return bool((y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a]))


def truncated_pairs(
    *, noise_multiplier: float, rate: float, cap: int, population: int, is_zeroed: bool = False
) -> tuple[Blend, Blend]:
    """(remove, add) of Poisson batches that are cut to `cap` units; the unit may keep its place."""
    positive(noise_multiplier=noise_multiplier)
    unit_rate(rate=rate)
    whole(cap=cap, population=population)
    width = max(1, math.ceil(math.sqrt(population * rate * (1 - rate)) / 6))
    is_rare = bdtrc(cap - 1, population, rate) < 1e-6
    counts = [min(cap + width * i, population + 1) for i in range(1 if is_rare else 6)]
    tails = [min(1.0, float(bdtrc(n - 1, population, rate)) * (1 + 1e-9)) for n in counts]
    removed, added = fixed_size.removed_pair, fixed_size.added_pair
    zeroed, unzeroed = fixed_size.zeroed_pair, fixed_size.unzeroed_pair
    swaps = (zeroed, unzeroed) if is_zeroed else (removed, added)
    blends = []
    for make, make_swap in zip((remove_pair, add_pair), swaps, strict=True):
        own = make(noise_multiplier=noise_multiplier, rate=rate)
        if is_zeroed:  # the parts of a `Joined` meet at 0
            own = replace(own, anchor=0.0)
        parts: list[tuple[float, Pair | Joined]] = [(1 - tails[0], own)]
        for count, tail, after in zip(counts, tails, [*tails[1:], 0.0], strict=True):
            if tail > after:
                swap = make_swap(noise_multiplier=noise_multiplier, rate=rate * cap / count)
                parts.append((tail - after, swap))
        blends.append(Blend(tuple(parts)))
    return blends[0], blends[1]
