"""The best of many private runs, by a score: what the search costs beyond one run.

Draw the number of runs K from a geometric law of mean m, run a mechanism K times (each with a
setting drawn at random, say), and release the best run by its score and nothing else. With D(α) the
Rényi divergence of one run, score included, the search has (Papernot, Steinke 2022, arXiv
2110.03620, η = 1; Liu and Talwar 2019)

    D(α) + 2·min_β[(1 − 1/β)·D(β) + log(m)/β] + log(m)/(α − 1),

for pure ε and K → ∞ that is 3ε. Without the random K, the best of m runs can cost m times as much
as one. No state.

>>> [round(of_gaussian(mu, mean=20, delta=1e-5), 2) for mu in (0.1, 0.5)]     # one: ε = 0.34, 2.0
[0.92, 4.69]
"""

from __future__ import annotations

import math

import numpy as np

from noshuffle.accounting import renyi
from noshuffle.accounting.bisection import bracket
from noshuffle.errors import InvalidInput

Array = np.ndarray
#: More runs than that, on average, nobody makes.
MOST_RUNS = 1e6


def check_mean(mean: float) -> None:
    """Raise unless a geometric number of runs can have this mean."""
    if not 1 <= mean <= MOST_RUNS:
        raise InvalidInput(
            f"a search makes at least one and at most {MOST_RUNS:,.0f} runs on average, got "
            f"{mean:g}"
        )


def divergences(orders: Array, one: Array, *, mean: float) -> Array:
    """Rényi divergences of the search, from those of one run at the same orders.

    Guarantees: upper bounds if `one` are.
    """
    more = float(np.min((1 - 1 / orders) * one + math.log(mean) / orders))
    return np.asarray(one + 2 * more + math.log(mean) / (orders - 1))


def draw_number(uniform: float, *, mean: float) -> int:
    """K by inversion, from a uniform number in [0, 1): P[K > k] = (1 − 1/m)^k."""
    return 1 if mean == 1 else 1 + int(math.log1p(-uniform) / math.log1p(-1 / mean))


def of_gaussian(mu: float, *, mean: float, delta: float) -> float:
    """ε at δ of a search over runs that are μ-GDP; an upper bound."""
    orders = 1 + np.geomspace(0.1, 1e4, 200)
    found = divergences(orders, orders * mu**2 / 2, mean=mean)
    return renyi.epsilon_from_curve(orders, found, delta=delta)


def largest_mu(*, mean: float, epsilon: float, delta: float) -> float:
    """μ of one run such that the search is within (ε, δ); never above it."""

    def exceeds(mu: float) -> bool:
        return of_gaussian(mu, mean=mean, delta=delta) > epsilon

    if exceeds(1e-9):
        raise InvalidInput(
            f"no noise makes a search of {mean:g} runs cost ε = {epsilon:g} at δ = {delta:g}: "
            "ask for fewer runs or a larger epsilon"
        )
    high = 1.0
    while not exceeds(high):
        high *= 2
    return bracket(exceeds, 1e-9, high, tolerance=1e-15)[0]
