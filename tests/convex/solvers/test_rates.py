"""Fitted slopes of the rates that are quick to measure, the table, and the figure."""

from __future__ import annotations

import math

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
def test_every_slope_is_within_or_its_miss_is_explained(rate: rates.Rate) -> None:
    curve = rates.measure(rate)
    assert curve.is_within or curve.reason, curve


def test_intervals_follow_the_stated_rules() -> None:
    """Set from theory: what was asked for, theory ± 0.1, or a bound from above."""
    for rate in rates.RATES:
        low, high = rate.accepted
        if rate.name.startswith("ftrl_ls"):
            assert rate.accepted == (-1.05, -0.8)
        elif low == -math.inf:
            assert high == pytest.approx(rate.theory + 0.1)
        else:
            assert (low, high) == pytest.approx((rate.theory - 0.1, rate.theory + 0.1))


def test_a_wrong_noise_scale_misses_noisy_max(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gaps do not follow the noise, so the slope can fail: noise of 1/√ε has −1/2."""
    for power, within in ((1.0, True), (0.5, False)):

        def scale(epsilon: float, sensitivity: float, power: float = power) -> float:
            return 2 * sensitivity / epsilon**power

        monkeypatch.setattr(experiments, "noise_scale", scale)
        assert rates.measure(by_name("noisy_max"), quick=True).is_within == within


def test_verdicts_say_no_more_than_was_seen() -> None:
    fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.9), "theory": -1.0, "note": ""}

    def verdict(slope: float, low: float) -> str:
        return rates.Curve(name="a", slope=slope, accepted=(low, -0.9), **fields).verdict()

    two_sided = [verdict(s, -1.1) for s in (-1.0, -1.099, -0.901, -0.89)]
    assert two_sided == ["held", "held (edge)", "held (edge)", "missed"]
    # A bound from above: steeper than theory by more than a tenth is no test of the exponent.
    above = [verdict(s, -math.inf) for s in (-1.0, -1.05, -1.2, -1.9, -0.5)]
    assert above == ["held", "held", "not tested", "not tested", "missed"]


def test_a_miss_is_said_with_its_reason() -> None:
    fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.9), "slope": -0.15, "theory": -1.0}
    curve = rates.Curve(name="a", accepted=(-1.1, -0.9), note="", reason="too few rows", **fields)
    assert "missed: too few rows" in rates.table([curve])
    assert not curve.to_dict()["is_within"]
    open_end = rates.Curve(name="b", accepted=(-math.inf, 0.0), note="", **fields)
    assert "at most" in rates.table([open_end])
    assert open_end.to_dict()["accepted"] == [None, 0.0]


def test_fitted_slope_is_exact_on_powers() -> None:
    assert rates.fitted_slope([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
    with pytest.raises(InvalidInput):
        rates.fitted_slope([1, 1], [1, 2])
    with pytest.raises(InvalidInput):
        rates.fitted_slope([1, 2], [1, -2])
