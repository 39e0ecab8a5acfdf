"""One secret position for every unit: a sampling-free bound for any Gaussian noise.

A unit is at one of b positions, uniformly and in secret; at position j it shifts the noise (in its
deviations) by at most the vector m_j ≥ 0. With K_ij = ⟨m_i, m_j⟩ both directions are means of
convex functions of one likelihood ratio under Q = N(0, 1),

    L = (1/b) Σ_j e^{X_j − K_jj/2},   X ~ N(0, K);      E(L − e^ε)₊   and   E(1 − e^ε L)₊

which grow with every entry of K (Kahane 1986), whatever the unit sends adaptively (docs/proofs.md,
"One secret position"). For a divisor w of b the positions with one residue modulo w form a class of
m = b/w, and the mean over classes is convex: with K_ij ≤ a within a class and K_jj ≤ a + d

    L = e^{√a y − a/2} · (1/m) Σ_j U_j,      U_j = e^{√d y_j − d/2} independent

A sum of m independent U on a grid, from above in convex order (each cell keeps mass and mean), is
one FFT; over y there is the Black–Scholes formula. The best w counts; w = b is no sampling at all.
No state; the record holds (m, a, d) for every w.

>>> half = Overlaps(((1, 0.0, 4.0), (10, 0.0, 4.0)))          # ten positions that do not overlap
>>> round(half.delta(noise_multiplier=2.0, epsilon=1.0), 4), half.mu(2.0)
(0.0028, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import fft as sfft
from scipy.special import ndtr, ndtri

from noshuffle.accounting import gaussian
from noshuffle.accounting.bisection import bracket, ratio_bracket
from noshuffle.accounting.loss_sum import power_error
from noshuffle.errors import non_negative, open_unit, positive

Array = np.ndarray

_MOST_POINTS = 2**20


@dataclass(frozen=True)
class Overlaps:
    """(m, a, d) of the classes: m positions, inner products at most a, squared norms at most a + d.

    The first class has one position: no sampling.
    """

    classes: tuple[tuple[int, float, float], ...]

    def mu(self, noise_multiplier: float) -> float:
        """The Gaussian parameter without sampling."""
        return math.sqrt(self.classes[0][2]) / noise_multiplier

    def delta(self, *, noise_multiplier: float, epsilon: float) -> float:
        """An upper bound of δ in both directions."""
        return float(self.deltas(np.array([epsilon]), noise_multiplier=noise_multiplier)[0])

    def deltas(self, epsilons: Array, *, noise_multiplier: float, near: float = 1e-5) -> Array:
        """The same at many ε, sharpest where δ is about `near`."""
        positive(noise_multiplier=noise_multiplier)
        mu = self.mu(noise_multiplier)
        best = np.array([gaussian.delta(mu=mu, epsilon=float(one)) for one in epsilons])
        for ratio in self._ratios(noise_multiplier, near):
            best = np.minimum(best, [ratio.delta(float(one)) for one in epsilons])
        return best

    def epsilon(self, *, noise_multiplier: float, delta: float) -> float:
        """The least ε that some class shows, to 1e-6; never below the truth."""
        open_unit(delta=delta)
        positive(noise_multiplier=noise_multiplier)
        best = gaussian.epsilon(mu=self.mu(noise_multiplier), delta=delta)
        for ratio in self._ratios(noise_multiplier, delta):
            if ratio.delta(best * (1 - 1e-6)) <= delta:
                _, best = bracket(partial(ratio.is_within, delta), 0.0, best, tolerance=1e-6)
        return best

    def noise_multiplier(self, *, epsilon: float, delta: float) -> float:
        """The least noise, to 1e-5, whose δ at ε is at most δ as evaluated."""
        positive(epsilon=epsilon)
        open_unit(delta=delta)
        high = math.sqrt(self.classes[0][2]) / gaussian.mu(epsilon=epsilon, delta=delta)
        high *= 1 + 1e-12

        def is_enough(noise: float) -> bool:
            return any(ratio.delta(epsilon) <= delta for ratio in self._ratios(noise, delta))

        return ratio_bracket(is_enough, high / 64, high, tolerance=1e-5)[1]

    def _ratios(self, noise: float, delta: float) -> Iterator[MeanRatio]:
        for count, common, own in self.classes:
            if count > 1:
                found = ratio_of(count, common / noise**2, own / noise**2, tail=1e-4 * delta)
                if found is not None:
                    yield found


@dataclass(frozen=True)
class MeanRatio:
    """Masses of (1/m) Σ U under Q, the common a, and what the grid leaves out."""

    values: Array
    mass: Array
    common: float
    rounding: Array
    rest: float

    def is_within(self, delta: float, epsilon: float) -> bool:
        """Whether δ at ε is at most this one."""
        return self.delta(epsilon) <= delta

    def delta(self, epsilon: float) -> float:
        non_negative(epsilon=epsilon)
        gamma, root, L = math.exp(min(epsilon, 700.0)), math.sqrt(self.common), self.values
        if root < 1e-9:
            call, put = np.maximum(L - gamma, 0.0), np.maximum(1 - gamma * L, 0.0)
        else:
            with np.errstate(divide="ignore"):
                x = (np.log(L) - epsilon) / root
                y = (-np.log(L) - epsilon) / root
            call = L * ndtr(x + root / 2) - gamma * ndtr(x - root / 2)
            put = ndtr(y + root / 2) - gamma * L * ndtr(y - root / 2)
        both = [
            float(self.mass @ gain) * (1 + 1e-7) + float(self.rounding @ gain) + self.rest
            for gain in (np.maximum(call, 0.0), np.maximum(put, 0.0))
        ]
        return min(1.0, max(both))


def ratio_of(count: int, common: float, own: float, *, tail: float) -> MeanRatio | None:
    """The grid, or None where it would be too large (or the class has no spread)."""
    root = math.sqrt(max(own, 0.0))
    reach = root * (root - float(ndtri(tail))) - own / 2
    if not root > 1e-6 or reach > 30:
        return None
    top, spread = math.exp(reach), math.sqrt(math.expm1(own))
    span = count + 14 * spread * math.sqrt(count) + top
    step = min(0.05 * spread, 0.25)
    if span / step > _MOST_POINTS:
        return None
    points = np.arange(math.ceil(top / step) + 1) * step
    with np.errstate(divide="ignore"):
        logs = np.log(points)
    q, p = _between((logs + own / 2) / root), _between((logs - own / 2) / root)
    right = np.clip((p - points[:-1] * q) / step, 0.0, q)  # mass and mean of every cell are kept
    mass = np.append(q - right, 0.0)
    mass[1:] += right
    size = sfft.next_fast_len(max(math.ceil(span / step), len(mass)) + 1, real=True)
    values = np.arange(size) * step / count
    out, error = _power(mass, count, size)
    # Sums beyond the window came in again from below: the mean tells how much of them.
    whole = float(points @ mass) * float(mass.sum()) ** (count - 1)
    wrapped = max(0.0, whole - float(values @ out)) + float(values @ error) + 1e-13
    far_q, far_p = float(ndtr(-(reach + own / 2) / root)), float(ndtr(-(reach - own / 2) / root))
    rest = far_p + count * far_q + 2 * wrapped
    keep = out > error
    # What is dropped is not above twice the rounding, which is charged at every point.
    kept = np.where(keep, out, 0.0)
    return MeanRatio(values, kept, common, 2 * error, rest)


def _power(mass: Array, count: int, size: int) -> tuple[Array, Array]:
    """The cyclic convolution power of masses, and a bound on its errors."""
    total = float(mass.sum())
    spectrum = sfft.rfft(mass / total, size)
    spectrum = np.exp(count * np.log(np.where(spectrum == 0, 1e-300, spectrum)))
    out = sfft.irfft(spectrum, size)
    error = power_error(spectrum, size, count, count * float(np.linalg.norm(mass)) / total)
    back = np.exp(min(count * math.log(total), 700.0))
    return out * back, np.full(size, error * back * (1 + 1e-9))


def _between(x: Array) -> Array:
    """Normal probabilities of the intervals, with their digits in both tails."""
    high = ndtr(-x[:-1]) - ndtr(-x[1:])
    return np.asarray(np.where(x[:-1] > 0, high, ndtr(x[1:]) - ndtr(x[:-1])))
