"""Fitted slopes of the rates that are quick to measure, the table, and the figure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from noshuffle.convex import rates
from noshuffle.convex.solvers import experiments
from noshuffle.errors import InvalidInput

QUICK = ["dp_gd", "noisy_max", "objective_perturbation", "output_perturbation"]


def by_name(name: str) -> rates.Rate:
    return next(r for r in rates.RATES if r.name == name)


@pytest.mark.parametrize("name", QUICK)
def test_quick_slopes_are_within(name: str) -> None:
    curve = rates.measure(by_name(name), quick=True)
    assert curve.is_within, curve


def test_naive_and_tree_frank_wolfe_differ() -> None:
    sizes = (2**12, 2**15)
    slopes = {}
    for aggregation in ("naive", "tree"):
        excess = [experiments.frank_wolfe_excess(n, seed=0, aggregation=aggregation) for n in sizes]
        slopes[aggregation] = rates.fitted_slope(sizes, excess)
    assert -0.85 < slopes["naive"] < -0.65
    assert -1.1 < slopes["tree"] < -0.8


def test_least_squares_slope_with_five_features() -> None:
    sizes = (2**12, 2**16)
    excess = [experiments.least_squares_regret(n, seed=1) for n in sizes]
    assert -1.05 < rates.fitted_slope(sizes, excess) < -0.75


@pytest.mark.slow
@pytest.mark.parametrize("rate", rates.RATES, ids=lambda r: r.name)
def test_no_slope_is_missed_without_a_reason(rate: rates.Rate) -> None:
    """One that is steeper than a bound breaks none."""
    curve = rates.measure(rate)
    assert curve.verdict() != "missed", curve


def test_intervals_follow_the_stated_rules() -> None:
    """Two-sided, set from theory: what was asked for, or theory ± a width of 0.3 at most."""
    for rate in rates.RATES:
        low, high = rate.accepted
        if rate.name.startswith("ftrl_ls"):
            assert rate.accepted == (-1.05, -0.8)
        else:
            assert rate.width <= 0.3
            assert (low, high) == pytest.approx(
                (rate.theory - rate.width, rate.theory + rate.width)
            )
        assert rate.repeats >= 5
    assert len({rate.name for rate in rates.RATES}) == len(rates.RATES)


def test_a_wrong_noise_scale_misses_noisy_max(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps do not follow the noise, so the slope can fail: noise of 1/√ε has −1/2."""
    for power, within in ((1.0, True), (0.5, False)):

        def scale(epsilon: float, sensitivity: float, power: float = power) -> float:
            return 2 * sensitivity / epsilon**power

        monkeypatch.setattr(experiments, "noise_scale", scale)
        assert rates.measure(by_name("noisy_max"), quick=True).is_within == within


def test_verdicts_say_no_more_than_was_seen() -> None:
    fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.9), "theory": -1.0, "note": ""}

    def verdict(slope: float, **more: Any) -> str:
        return rates.Curve(name="a", slope=slope, accepted=(-1.1, -0.9), **fields, **more).verdict()

    two_sided = [verdict(s, error=0.01) for s in (-1.0, -1.09, -0.91, -0.89)]
    assert two_sided == ["held", "held (edge)", "held (edge)", "missed"]
    assert verdict(-1.0, error=0.06) == "held (edge)"
    # A bound for the worst case: a steeper slope is no test of the exponent.
    above = [verdict(s, is_bound=True) for s in (-1.0, -1.05, -1.2, -1.9, -0.5)]
    assert above == ["held", "held", "not tested", "not tested", "missed"]


def test_a_miss_is_said_with_its_reason() -> None:
    fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.9), "slope": -0.15, "theory": -1.0}
    curve = rates.Curve(name="a", accepted=(-1.1, -0.9), note="", reason="too few rows", **fields)
    assert "missed: too few rows" in rates.table([curve])
    assert not curve.to_dict()["is_within"]


def test_errors_of_a_slope_come_from_the_seeds() -> None:
    """Excess of n^−1 times e^{±0.3} by seed and size: leaving one out gives the known spread."""
    lengths = np.random.default_rng(0).normal(size=(40, 4))

    def noisy(n: int, *, seed: int) -> float:
        return math.exp(0.3 * lengths[seed, int(math.log2(n))]) / n

    made = rates.Rate("a", noisy, (1, 2, 4, 8), 3, -1.0, repeats=40)
    found = rates.measure(made)
    x = np.log([1, 2, 4, 8])
    exact = 0.3 / math.sqrt(40 * np.sum((x - x.mean()) ** 2))
    assert 0.7 * exact < found.error < 1.4 * exact
    assert abs(found.slope + 1) < 4 * exact


def test_fitted_slope_is_exact_on_powers() -> None:
    assert rates.fitted_slope([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
    with pytest.raises(InvalidInput):
        rates.fitted_slope([1, 1], [1, 2])
    with pytest.raises(InvalidInput):
        rates.fitted_slope([1, 2], [1, -2])
