"""Composition theorems against enumeration and against each other."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.accounting import composition
from noshuffle.errors import InvalidInput


def enumerated(epsilon: float, count: int, total: float) -> float:
    """δ(total) of k-fold randomized response over all 2^k answers."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    out = 0.0
    for answers in itertools.product((0, 1), repeat=count):
        ones = sum(answers)
        true = p ** (count - ones) * (1 - p) ** ones
        other = (1 - p) ** (count - ones) * p**ones
        out += max(0.0, true - math.exp(total) * other)
    return out


@given(epsilon=st.floats(0.01, 2), count=st.integers(1, 8), part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_optimal_delta_matches_enumeration(epsilon: float, count: int, part: float) -> None:
    total = part * count * epsilon
    fast = composition.optimal_delta(epsilon=epsilon, count=count, total=total)
    assert fast == pytest.approx(enumerated(epsilon, count, total), abs=1e-12)


@given(
    epsilon=st.floats(0.001, 3),
    count=st.integers(1, 2000),
    slack=st.floats(-12, -0.5).map(lambda x: 10**x),
)
@settings(max_examples=100, deadline=None)
def test_optimal_inverts_and_is_best(epsilon: float, count: int, slack: float) -> None:
    best = composition.optimal(epsilon=epsilon, count=count, slack=slack)
    basic = composition.basic(epsilon=epsilon, count=count)
    sharp = composition.advanced(epsilon=epsilon, count=count, slack=slack)
    plain = composition.advanced(epsilon=epsilon, count=count, slack=slack, form="original")
    assert best.epsilon <= min(basic.epsilon, sharp.epsilon) * (1 + 1e-12)
    assert sharp.epsilon <= plain.epsilon
    back = composition.optimal_delta(epsilon=epsilon, count=count, total=best.epsilon)
    assert back <= slack * (1 + 1e-6)
    if best.epsilon > 0:
        # δ may fall steeply there, so a hair less ε must already be too little.
        less = best.epsilon * (1 - 1e-9)
        under = composition.optimal_delta(epsilon=epsilon, count=count, total=less)
        assert max(back, under) >= slack * (1 - 1e-5)


def test_large_epsilon_and_delta() -> None:
    assert composition.optimal(epsilon=10.0, count=100, slack=1e-9).epsilon <= 1000
    found = composition.optimal(epsilon=0.1, count=10, slack=1e-6, delta=1e-7)
    assert found.delta == pytest.approx(1 - (1 - 1e-7) ** 10 * (1 - 1e-6), rel=1e-9)
    assert composition.basic(epsilon=1.0, count=3, delta=0.5).delta == 1
    assert composition.advanced(epsilon=0.1, count=10, slack=1e-6, delta=1e-7).delta == (
        pytest.approx(2e-6)
    )
    assert composition.sequence([(1.0, 1e-6), (0.5, 0.0)]) == (1.5, 1e-6)


def test_groups_and_samples() -> None:
    one = composition.group(epsilon=0.7, delta=1e-6, size=1)
    assert one == pytest.approx((0.7, 1e-6))
    assert composition.group(epsilon=0.0, delta=1e-6, size=5) == pytest.approx((0.0, 5e-6))
    assert composition.group(epsilon=100.0, delta=1e-6, size=50).delta == 1
    assert composition.subsample(epsilon=2.0, rate=1.0, delta=1e-6) == pytest.approx((2.0, 1e-6))
    assert composition.subsample(epsilon=800.0, rate=0.5).epsilon == pytest.approx(
        800 - math.log(2)
    )
    assert composition.subsample(epsilon=1e-8, rate=0.01).epsilon == pytest.approx(1e-10)


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="epsilon"):
        composition.basic(epsilon=-1.0, count=2)
    with pytest.raises(InvalidInput, match="count"):
        composition.optimal(epsilon=1.0, count=0, slack=1e-6)
    with pytest.raises(InvalidInput, match="slack"):
        composition.advanced(epsilon=1.0, count=2, slack=0.0)
    with pytest.raises(InvalidInput, match="delta"):
        composition.group(epsilon=1.0, delta=1.5, size=2)
    with pytest.raises(InvalidInput, match="rate"):
        composition.subsample(epsilon=1.0, rate=0.0)


@pytest.mark.parametrize(
    ("epsilon", "count", "slack"),
    [
        (1.374013547624257e-05, 25, 8.557586522842608e-162),
        (3.0646514364477685e-05, 28, 4.91970644071882e-289),
        (4.6271957155079286e-06, 3, 3.263776364405697e-12),
        (0.00016001279834808687, 25, 2.6853029873338532e-11),
        (0.001, 100_000, 1e-8),
    ],
)
def test_optimal_is_on_the_safe_side_at_tiny_slacks(
    epsilon: float, count: int, slack: float
) -> None:
    """A δ far below the probability of the top outcome was lost in a difference of sums."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        found = composition.optimal(epsilon=epsilon, count=count, slack=slack).epsilon
        e = mpmath.mpf(epsilon)
        p, total, mass = mpmath.exp(e) / (1 + mpmath.exp(e)), mpmath.mpf(0), mpmath.mpf(0)
        for j in range(count + 1):
            mass = mass * (count - j + 1) / j * (1 - p) / p if j else p**count
            loss = (count - 2 * j) * e
            if loss <= found:
                break
            total += mass * (1 - mpmath.exp(found - loss))
        assert total <= slack


@pytest.mark.parametrize("rate", [1e-308, 1e-304, 1e-300, 0.5])
def test_a_sample_of_a_huge_epsilon_costs_what_the_formula_says(rate: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        true = mpmath.log1p(mpmath.mpf(rate) * mpmath.expm1(701))
        assert composition.subsample(epsilon=701.0, rate=rate).epsilon == pytest.approx(float(true))


def test_groups_lose_nothing_to_the_logarithm_of_a_tiny_epsilon() -> None:
    assert composition.group(epsilon=1e-300, delta=1e-5, size=3).delta >= 3e-5
