"""Runs without an end: one bound for every length, reached in the limit."""

from fractions import Fraction

import pytest

from noshuffle import strategies as st
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import MinSeparation, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies.sensitivity import prefix_sensitivity

SLOW = st.blt((0.9, 0.4), (0.2, 0.1))


@pytest.mark.parametrize(("b", "k"), [(1000, 1), (3, 4), (50, 7)])
def test_an_endless_blt_is_the_limit_of_long_ones(b, k):
    """ε of a run without an end: S from above for every length, and reached in the limit."""
    part = MinSeparation.open(separation=b, max_participations=k)
    found = prefix_sensitivity(SLOW, part, part.steps)
    C = SLOW.encoder(1200)
    for n in (1, 30, 400, 1200):  # by columns of the matrix, b apart
        summed = C[:n, :n][:, : k * b : b].sum(axis=1)
        assert float(summed @ summed) <= found.squared
    assert found.exact
    assert found.squared == pytest.approx(float(summed @ summed), rel=1e-9)


def test_an_endless_blt_of_slow_decay_keeps_its_digits():
    theta, omega = 1 - 1e-9, 1e-5
    found = prefix_sensitivity(st.blt((theta,), (omega,)), SinglePass.open(), 10**8)
    truth = 1 + Fraction(omega) ** 2 / (1 - Fraction(theta) ** 2)
    assert truth <= Fraction(found.squared) <= truth * Fraction(1 + 3e-12)


def test_a_run_of_unknown_length():
    plan = Plan.fit(SinglePass.open(), epsilon=2.0, buffers=2, reach=1000)
    spent = [plan.epsilon_after(t) for t in (1, 10, 1000, 10**6)]
    assert spent == sorted(spent)
    assert spent[-1] <= plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(2.0, rel=1e-9)
    assert "however many" in plan.statement(steps=5).participation
    assert "no planned end" in " ".join(plan.statement(steps=5).assumptions)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(Unsupported):  # coefficients that rise
        prefix_sensitivity(st.blt((0.5,), (1.2,)), SinglePass.open(), 10**8)
    with pytest.raises(InvalidInput, match="unknown length"):
        Plan.fit(SinglePass.open(), mechanism="dense", epsilon=2.0)
