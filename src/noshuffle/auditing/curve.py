"""ε of a Gaussian mechanism, computed without the library's accountant.

    δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)            (Dong, Roth & Su, arXiv 1905.02383)

δ falls in ε, so ε of a μ at a δ is a bisection, which ends above.
μ = 0 gives ε = 0, μ = ∞ gives ∞, NaN gives ∞ (nothing is known, so nothing is promised).

>>> round(epsilon_of(1.0, delta=1e-5), 4)
4.3772
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import log_ndtr, ndtr, ndtri

#: Beyond this μ the answer is said to be infinite.
_LARGEST = 1e4


def delta_of(mu: float, *, epsilon: float) -> float:
    """The smallest δ at which a μ-GDP mechanism is (ε, δ)-DP."""
    first = float(ndtr(mu / 2 - epsilon / mu))
    second = math.exp(min(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)), 0.0))
    return max(first - second, 0.0)


def epsilon_of(mu: float, *, delta: float) -> float:
    """ε of a μ-GDP mechanism at δ, from above."""
    if mu == 0:
        return 0.0
    if not mu < _LARGEST:
        return math.inf
    if delta_of(mu, epsilon=0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(mu, epsilon=high) > delta:
        high *= 2
    low = 0.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(mu, epsilon=middle) > delta else (low, middle)
    return high


def power(mu: float, false_positives: float) -> float:
    """The largest true-positive rate of any attack on a μ-GDP mechanism at this rate of errors."""
    return float(ndtr(ndtri(false_positives) + mu))


@dataclass(frozen=True)
class MuEstimate:
    """μ̂ with a 95 % interval, and a lower limit that chance passes once in two million."""

    mu: float
    low: float
    high: float
    sure: float

    def epsilons(self, delta: float) -> tuple[float, float, float]:
        """ε at δ of μ̂ and of both ends."""
        mu, low, high = (
            epsilon_of(max(one, 0.0), delta=delta) for one in (self.mu, self.low, self.high)
        )
        return mu, low, high

    def __str__(self) -> str:
        return f"μ̂ = {self.mu:.4f} [{self.low:.4f}, {self.high:.4f}]"
