"""Costs are never below what an independent calculation of the same mechanisms gives."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from noshuffle import FixedSize, Plan, Poisson, SinglePass
from noshuffle.accounting import fourier, gaussian, gdp, renyi
from noshuffle.budget.cost import Cost, cost_of, total
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.plan import PrivacyStatement

DELTA = 1e-5


def proved(*, epsilon: float, delta: float = 0.0, rho: float | None = None) -> PrivacyStatement:
    """The statement of a proof of (ε, δ) that is none of μ."""
    plan = Plan.fit(SinglePass(4), mechanism="tree", epsilon=1.0, delta=DELTA)
    kind = "exact" if rho is None else "rdp"
    return replace(
        plan.statement(), epsilon=epsilon, delta=delta, mu=None, rho=rho, accountant=kind
    )


def mixed_delta(mu: float, pure: list[float], epsilon: float) -> float:
    """δ(ε) of N(μ, 1) beside randomized responses, by their joint privacy loss, summed by hand.

    A response of ε_i has the loss ±ε_i with odds e^{ε_i} : 1; given those, the Gaussian's own
    curve at what is left, by δ(−x) = 1 − e^{−x}(1 − δ(x)) below zero.
    """
    found = 0.0
    for signs in product((1, -1), repeat=len(pure)):
        odds = math.prod(1 / (1 + math.exp(-sign * one)) for sign, one in zip(signs, pure))
        gap = epsilon - sum(sign * one for sign, one in zip(signs, pure))
        inner = gaussian.delta(mu=mu, epsilon=abs(gap))
        found += odds * (inner if gap >= 0 else 1 - math.exp(gap) * (1 - inner))
    return found


@pytest.mark.parametrize("pure", [[1.0], [0.1] * 6, [0.3, 2.0, 0.05]])
@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_pure_and_gaussian_runs_together(mu: float, pure: list[float]) -> None:
    statements = [proved(epsilon=one) for one in pure]
    aside = [cost_of(said, delta=DELTA) for said in statements]
    costs = [cost.within(0.0) for cost in aside]
    for each in (costs, aside):
        both = total([Cost(mu, is_exact=True), *each])
        assert not both.is_exact
        assert mixed_delta(mu, pure, both.epsilon(DELTA)) <= DELTA  # the bound holds
    # what is set aside is added up, and that is not an empty bound for few large ones
    wanted = sum(pure) + gaussian.epsilon(mu=mu, delta=DELTA)
    assert both.epsilon(DELTA) == pytest.approx(wanted, rel=1e-14)
    if len(pure) < 4:
        assert mixed_delta(mu, pure, 0.75 * both.epsilon(DELTA)) > DELTA


def test_the_gaussian_of_a_pure_run_is_the_least() -> None:
    for epsilon in (1e-3, 0.5, 3.0, 20.0):
        mu = gdp.of_pure(epsilon)
        # the kink of randomized response: total variation (e^ε − 1)/(e^ε + 1)
        wanted = math.tanh(epsilon / 2)
        assert gaussian.delta(mu=mu, epsilon=0.0) == pytest.approx(wanted, rel=1e-9)
        for gap in np.linspace(0, epsilon, 20):
            share = 1 / (1 + math.exp(-epsilon))
            response = share * max(0.0, 1 - math.exp(gap - epsilon))
            assert response <= gaussian.delta(mu=mu, epsilon=float(gap)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(0.01, 1.0, 400), (0.1, 2.0, 50), (0.02, 0.8, 1)]
)
def test_sampled_runs_lie_below_their_gaussian(rate: float, noise: float, steps: int) -> None:
    plan = Plan.fit(Poisson(steps, rate), mechanism="identity", noise_multiplier=noise, delta=DELTA)
    cost = cost_of(plan.statement(), delta=DELTA, plan=plan, steps=steps)
    assert cost.slack == DELTA / 1000
    composed = fourier.compose([(noise, rate, steps)])
    for epsilon in (0.0, 0.013, 0.1, 0.5, 1.0, 2.5):
        lower = composed.delta(epsilon=epsilon, bound="lower")
        own = gaussian.delta(mu=cost.mu, epsilon=epsilon)
        assert lower <= cost.slack + (1 - cost.slack) * own
    assert cost.epsilon(DELTA) <= 2 * plan.epsilon()
    # two of them: not below the loss distribution of both
    both = fourier.compose([(noise, rate, 2 * steps)]).epsilon(delta=DELTA, bound="lower")
    assert both <= total([cost, cost]).epsilon(DELTA)


def test_renyi_bounds_have_a_cost_above_theirs() -> None:
    tight = Plan.fit(
        FixedSize(50, 10, 1000), mechanism="identity", noise_multiplier=2.0, delta=DELTA
    )
    plan = replace(tight, accountant="rdp")
    cost = cost_of(plan.statement(), delta=DELTA, plan=plan, steps=50)
    less = cost_of(tight.statement(), delta=DELTA, plan=tight, steps=50)
    assert tight.epsilon() <= less.epsilon(DELTA) < cost.epsilon(DELTA)
    assert plan.epsilon() <= cost.epsilon(DELTA) <= 1.3 * plan.epsilon()
    epsilon = renyi.epsilon_from_rho(rho=0.05, delta=DELTA, real_orders=True)
    said = proved(epsilon=epsilon, delta=DELTA, rho=0.05)
    mu = math.sqrt(2 * 0.05)
    assert mu < cost_of(said, delta=DELTA).mu < 1.5 * mu
    assert epsilon <= cost_of(said, delta=DELTA).epsilon(DELTA) * (1 + 1e-6)


def test_other_kinds() -> None:
    said = proved(epsilon=0.5, delta=1e-6)
    assert cost_of(said, delta=DELTA) == Cost(0.0, 1e-6, pure=0.5)
    for aside in (0.4, -1.0):  # more may be out than was set aside
        assert cost_of(said, delta=DELTA).within(aside) == Cost(gdp.of_pure(0.5), 1e-6)
        assert Cost(1.0).within(aside) == Cost(1.0)
    assert cost_of(said, delta=DELTA).within(0.5).pure == 0.5
    bare = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=0.0, delta=DELTA)
    assert cost_of(bare.statement(), delta=DELTA).mu == math.inf
    plan = Plan.fit(SinglePass(4), mechanism="tree", epsilon=1.0, delta=DELTA)
    assert cost_of(plan.statement(steps=0), delta=DELTA).mu == 0
    double = cost_of(plan.statement(), delta=DELTA, neighbours="replace-one")
    assert double.mu == 2 * plan.mu()
    replaced = Plan.fit(
        SinglePass(4), mechanism="tree", epsilon=1.0, delta=DELTA, neighbours="replace-one"
    )
    assert cost_of(replaced.statement(), delta=DELTA, neighbours="replace-one").mu == replaced.mu()
    sampled = Plan.fit(Poisson(4, 0.1), mechanism="identity", epsilon=1.0, delta=DELTA)
    with pytest.raises(Unsupported, match="replaced"):
        cost_of(sampled.statement(), delta=DELTA, neighbours="replace-one", plan=sampled, steps=4)
    assert cost_of(plan.statement(), delta=0.0).epsilon(0.0) == math.inf


def test_a_budget_without_delta_adds_pure_epsilons() -> None:
    said = proved(epsilon=0.25)
    assert total([cost_of(said, delta=0.0)] * 3).epsilon(0.0) == 0.75


def test_a_slack_uses_delta_up() -> None:
    assert total([Cost(0.1, 6e-6), Cost(0.1, 4e-6)]).epsilon(DELTA) == math.inf
    assert gdp.capacity(epsilon=1.0, delta=DELTA, slack=DELTA) == 0
    with pytest.raises(InvalidInput, match="below the slack"):
        gdp.dominating(np.array([0.0, 1.0]), np.array([0.5, 0.1]), slack=1e-3)


def test_banded_noise_and_secret_positions_have_a_cost() -> None:
    from noshuffle.participation import BallsInBins, CyclicPoisson

    for part in (CyclicPoisson(12, 3, 0.3), BallsInBins(3, 4)):
        plan = Plan.fit(part, mechanism="banded", bands=2, noise_multiplier=4.0, delta=DELTA)
        cost = cost_of(plan.statement(), delta=DELTA, plan=plan, steps=12)
        assert plan.epsilon() <= cost.epsilon(DELTA) <= 2 * plan.epsilon()
        assert cost_of(plan.statement(), delta=DELTA, plan=plan, steps=4).mu < cost.mu
