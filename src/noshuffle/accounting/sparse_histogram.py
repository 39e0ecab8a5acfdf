"""Counts of values nobody listed beforehand, with normal noise, shown above a threshold: exact δ.

A row has one value in each of m columns. Values that occur are counted, N(0, σ²) is added, and
those whose noisy count passes T are shown (Korolova et al. 2009; Gaussian: Wilkins, Kifer, Zhang,
Karrer 2024). Let D' be D with one row's values gone ("zero-out"), j of which only that row has.
The other m − j counts are shown or hidden by what both tables have noise for: post-processing of
a Gaussian mechanism of sensitivity √(m − j). A single value stays hidden under D with probability
τ = Φ((T − 1)/σ), and under D' for certain; if one is shown, D is known. So, all of it exact,

    δ_{D‖D'}(ε) = 1 − τ^j + τ^j·δ_G(ε + j·ln(1/τ); √(m−j)/σ),
    δ_{D'‖D}(ε) = δ_G(ε − j·ln(1/τ); √(m−j)/σ),                     δ_G(ε; μ): any real ε

and δ(ε) is the largest of both over j = 0 … m. Where the row is replaced, j values leave, i come:
1 − τ^j + τ^j·δ_G(ε + (j − i)·ln(1/τ); √(2m − i − j)/σ), the largest over i and j.

**As a Gaussian mechanism that fails** with probability s = 1 − τ^m, μ = √m/σ (√(2m)/σ): δ(ε) ≤
s + (1 − s)·δ_G(ε; μ). For i ≤ j this is plain. For a = (i − j)·ln(1/τ) > 0 let S be optimal at
ε − a; e^ε·P(S) = e^a·e^{ε−a}P(S) = e^a·(Q(S) − δ_G(ε−a)) and δ_G(ε−a) ≤ δ_G(ε) +
(1 − e^{−a})e^ε·P(S) give δ_G(ε−a) ≤ e^{−a}δ_G(ε) + 1 − e^{−a}. That is the currency of budgets
(`gdp`). No state.

>>> law = SparseHistogram.fit(epsilon=0.5, delta=1e-6, columns=2)
>>> round(law.sigma, 2), round(law.threshold, 2), 0.999e-6 < law.delta(0.5) <= 1e-6
(11.4, 56.74, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from noshuffle.accounting import gaussian
from noshuffle.errors import one_of, open_unit, positive, whole

#: What evaluations of normal tails may be wrong by, absolutely.
_ROUNDING = 1e-15


@dataclass(frozen=True, kw_only=True)
class SparseHistogram:
    """Noise σ and threshold T for tables of so many columns."""

    sigma: float
    threshold: float
    columns: int
    neighbours: str = "zero-out"

    def __post_init__(self) -> None:
        positive(sigma=self.sigma, threshold=self.threshold)
        whole(columns=self.columns)
        one_of(("zero-out", "replace-one"), neighbours=self.neighbours)

    @property
    def squared_sensitivity(self) -> float:
        return self.columns * (2.0 if self.neighbours == "replace-one" else 1.0)

    @property
    def mu(self) -> float:
        return math.sqrt(self.squared_sensitivity) / self.sigma

    @property
    def _log_hidden(self) -> float:
        """ln τ: a value that one row has stays hidden."""
        return float(log_ndtr((self.threshold - 1) / self.sigma))

    @property
    def slack(self) -> float:
        """s: the chance that a value is shown which one row alone has; rounded up."""
        return float(-np.expm1(self.columns * self._log_hidden)) * (1 + 1e-12)

    def delta(self, epsilon: float) -> float:
        """The least δ at ε, rounded up."""
        log_hidden, steps = self._log_hidden, np.arange(self.columns + 1)
        if self.neighbours == "zero-out":  # in one direction values go, in the other they come
            gone, come = np.append(steps, 0 * steps), np.append(0 * steps, steps)
        else:
            gone, come = (side.ravel() for side in np.meshgrid(steps, steps))
        mu = np.sqrt(self.squared_sensitivity - gone - come) / self.sigma
        shown = -np.expm1(gone * log_hidden)
        rest = _normal_delta(epsilon - (gone - come) * log_hidden, mu)
        return min(1.0, float(np.max(shown + (1 - shown) * rest)) + _ROUNDING)

    @classmethod
    def fit(
        cls, *, epsilon: float, delta: float, columns: int, neighbours: str = "zero-out"
    ) -> SparseHistogram:
        """The least threshold within (ε, δ).

        Guarantees: `delta(epsilon)` is at most δ.
        """
        positive(epsilon=epsilon)
        open_unit(delta=delta)
        found = []
        for share in (0.3, 0.5, 0.7, 0.85, 0.95, 0.999):
            # All of the noise for a share of δ; the threshold takes what is left.
            unit = cls(sigma=1.0, threshold=1.0, columns=columns, neighbours=neighbours)
            sigma = unit.mu / gaussian.mu(epsilon=epsilon, delta=share * delta)
            low, high = 1.0, 1.0 + 40 * sigma
            while high - low > 1e-9 * sigma:
                middle = (low + high) / 2
                law = cls(sigma=sigma, threshold=middle, columns=columns, neighbours=neighbours)
                low, high = (low, middle) if law.delta(epsilon) <= delta else (middle, high)
            found.append(cls(sigma=sigma, threshold=high, columns=columns, neighbours=neighbours))
        return min(found, key=lambda law: law.threshold)


def _normal_delta(epsilon: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) for any real ε; 1 − e^ε, at least 0, for μ = 0."""
    safe = np.where(mu > 0, mu, 1.0)
    above = np.exp(np.minimum(epsilon + log_ndtr(-epsilon / safe - safe / 2), 0.0))
    with np.errstate(over="ignore"):
        still = np.maximum(-np.expm1(epsilon), 0.0)
    apart = np.maximum(ndtr(-epsilon / safe + safe / 2) - above, 0.0)
    return np.asarray(np.where(mu > 0, apart, still))
