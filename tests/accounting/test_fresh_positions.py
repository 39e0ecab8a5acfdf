"""Fresh secret positions: beside quadrature; careless variants caught; plans."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accounting.test_bins import both_ways

from noshuffle.accounting.fresh_positions import FreshPositions
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import SeparatedBins, TruncatedPoisson
from noshuffle.plan import Plan
from noshuffle.strategies import banded, blt, identity
from noshuffle.strategies.positions import separated_classes, separated_gram


def test_two_positions_that_overlap_beside_quadrature() -> None:
    part, strategy = SeparatedBins(1, 3, 2), banded((1.0, 0.6))
    classes = separated_classes(strategy, part, part.steps)
    plane = np.linalg.cholesky(separated_gram(strategy, part, part.steps))
    given = {"noise_multiplier": 1.3, "epsilon": 1.0}
    true = both_ways(plane, 1.3, 1.0)
    assert true * (1 - 1e-4) <= FreshPositions(classes, epochs=1).delta(**given) <= 1.15 * true
    top = classes[0][2]
    careless = FreshPositions((classes[0], (2, 0.0, top)), epochs=1)  # no overlap counted
    assert careless.delta(**given) < 0.99 * true


def test_plans() -> None:
    part = SeparatedBins(epochs=3, steps_per_epoch=12, separation=4)
    plan = Plan.fit(part, mechanism="best", epsilon=3.0)
    assert 2.99 < plan.epsilon() <= 3.0
    assert plan.epsilon_after(6) < plan.epsilon()
    assert Plan.from_json(plan.to_json()) == plan
    assert any("at least 4 steps apart" in line for line in plan.statement().assumptions)
    with pytest.raises(Unsupported, match="4 bands"):
        Plan.fit(part, mechanism=blt((0.9,), (0.3,)), noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match="at most steps_per_epoch"):
        SeparatedBins(3, 4, 5)
    cut = TruncatedPoisson(steps=10, rate=0.1, cap=16, population=100)
    roomy = TruncatedPoisson(steps=10, rate=0.1, cap=100, population=100)
    ours, theirs = (
        Plan(participation=one, strategy=identity(), noise_multiplier=1.0).epsilon()
        for one in (cut, roomy)
    )
    assert ours > 1.01 * theirs
    for wrong in ({"accountant": "rdp"}, {"neighbours": "replace-one"}):
        with pytest.raises(Unsupported, match="TruncatedPoisson"):
            Plan(participation=cut, strategy=identity(), noise_multiplier=1.0, **wrong)
