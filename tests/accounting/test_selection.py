"""The best of many runs costs what the theorem says, and the number of runs has its law."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from noshuffle.accounting import gaussian, renyi
from noshuffle.accounting.selection import divergences, draw_number, largest_mu, of_gaussian

DELTA = 1e-6


def test_the_number_of_runs_is_geometric() -> None:
    draws = random.Random(5)
    found = np.array([draw_number(draws.random(), mean=8.0) for _ in range(20_000)])
    assert abs(found.mean() - 8.0) < 5 * found.std() / math.sqrt(len(found))
    for k in (1, 2, 10, 30):  # P[K > k] = (1 − 1/8)^k
        assert abs((found > k).mean() - (7 / 8) ** k) < 0.02
    assert found.min() == 1
    assert {draw_number(u, mean=1.0) for u in (0.0, 0.999)} == {1}
    assert draw_number(0.2, mean=1e6) == math.ceil(math.log(0.8) / math.log1p(-1e-6))


def test_bounds_against_numbers_worked_out_apart() -> None:
    """The theorem, term by term, for one α and β at a time: every choice of β is a bound."""
    mu, mean, orders = 0.3, 20.0, np.array([2.0, 4.0, 16.0, 64.0])
    one = orders * mu**2 / 2
    for alpha, found in zip(orders, divergences(orders, one, mean=mean)):
        each = [
            alpha * mu**2 / 2
            + 2 * (1 - 1 / beta) * beta * mu**2 / 2
            + 2 * math.log(mean) / beta
            + math.log(mean) / (alpha - 1)
            for beta in orders
        ]
        assert found == pytest.approx(min(each), rel=1e-12)
    # a mean of one run is that run, up to the price of the proof
    assert (divergences(orders, one, mean=1.0) >= one).all()


def test_the_search_for_mu_ends_on_the_safe_side() -> None:
    mu = largest_mu(mean=20.0, epsilon=2.0, delta=DELTA)
    assert of_gaussian(mu, mean=20.0, delta=DELTA) <= 2.0
    assert of_gaussian(mu * 1.001, mean=20.0, delta=DELTA) > 2.0
    # never cheaper than one run alone
    assert gaussian.epsilon(mu=mu, delta=DELTA) < 2.0
    assert renyi.epsilon_from_rho(rho=mu**2 / 2, delta=DELTA) < 2.0
