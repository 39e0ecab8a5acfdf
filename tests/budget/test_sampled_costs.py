"""Two runs with secret draws on one budget: never charged below the likelihood ratio of both.

For every kind a unit whose contributions all have norm one; the ratio of each run is written out
over the patterns that its draws allow, and δ at ε is the mean of (1 − e^ε/LR)₊ over draws from P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from noshuffle.budget.cost import cost_of, total
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    TruncatedPoisson,
)
from noshuffle.plan import Plan

DELTA, Z, SAMPLES = 1e-2, 1.2, 40_000
Ratio = Callable[[np.random.Generator], np.ndarray]


def _seen(joins: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """log N(1, z²)/N(0, z²) of every step of noise with a unit in the steps that it joins."""
    rows = joins + Z * rng.standard_normal(joins.shape)
    return np.asarray((rows - 0.5) / Z**2)


def coins(rate: float, turns: int) -> Ratio:
    def draw(rng: np.random.Generator) -> np.ndarray:
        one = _seen(rng.random((SAMPLES, turns)) < rate, rng)
        return np.log1p(rate * np.expm1(one)).sum(axis=1)

    return draw


def positions(epochs: int, choices: int) -> Ratio:
    """One of some steps, the same in every epoch."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        joins = np.arange(choices) == rng.integers(choices, size=(SAMPLES, 1, 1))
        one = _seen(np.broadcast_to(joins, (SAMPLES, epochs, choices)), rng)
        return np.log(np.exp(one.sum(axis=1)).mean(axis=1))

    return draw


def replaced(rate: float, steps: int) -> Ratio:
    """+1 with the unit, −1 with the one in its place."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        one = _seen(rng.random((SAMPLES, steps)) < rate, rng)
        other = -one - 1 / Z**2  # the same rows beside −1
        return (np.log1p(rate * np.expm1(one)) - np.log1p(rate * np.expm1(other))).sum(axis=1)

    return draw


KINDS: list[tuple[Participation, Ratio]] = [
    (CyclicPoisson(12, 3, 0.4), coins(0.4, 4)),
    (BallsInBins(3, 4), positions(3, 4)),
    (TruncatedPoisson(4, 0.4, 20, 20), coins(0.4, 4)),
    (FixedSize(4, 4, 10), replaced(0.4, 4)),
]


@pytest.mark.parametrize(("part", "ratio"), KINDS, ids=lambda each: getattr(each, "kind", ""))
def test_two_runs_are_not_charged_below_brute_force(part: Participation, ratio: Ratio) -> None:
    plan = Plan.fit(part, mechanism="identity", noise_multiplier=Z, delta=DELTA)
    said = plan.statement()
    cost = cost_of(said, delta=DELTA, neighbours=said.neighbours, plan=plan, steps=plan.steps)
    rng = np.random.default_rng(7)
    losses = ratio(rng) + ratio(rng)

    def delta(epsilon: float) -> float:
        return float(np.mean(np.maximum(-np.expm1(epsilon - losses), 0.0)))

    charged = total([cost, cost]).epsilon(DELTA)
    # the worst pair of fixed sizes is proved, and not attained by this one
    share = 0.25 if isinstance(part, FixedSize) else 0.9 * cost.epsilon(DELTA) / charged
    assert delta(charged) <= DELTA < delta(share * charged)  # as if the second had cost nothing
