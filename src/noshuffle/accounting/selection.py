"""The best of many private runs, by a score: what the search costs beyond one run.

Draw the number of runs K from a law that does not depend on the data, run a mechanism K times (each
with a setting drawn at random, say), and release the best run by its score and nothing else. With
D(α) the Rényi divergence of one run, score included, the search has (Papernot, Steinke 2022, arXiv
2110.03620, after Liu and Talwar 2019)

    negative binomial, shape η > −1   D(α) + (1+η)·min_β[(1 − 1/β)D(β) + log(1/γ)/β]
      (truncated to K ≥ 1)                 + log(E K)/(α − 1)
    Poisson, mean m                   D(α) + m·δ̂ + log(m)/(α − 1)
                                           δ̂ = δ of one run at ε̂ = log(1 + 1/(α − 1))

η = 1 is the geometric law, η = 0 the logarithmic one; for pure ε and K → ∞ the first is (2+η)ε.
Without the random K, the best of m runs can cost m times as much as one. No state.

>>> law = Repetitions.named("geometric", mean=20)
>>> law.gamma, law.eta
(0.05, 1.0)
>>> [round(of_gaussian(law, mu, delta=1e-5), 2) for mu in (0.1, 0.5)]     # one: ε = 0.34, 2.0
[0.92, 4.69]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from noshuffle.accounting import gaussian, renyi
from noshuffle.accounting.bisection import bracket, ratio_bracket
from noshuffle.errors import InvalidInput, one_of

Array = np.ndarray
LAWS = ("poisson", "geometric", "logarithmic")
#: More runs than that, on average, nobody makes; and their number is drawn one by one.
MOST_RUNS = 1e6


@dataclass(frozen=True)
class Repetitions:
    """How often a run is repeated: Poisson (eta infinite) or truncated negative binomial."""

    mean: float
    eta: float

    @classmethod
    def named(cls, law: str, *, mean: float) -> Repetitions:
        """By the name of the law."""
        one_of(LAWS, law=law)
        return cls(mean, {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}[law])

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf or not self.eta > -1:
            raise InvalidInput(
                f"a search needs a mean of at least 1 and a shape above −1, got {self.mean!r} and "
                f"{self.eta!r}"
            )
        if self.mean > MOST_RUNS:
            raise InvalidInput(
                f"a search makes at most {MOST_RUNS:,.0f} runs on average, got {self.mean:g}"
            )
        if self.eta == math.inf and self.mean > 500:  # e^−mean would leave floating point
            raise InvalidInput(f"a Poisson law of runs has a mean of at most 500, got {self.mean}")

    @cached_property
    def gamma(self) -> float:
        """The success probability with this mean; rounded down, which is the safe side."""
        if self.eta == 1:
            return 1 / self.mean
        return ratio_bracket(lambda g: _mean(self.eta, g) <= self.mean, 1e-300, 1.0 - 1e-12)[0]

    def divergences(
        self, orders: Array, one: Array, *, delta_fn: Callable[[float], float] | None = None
    ) -> Array:
        """Rényi divergences of the search, from those of one run at the same orders.

        `delta_fn` gives δ of one run at an ε, where that is known better than by its divergences.

        Guarantees: upper bounds if `one` (and `delta_fn`) are.
        """
        if self.eta == math.inf:
            known = delta_fn or (lambda hat: renyi.delta_from_curve(orders, one, epsilon=hat))
            deltas = np.array([known(float(hat)) for hat in np.log1p(1 / (orders - 1))])
            return np.asarray(one + self.mean * deltas + math.log(self.mean) / (orders - 1))
        more = float(np.min((1 - 1 / orders) * one - math.log(self.gamma) / orders))
        mean = max(self.mean, _mean(self.eta, self.gamma))
        return np.asarray(one + (1 + self.eta) * more + math.log(mean) / (orders - 1))

    def draw(self, uniform: Callable[[], float]) -> int:
        """K by inversion, from a uniform number in [0, 1)."""
        left = uniform()
        number, mass = (0, math.exp(-self.mean)) if self.eta == math.inf else (1, self._first())
        while left >= mass and mass > 0:
            left -= mass
            number += 1
            mass *= self._ratio(number)
        return number

    def _first(self) -> float:
        """P[K = 1] of the truncated negative binomial."""
        if self.gamma == 1:
            return 1.0
        if self.eta == 0:
            return (1 - self.gamma) / -math.log(self.gamma)
        return (1 - self.gamma) * self.eta / math.expm1(-self.eta * math.log(self.gamma))

    def _ratio(self, number: int) -> float:
        """P[K = number] / P[K = number − 1]."""
        if self.eta == math.inf:
            return self.mean / number
        return (1 - self.gamma) * (number - 1 + self.eta) / number


def _mean(eta: float, gamma: float) -> float:
    """E K of the truncated negative binomial."""
    if gamma == 1:
        return 1.0
    if eta == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def of_gaussian(law: Repetitions, mu: float, *, delta: float) -> float:
    """ε at δ of a search over runs that are μ-GDP; an upper bound."""
    orders = 1 + np.geomspace(0.1, 1e4, 200)
    found = law.divergences(
        orders, orders * mu**2 / 2, delta_fn=lambda hat: gaussian.delta(mu=mu, epsilon=hat)
    )
    return renyi.epsilon_from_curve(orders, found, delta=delta)


def largest_mu(law: Repetitions, *, epsilon: float, delta: float) -> float:
    """μ of one run such that the search is within (ε, δ); never above it."""

    def exceeds(mu: float) -> bool:
        return of_gaussian(law, mu, delta=delta) > epsilon

    if exceeds(1e-9):
        raise InvalidInput(
            f"no noise makes a search of {law.mean:g} runs cost ε = {epsilon:g} at δ = {delta:g}: "
            "ask for fewer runs or a larger epsilon"
        )
    high = 1.0
    while not exceeds(high):
        high *= 2
    return bracket(exceeds, 1e-9, high, tolerance=1e-15)[0]
