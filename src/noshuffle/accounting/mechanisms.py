"""Privacy numbers of single mechanisms.

    Gaussian            μ = sensitivity / standard deviation, then `gaussian`
    Laplace             ε₀ = sensitivity / scale, δ(ε) = (1 − e^{(ε − ε₀)/2})₊
    report-noisy-max    ε = 2·sensitivity / scale, half of it if all scores move the same way;
                        with Gumbel noise it is the exponential mechanism, (ε²/8)-zCDP

>>> Laplace(scale=2.0).epsilon
0.5
>>> round(ReportNoisyMax(scale=4.0).rho, 6)      # Gumbel noise: ε = 0.5
0.03125
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from noshuffle.accounting import gaussian
from noshuffle.errors import non_negative, one_of, open_unit, positive

NOISES = ("gumbel", "laplace")


@dataclass(frozen=True)
class Gaussian:
    """Normal noise on a vector of the given L2 sensitivity."""

    deviation: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        positive(deviation=self.deviation, sensitivity=self.sensitivity)

    @classmethod
    def fit(cls, *, epsilon: float, delta: float, sensitivity: float = 1.0) -> Gaussian:
        """The least noise that is (ε, δ)-private.

        Guarantees: the exact curve at the returned deviation is within δ, as evaluated.
        """
        positive(epsilon=epsilon, sensitivity=sensitivity)
        deviation = sensitivity / gaussian.mu(epsilon=epsilon, delta=delta)
        while gaussian.log_delta(mu=sensitivity / deviation, epsilon=epsilon) > math.log(delta):
            deviation = math.nextafter(deviation, math.inf)
        return cls(deviation, sensitivity)

    @property
    def mu(self) -> float:
        return self.sensitivity / self.deviation

    @property
    def rho(self) -> float:
        """zCDP parameter."""
        return self.mu**2 / 2

    def epsilon(self, *, delta: float) -> float:
        return gaussian.epsilon(mu=self.mu, delta=delta)

    def delta(self, *, epsilon: float) -> float:
        return gaussian.delta(mu=self.mu, epsilon=epsilon)


@dataclass(frozen=True)
class Laplace:
    """Laplace noise on a vector of the given L1 sensitivity."""

    scale: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        positive(scale=self.scale, sensitivity=self.sensitivity)

    @classmethod
    def fit(cls, *, epsilon: float, delta: float = 0.0, sensitivity: float = 1.0) -> Laplace:
        """The least noise that is (ε, δ)-private for a scalar; δ = 0 for vectors."""
        positive(epsilon=epsilon, sensitivity=sensitivity)
        non_negative(delta=delta)
        if delta != 0:
            open_unit(delta=delta)
        pure = epsilon - 2 * math.log1p(-delta)
        return cls(math.nextafter(sensitivity / pure, math.inf), sensitivity)

    @property
    def epsilon(self) -> float:
        """Pure ε, at δ = 0."""
        return self.sensitivity / self.scale

    def delta(self, *, epsilon: float) -> float:
        """The exact δ(ε) of one number; 0 from the pure ε on."""
        non_negative(epsilon=epsilon)
        return -math.expm1(min(0.0, (epsilon - self.epsilon) / 2))

    @property
    def rho(self) -> float:
        """zCDP parameter, from pure ε (Bun and Steinke, 2016)."""
        return self.epsilon**2 / 2


@dataclass(frozen=True)
class ReportNoisyMax:
    """The index of the largest of several scores, each with its own noise of the given scale.

    Guarantees: only the index is released. `is_monotone` promises that adding a unit moves all
    scores in the same direction (counts); without it the factor 2 is needed.
    """

    scale: float
    sensitivity: float = 1.0
    noise: str = "gumbel"
    is_monotone: bool = False

    def __post_init__(self) -> None:
        positive(scale=self.scale, sensitivity=self.sensitivity)
        one_of(NOISES, noise=self.noise)

    @property
    def epsilon(self) -> float:
        return (1 if self.is_monotone else 2) * self.sensitivity / self.scale

    @property
    def rho(self) -> float:
        """zCDP: ε²/8 by bounded range for the exponential mechanism, else ε²/2."""
        return self.epsilon**2 / (8 if self.noise == "gumbel" else 2)
