"""The best of many runs costs what the theorems say, and the number of runs has its law."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from noshuffle.accounting import gaussian, renyi
from noshuffle.accounting.selection import LAWS, Repetitions, largest_mu, of_gaussian

DELTA = 1e-6


@pytest.mark.parametrize("eta", [math.inf, 1.0, 0.0, -0.5, 2.5])
def test_repetitions_have_their_law(eta: float) -> None:
    law, draws = Repetitions(8.0, eta), random.Random(5)
    found = np.array([law.draw(draws.random) for _ in range(20_000)])
    assert abs(found.mean() - 8.0) < 5 * found.std() / math.sqrt(len(found))
    assert found.min() >= (0 if eta == math.inf else 1)
    if eta == 1:  # geometric: P[K > k] = (1 − γ)^k
        assert abs((found > 10).mean() - (7 / 8) ** 10) < 0.02


def test_bounds_against_numbers_worked_out_apart() -> None:
    """The theorems, term by term, for one α and β at a time: every choice of β is a bound."""
    mu, mean, orders = 0.3, 20.0, np.array([2.0, 4.0, 16.0, 64.0])
    one = orders * mu**2 / 2
    geometric = Repetitions.named("geometric", mean=mean).divergences(orders, one)
    for alpha, found in zip(orders, geometric):
        each = [
            alpha * mu**2 / 2
            + 2 * (1 - 1 / beta) * beta * mu**2 / 2
            + 2 * math.log(mean) / beta
            + math.log(mean) / (alpha - 1)
            for beta in orders
        ]
        assert found == pytest.approx(min(each), rel=1e-12)
    exact = lambda hat: gaussian.delta(mu=mu, epsilon=hat)  # noqa: E731
    poisson = Repetitions.named("poisson", mean=mean).divergences(orders, one, delta_fn=exact)
    hat = math.log(1 + 1 / 3)
    wanted = 4 * mu**2 / 2 + mean * exact(hat) + math.log(mean) / 3
    assert poisson[1] == pytest.approx(wanted, rel=1e-12)
    # a mean of one run is that run, up to the price of the proof
    alone = Repetitions.named("geometric", mean=1.0).divergences(orders, one)
    assert (alone >= one).all()


@pytest.mark.parametrize("law", LAWS)
def test_the_search_for_mu_ends_on_the_safe_side(law: str) -> None:
    own = Repetitions.named(law, mean=20.0)
    mu = largest_mu(own, epsilon=2.0, delta=DELTA)
    assert of_gaussian(own, mu, delta=DELTA) <= 2.0
    assert of_gaussian(own, mu * 1.001, delta=DELTA) > 2.0
    # never cheaper than one run alone
    assert gaussian.epsilon(mu=mu, delta=DELTA) < 2.0
    assert renyi.epsilon_from_rho(rho=mu**2 / 2, delta=DELTA) < 2.0


@pytest.mark.parametrize("law", ["geometric", "logarithmic"])
def test_a_large_number_of_runs_can_be_drawn(law: str) -> None:
    """It was drawn one by one with a probability of 1e-300 each: for ever."""
    assert 1 <= Repetitions.named(law, mean=1e6).draw(lambda: 0.2) < 1e6
