"""Bounds: values by hand, exponents, limits, conditions; our solver keeps the proved one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from noshuffle import theory
from noshuffle.accounting import gaussian
from noshuffle.convex.solvers import experiments
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error, sensitivity, tree
from noshuffle.theory import l_p

SIZES = theory.Sizes(n=10_000, d=100, epsilon=1.0, delta=1e-6, beta=0.05)


def slope(bound_fn, parameter: str, term: str, *, factor: float = 1e4, **at) -> float:
    """Exponent of one term, over a long stretch so that logarithms fade."""
    start = replace(SIZES, **at)
    value = getattr(start, parameter) * factor
    end = replace(start, **{parameter: type(getattr(start, parameter))(value)})
    return math.log(bound_fn(end).terms[term] / bound_fn(start).terms[term]) / math.log(factor)


@pytest.mark.parametrize(
    ("bound_fn", "parameter", "term", "exponent"),
    [
        (theory.theorem_4_1, "n", "optimisation", -0.5),
        (theory.theorem_4_1, "n", "privacy", -0.5),
        (theory.theorem_4_1, "d", "privacy", 0.25),
        (theory.theorem_4_1, "epsilon", "privacy", -0.5),
        (theory.theorem_4_1, "lipschitz", "privacy", 1.0),
        (theory.corollary_4_2, "radius", "privacy", 1.0),
        (theory.theorem_4_3, "d", "privacy", 0.5),
        (theory.theorem_4_3, "epsilon", "privacy", -1.0),
        (theory.theorem_4_3, "radius", "optimisation", 2.0),
        (lambda s: theory.table_1(s)[0], "n", "privacy", -1.0),
        (lambda s: theory.table_1(s)[1], "n", "privacy", -0.5),
        (lambda s: theory.table_1(s)[1], "d", "privacy", 0.5),
        (lambda s: theory.table_1(s)[2], "d", "privacy", 0.25),
        (lambda s: l_p.convex(s, p=1.5)[0], "n", "privacy", -0.75),
        (lambda s: l_p.convex(s, p=1.5)[1], "n", "privacy", -1.0),
        (lambda s: l_p.convex(s, p=2.0)[2], "d", "privacy", 0.5),
        (lambda s: l_p.convex(s, p=math.inf)[0], "d", "privacy", 1.0),
        (lambda s: l_p.convex(s, p=4.0)[0], "d", "sampling", 0.25),
        (lambda s: l_p.nonconvex(s, p=1.5), "n", "privacy", -0.4),
        (lambda s: l_p.nonconvex(s, p=1.0), "n", "privacy", -1 / 3),
        (l_p.weakly_convex, "n", "privacy", -1 / 3),
    ],
)
def test_exponents(bound_fn, parameter: str, term: str, exponent: float) -> None:
    found = slope(bound_fn, parameter, term, delta=1e-12)
    assert found == pytest.approx(exponent, abs=1e-9)


def test_values_by_hand() -> None:
    at = theory.theorem_4_1(SIZES)
    # √(√100 · ln²(1e6) · ln 20 / 10⁴) = √(10 · 190.868 · 2.99573 / 10⁴)
    assert at.terms == pytest.approx({"optimisation": 0.01, "privacy": 0.756168}, rel=1e-5)
    least = theory.theorem_4_3(SIZES)
    # √(ln 10⁴/10⁴), and 10/10⁴ · √(ln⁵(2·10⁵) · ln 10⁶) = 1e-3 · √(270,957 · 13.8155)
    assert least.terms["optimisation"] == pytest.approx(0.0303485, rel=1e-5)
    assert least.terms["privacy"] == pytest.approx(1e-3 * math.sqrt(12.2060726**5 * 13.8155106))
    assert theory.tree_noise(SIZES) == pytest.approx(math.sqrt(2 * 14 * 13.8155106))
    # σ(1, 1e-6) = 4.2247; 14 levels, at most 13 nodes in a prefix
    assert theory.tree_spread(SIZES) == pytest.approx(4.2247 * math.sqrt(14 * 13), rel=1e-4)
    assert theory.ftrl_regret(SIZES).value == pytest.approx(0.41296, rel=1e-4)
    expected = theory.ftrl_regret(SIZES, spread=4.0, expected=True, batch_size=10)
    assert expected.value == pytest.approx(math.sqrt(2 * 50 / 1e4))
    assert l_p.kappa(1000, p=1.5) == 2.0
    assert l_p.kappa(1000, p=1.01) == pytest.approx(13.8155)


def test_a_hidden_constant_is_no_number() -> None:
    hidden = [theory.theorem_4_1(SIZES), theory.corollary_4_2(SIZES), theory.theorem_4_3(SIZES)]
    hidden += [*theory.table_1(SIZES), *l_p.convex(SIZES, p=1.0), *l_p.convex(SIZES, p=1.5)]
    hidden += [*l_p.convex(SIZES, p=3.0), l_p.nonconvex(SIZES, p=2.0), l_p.weakly_convex(SIZES)]
    for bound in hidden:
        assert bound.value is None
        assert "constant is not stated" in bound.words()
        assert "as recalled" in bound.source
        assert bound.conditions
    proved = [theory.ftrl_regret(SIZES), theory.ftrl_risk(SIZES), theory.sgd_regret(SIZES)]
    for bound in proved:
        assert bound.value == pytest.approx(bound.order)
        assert "≤" in bound.words()
        assert bound.source == theory.base.HERE


def test_limits() -> None:
    public = replace(SIZES, epsilon=1e9)
    assert theory.sgd_regret(public).value == pytest.approx(0.01, rel=1e-3)
    assert theory.ftrl_regret(public).value == pytest.approx(math.sqrt(2) * 0.01, rel=4e-3)
    # More risk of failing, less of a bound; risk is above regret.
    loose = theory.ftrl_regret(replace(SIZES, beta=0.5)).order
    tight = theory.ftrl_regret(SIZES).order
    assert loose < tight < theory.ftrl_risk(SIZES).order
    assert theory.ftrl_regret(SIZES, expected=True).order < loose
    # DP-FTRL wins over unamplified DP-SGD once d is large enough, loses its logs before.
    wide = replace(SIZES, d=10**6)
    assert theory.ftrl_regret(wide).order < theory.sgd_regret(wide).order
    assert (
        theory.ftrl_regret(replace(SIZES, d=1)).order > theory.sgd_regret(replace(SIZES, d=1)).order
    )
    assert all(term <= 1.0 for term in l_p.convex(replace(SIZES, n=1), p=1.5)[3].terms.values())


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 100, 1023, 1024])
def test_spread_of_the_tree_is_that_of_our_tree(n: int) -> None:
    at = replace(SIZES, n=n)
    plain = tree(variant="plain")
    z = sensitivity(plain, SinglePass(n)).value / gaussian.mu(epsilon=1.0, delta=1e-6)
    assert theory.tree_spread(at) == pytest.approx(z * error(plain, n).max, rel=1e-9)
    assert theory.tree_spread(replace(at, n=np.int64(n))) == theory.tree_spread(at)


def test_published_noise_misses_at_powers_of_two() -> None:
    at = replace(SIZES, n=1024, epsilon=8.0, delta=1e-5)
    mu = math.sqrt(11) / theory.tree_noise(at)
    assert gaussian.epsilon(mu=mu, delta=1e-5) == pytest.approx(8.48, abs=0.005)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.theorem_4_1(replace(SIZES, delta=1e-3)), "delta <= 1/n"),
        (lambda: theory.corollary_4_2(replace(SIZES, delta=1e-3)), "Corollary 4.2 is stated"),
        (lambda: theory.tree_noise(replace(SIZES, epsilon=30.0)), "2 ln"),
        (lambda: theory.theorem_4_3(replace(SIZES, n=1)), "n >= 2"),
        (lambda: l_p.convex(replace(SIZES, d=1), p=1.0), "d >= 2"),
        (lambda: l_p.nonconvex(SIZES, p=3.0), "1 <= p <= 2"),
    ],
)
def test_conditions_are_refused(call, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: replace(SIZES, n=0),
        lambda: replace(SIZES, epsilon=math.nan),
        lambda: replace(SIZES, delta=0.0),
        lambda: replace(SIZES, radius=-1.0),
        lambda: l_p.convex(SIZES, p=0.5),
        lambda: l_p.convex(SIZES, p=math.nan),
        lambda: l_p.kappa(10, p=3.0),
        lambda: theory.regret([1.0], [1.0, 2.0]),
        lambda: theory.regret([], []),
    ],
)
def test_bad_input_is_refused(call) -> None:
    with pytest.raises(InvalidInput):
        call()


def test_regret_is_the_mean_difference() -> None:
    assert theory.regret([1.0, 2.0, 6.0], [0.0, 2.0, 1.0]) == 2.0


def test_our_solver_keeps_the_proved_bound() -> None:
    n, d = 2048, 10
    plan = Plan.fit(SinglePass(n // 8), mechanism="blt", epsilon=1.0, delta=experiments.DELTA)
    spread = plan.noise_multiplier * error(plan.strategy, plan.steps).max
    at = theory.Sizes(n=n, d=d, epsilon=1.0, delta=experiments.DELTA)
    promised = theory.ftrl_regret(at, spread=spread, batch_size=8, expected=True).order
    found = [experiments.ftrl_excess(n, seed=seed, d=d) for seed in range(3)]
    assert 0.1 * promised < np.mean(found) <= promised


def test_batches_give_dp_sgd_the_order_of_theorem_4_1() -> None:
    wide = replace(SIZES, n=10**6, d=10**4, delta=1e-7)
    batch = theory.best_batch(wide)
    z = 1 / gaussian.mu(epsilon=1.0, delta=1e-7)
    assert batch == round(z * 100)
    least = theory.sgd_regret(wide, batch_size=batch).order
    assert least == pytest.approx(math.sqrt(2 * z * 100 / 1e6), rel=1e-3)  # the last one is short
    for other in (batch // 2, 2 * batch, 1):
        assert theory.sgd_regret(wide, batch_size=other).order > least
    assert theory.best_batch(replace(SIZES, n=3)) == 3


def test_a_short_last_batch_of_dp_sgd_has_the_noise_of_a_full_one() -> None:
    """11 rows in batches of 10 are two steps, with twice the noise of one: √2 of it in regret."""
    at = replace(SIZES, n=11, d=10**6)
    whole = theory.sgd_regret(replace(at, n=10), batch_size=10).order * 10  # of all rows together
    both = theory.sgd_regret(at, batch_size=10).order * 11
    assert both == pytest.approx(math.sqrt(2) * whole, rel=1e-3)
    with pytest.raises(Unsupported, match="n >= 2"):
        theory.tree_noise(replace(SIZES, n=1))
