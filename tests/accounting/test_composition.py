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
