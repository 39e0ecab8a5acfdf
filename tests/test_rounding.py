"""A privacy cost is never printed smaller than it is, nor what remains larger than it is."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import noshuffle as ns
from noshuffle.plan.statement import meaning
from noshuffle.rounding import down, factor_up, up

ROOT = Path(__file__).parents[1] / "src" / "noshuffle"
FEW_ULPS = 1e-15


@pytest.mark.parametrize("digits", [1, 2, 3, 4, 6])
def test_random_numbers_are_printed_on_their_side_and_within_one_digit(digits):
    rng = np.random.default_rng(digits)
    for value in np.exp(rng.uniform(-60, 60, size=400)):
        above, below = float(up(value, digits=digits)), float(down(value, digits=digits))
        assert below * (1 - FEW_ULPS) <= value <= above * (1 + FEW_ULPS)
        assert above - below <= value * 10.0 ** (1 - digits) * (1 + 1e-6)


@pytest.mark.parametrize("places", [0, 2, 3])
def test_places_after_the_point(places):
    rng = np.random.default_rng(places)
    for value in np.exp(rng.uniform(-10, 12, size=400)):
        texts = up(value, places=places), down(value, places=places)
        above, below = (float(text.replace(",", "")) for text in texts)
        assert below * (1 - FEW_ULPS) <= value <= above * (1 + FEW_ULPS)
        assert above - below <= 10.0**-places * (1 + 1e-6)


def test_numbers_that_somebody_gave_stay_as_they_are():
    for given in (1.0, 0.1, 0.3, 2.5, 8.0, 1e-5, 1e-6, 3e-7, 0.001, 12345.0):
        assert float(up(given)) == float(down(given)) == given
        assert up(given) == f"{given:g}"


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_a_plan_for_an_epsilon_is_stated_with_it(epsilon):
    plan = ns.Plan.fit(ns.SinglePass(100), mechanism="identity", epsilon=epsilon, delta=1e-5)
    assert f"(ε = {epsilon:g}, δ = 1e-05)-DP" in plan.statement().headline()


def test_a_headline_does_not_understate():
    plan = ns.Plan.fit(ns.SinglePass(100), mechanism="identity", epsilon=1.0, delta=1e-5)
    said = replace(plan.statement(), epsilon=8.00001, delta=1.23456789e-5, mu=1.23456721)
    assert said.headline().startswith("(ε = 8.001, δ = 1.23457e-05)")
    assert "μ = 1.23457 " in said.words()
    assert "δ = 1.11112e-06)" in meaning(1.0, 1.111111111e-6)


def test_factors_of_odds_are_not_below_them():
    rng = np.random.default_rng(5)
    for factor in np.exp(rng.uniform(0, 40, size=400)):
        assert float(factor_up(factor).replace(",", "")) >= factor * (1 - FEW_ULPS)


#: Figures that are measured or estimated, or that a user asked for.
NO_GUARANTEE = ("experiments", "convex/solvers", "theory", "auditing")


def test_every_epsilon_that_the_package_prints_is_rounded_on_one_side():
    """No f-string formats something called epsilon, spent or planned to the nearest digit."""
    found = []
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(NO_GUARANTEE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                what, spec = ast.unparse(node.value), ast.unparse(node.format_spec)
                is_cost = re.search(r"epsilon|stated|claimed|\bmu\b", what)
                if is_cost and re.search(r"\.\d[fg]", spec):
                    found.append(f"{name}:{node.lineno}: {what}")
    assert not found, "\n".join(found)
