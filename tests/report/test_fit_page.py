"""The trade-off of a fitted table is drawn for every ε that a plan can have."""

from __future__ import annotations

import pytest

from noshuffle import Plan, SinglePass
from noshuffle.report.fit import _tradeoff


@pytest.mark.parametrize("epsilon", [1e-300, 1.0, 1e6])
def test_tradeoff_of_tiny_and_huge_epsilon(epsilon: float) -> None:
    plan = Plan.fit(SinglePass(steps=2), mechanism="identity", epsilon=epsilon, delta=1e-6)
    assert "<svg" in _tradeoff(plan, 10)
