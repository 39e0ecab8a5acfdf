"""Secret positions by Monte Carlo: beside quadrature, coverage, careless variants caught."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accounting.test_bins import both_ways

from noshuffle.accounting.bins import Overlaps
from noshuffle.accounting.mean_bounds import MeanTest, lowest
from noshuffle.accounting.monte_carlo import SecretPositions
from noshuffle.accounting.moved_draws import WeightedDraws
from noshuffle.errors import InvalidInput
from noshuffle.participation import BallsInBins, Epochs
from noshuffle.plan import Plan

SHIFTS = np.array([(1.8, 0.9), (0.3, 2.0)])
GRAM = SHIFTS @ SHIFTS.T
BOUND = Overlaps(((1, 0.0, float(GRAM.max())),))


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_quadrature_lies_between_the_bounds(epsilon: float) -> None:
    true = both_ways(SHIFTS, 1.5, epsilon)
    given = {"noise_multiplier": 1.5, "epsilon": epsilon, "samples": 60_000, "seed": 5}
    found = SecretPositions(GRAM, BOUND).delta(**given)
    assert 0.9 * true < found.lower < true < found.upper < 1.1 * true + 2e-3
    assert found.upper < found.sampling_free
    careless = SecretPositions(np.diag(GRAM.diagonal()), BOUND).delta(**given)
    assert careless.upper < true  # as if positions did not overlap
    assert "at most" in found.words()


def test_epsilon_at_the_delta_of_quadrature() -> None:
    """Of both directions: where one alone has δ already, ε is too small."""
    shift = np.diag((1.2, 1.2))
    secret = SecretPositions(shift @ shift, Overlaps(((1, 0.0, 1.44),)))
    delta = both_ways(shift, 1.0, 1.2)
    given = {"noise_multiplier": 1.0, "samples": 60_000, "seed": 3}
    found = secret.epsilon(**given, delta=delta)
    assert 1.05 < found.lower < 1.2 < found.upper < 1.32
    assert secret.delta(**given, epsilon=1.2, direction="add").upper < 0.9 * delta


def test_losses_that_are_cut_off_are_charged() -> None:
    pilot = WeightedDraws(np.zeros(10), np.ones(10))
    test = SecretPositions(GRAM, BOUND)._test("remove", 2.0, 1e-3, 5.0, pilot)
    assert test.charge == pytest.approx(1e-5)
    nothing = WeightedDraws(np.full(1000, -9.0), np.ones(1000))
    assert not test.is_below(nothing, 1e-5, 0.5)


@pytest.mark.parametrize("side", ["remove", "add"])
@pytest.mark.parametrize("count", [1, 6])
def test_draws_from_the_moved_density_alone_are_bounded(side: str, count: int) -> None:
    """By R of the head of the file, which one position attains; and few draws then suffice."""
    gap = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    K = np.exp(-gap / 2.0) * np.linspace(1.0, 0.8, count)[:, None] ** 0.5
    K = np.sqrt(K * K.T)
    secret = SecretPositions(K, Overlaps(((1, 0.0, 1.0),)))
    _, drawn = secret._drawn(side, 1.0, 3.5, 20_000, 4)
    assert drawn.alone is not None
    reach = drawn.alone.reach(3.5)
    top = float(drawn.values(side, 3.5).max())
    least = 0.8 if (side, count) == ("remove", 1) else 1e-3
    assert least * reach < top <= reach * (1 + 1e-9) < 0.02
    given = {"noise_multiplier": 1.0, "epsilon": 3.5, "samples": 40_000, "direction": side}
    found = secret.delta(**given, seed=4)
    assert 0 < found.lower < found.upper < 3 * found.lower
    # no secrecy in one position: the truth is known
    assert (found.lower < found.sampling_free < found.upper) == (count == 1)


def test_epsilon_and_periods() -> None:
    """Two periods of one position are one Gaussian mechanism, √2 as far."""
    one = np.array([[4.0]])
    secret = SecretPositions(one, Overlaps(((1, 0.0, 8.0),)), periods=2)
    found = secret.epsilon(noise_multiplier=2.0, delta=1e-2, samples=30_000, seed=2)
    assert 0.85 * found.sampling_free < found.lower <= found.upper <= found.sampling_free
    once = SecretPositions(one, secret.bound).epsilon(
        noise_multiplier=2.0, delta=1e-2, samples=30_000, seed=2
    )
    assert once.upper < found.lower


def test_bounds_fail_as_often_as_they_say() -> None:
    """Heavy-tailed values with a known mean; the mean of a sample itself is wrong far too often."""
    rng, wrong, naive, runs = np.random.default_rng(3), np.zeros(2), 0, 300
    for _ in range(runs):
        values = np.where(rng.random(400) < 0.02, rng.random(400), 0.0)  # mean 0.01
        test = MeanTest("remove", 0.0, 1e9, 1.0, 0.0, second_moment=0.02 / 3)
        low, high = test.bounds(WeightedDraws(np.full(400, 800.0), values), 0.1)
        wrong += (low > 0.01, high < 0.01)
        naive += values.mean() < 0.01
    assert (wrong <= 0.1 * runs + 4 * np.sqrt(0.09 * runs)).all()
    assert naive > 0.4 * runs


def test_fine_steps_stay_within_the_coarse_one_that_failed() -> None:
    assert lowest(lambda epsilon: epsilon > 0.985, 1.0) == pytest.approx(0.995**3)
    # one entry fails by chance; what follows it would be a list that the draws chose
    assert 0.96**2 < lowest(lambda epsilon: abs(epsilon - 0.96**2) > 1e-9, 1.0) < 0.96


def test_the_failure_of_the_bound_is_inside_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def is_below(test: MeanTest, drawn: WeightedDraws, mean: float, failure: float) -> bool:
        asked.append((mean, failure))
        return False

    monkeypatch.setattr(MeanTest, "is_below", is_below)
    secret = SecretPositions(np.array([[4.0]]), Overlaps(((1, 0.0, 4.0),)))
    secret.epsilon(noise_multiplier=2.0, delta=1e-2, samples=2000, seed=4)
    # two lists, two directions: each failure at most once
    assert asked
    assert all(mean + 4 * failure <= 1e-2 * (1 + 1e-12) and failure > 0 for mean, failure in asked)


def test_a_list_that_ends_shows_nothing_from_below() -> None:
    """A mechanism that is all but (0, δ)-private under a bound that does not know it."""
    secret = SecretPositions(np.array([[1e-6]]), Overlaps(((1, 0.0, 8.0),)))
    found = secret.epsilon(noise_multiplier=2.0, delta=1e-2, samples=4000, seed=4)
    assert found.lower == 0 < found.upper < found.sampling_free


def test_plans_and_refusals() -> None:
    plan = Plan.fit(BallsInBins(2, 8), mechanism="banded", bands=4, epsilon=2.0, delta=1e-2)
    found = plan.monte_carlo(samples=30_000, seed=1)
    assert found.lower < found.upper <= found.sampling_free <= 2.0
    with pytest.raises(InvalidInput, match="BallsInBins"):
        Plan.fit(Epochs(2, 8), mechanism="identity", epsilon=1.0).monte_carlo()
    with pytest.raises(InvalidInput, match="square matrix"):
        SecretPositions(-GRAM, BOUND)
