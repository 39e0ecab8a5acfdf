"""What a run costs, in the currency of a budget: μ, and the chance s that μ does not hold.

    without sampling      μ of the run's statement: exact, s = 0
    sampled               the least μ above its privacy-loss distribution (or Rényi bound), with
                          s = δ/1000 of the budget
    pure ε, (ε, δ)        ε itself, s = δ, where it is set aside for such runs; else (`within`) that
                          of randomized response
    zCDP                  the least μ above its Rényi bound, s = δ/1000
    without noise, or NOT PRIVATE for another reason (a test seed)         infinite

(`accounting.gdp`, where it is said why this adds up.) Neighbours: whoever is protected against
being replaced is protected against being left out; the other way round μ doubles (two changes, by
way of the unit being absent).

No state.

>>> from noshuffle import Plan, SinglePass
>>> plan = Plan.fit(SinglePass(8), mechanism="tree", epsilon=1.0, delta=1e-5)
>>> cost = cost_of(plan.statement(), delta=1e-5)
>>> cost.is_exact, round(total([cost] * 4).mu / cost.mu, 9)
(True, 2.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from noshuffle.accounting import fourier, gdp, renyi
from noshuffle.errors import Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.plan.guarantee import direction_of, renyi_law, sampled_release
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.spending import gaussian_sum

#: Share of the budget's δ that a run pays for a curve that is not Gaussian.
_SHARE = 1e-3
_POINTS = 1500
Curve = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Cost:
    """μ and s of a run, and the ε that it takes from what is set aside for pure ε."""

    mu: float
    slack: float = 0.0
    pure: float = 0.0
    is_exact: bool = False

    @property
    def kind(self) -> str:
        """What is said beside the figure."""
        return "exact" if self.is_exact else "an upper bound"

    def within(self, aside: float) -> Cost:
        """The cost of a run where only so much pure ε may be added up as it is."""
        if not self.pure or self.pure <= aside:
            return self
        return replace(self, mu=gaussian_sum([self.mu, gdp.of_pure(self.pure)]), pure=0.0)

    def epsilon(self, delta: float) -> float:
        """ε at δ (0 allowed)."""
        if self.mu == 0 and self.slack == 0:
            return self.pure
        if delta == 0:
            return math.inf
        return self.pure + gdp.epsilon(mu=self.mu, slack=self.slack, delta=delta)


NOTHING = Cost(0.0, is_exact=True)


def total(costs: Iterable[Cost]) -> Cost:
    """What runs cost together, whoever chose them and by whatever earlier results.

    Guarantees: the sums are rounded up. Exact where every run is Gaussian and exact itself.
    """
    runs = list(costs)
    mu = gaussian_sum([run.mu for run in runs])
    slack, pure = (math.fsum(getattr(run, name) for run in runs) for name in ("slack", "pure"))
    # δ − s cancels where s is nearly δ: an ulp more is on the safe side
    return Cost(mu, slack * (1 + 1e-15), pure, all(run.is_exact for run in runs))


def cost_of(
    statement: PrivacyStatement,
    *,
    delta: float,
    neighbours: str = "zero-out",
    plan: Plan | None = None,
    steps: int = 0,
) -> Cost:
    """The cost of what a statement covers, for a budget with this δ and these neighbours.

    `plan` and `steps` are needed where the run is sampled.
    """
    cost = _cost(statement, delta, plan, steps)
    if neighbours == "replace-one" and statement.neighbours != "replace-one":
        if cost.slack:
            raise Unsupported(
                "a sampled or (ε, δ) run for units that come or go has no proved cost for units "
                "that are replaced; use neighbours='replace-one' in its plan"
            )
        return replace(cost, mu=2 * cost.mu, pure=2 * cost.pure)
    return cost


def _cost(statement: PrivacyStatement, delta: float, plan: Plan | None, steps: int) -> Cost:
    is_sampled = plan is not None and plan.participation.is_sampled
    if statement.epsilon == 0 and (statement.mu == 0 or (is_sampled and not steps)):
        return NOTHING
    if not math.isfinite(statement.epsilon) or statement.not_private:
        return Cost(math.inf)
    if statement.mu is not None:
        return Cost(statement.mu, is_exact=statement.exact)
    if is_sampled and delta:
        assert plan is not None
        if isinstance(plan.participation, BallsInBins):
            return _in_bins(plan, steps, _SHARE * delta)
        if isinstance(plan.participation, TruncatedPoisson):
            return _composed(sampled_release(plan, steps), _SHARE * delta)
        turns = plan.participation.most_within(steps)
        return _sampled(*_law(plan), turns, _SHARE * delta)
    if statement.rho is not None and statement.accountant == "rdp" and delta:
        return _concentrated(statement.rho, _SHARE * delta)
    return Cost(0.0, statement.delta, statement.epsilon)


def _in_bins(plan: Plan, steps: int, slack: float) -> Cost:
    noise, positions = plan.noise_multiplier, plan.positions(steps)

    def curve(epsilons: np.ndarray) -> np.ndarray:
        return positions.deltas(epsilons, noise_multiplier=noise, near=math.sqrt(slack))

    return _above(curve, slack, start=positions.epsilon(noise_multiplier=noise, delta=slack / 2))


def _law(plan: Plan) -> tuple[str, float, float]:
    """How the privacy of a sampled plan is bounded, its sampling rate and its noise."""
    part = plan.participation
    assert isinstance(part, Poisson | FixedSize | CyclicPoisson)
    if plan.accountant == "rdp":
        sampling, noise = renyi_law(plan)
        return f"rdp-{sampling}", part.rate, noise
    return direction_of(plan), part.rate, plan.noise_multiplier / plan.sensitivity.value


@lru_cache(maxsize=64)
def _sampled(law: str, rate: float, noise: float, steps: int, slack: float) -> Cost:
    if law.startswith("rdp-"):
        sampling, orders = law.removeprefix("rdp-"), renyi.DEFAULT_ORDERS
        return _above(_renyi(orders, renyi.curve([(noise, rate, steps)], sampling=sampling)), slack)
    return _composed(fourier.compose([(noise, rate, steps)], direction=law), slack)


def _composed(composed: fourier.Composed, slack: float) -> Cost:
    nears = (1e-2, math.sqrt(slack))

    def curve(epsilons: np.ndarray) -> np.ndarray:
        found = [composed.deltas(epsilons, near=near) for near in nears]
        return np.asarray(np.min(found, axis=0))

    return _above(curve, slack, start=composed.epsilon(delta=slack / 2))


@lru_cache(maxsize=64)
def _concentrated(rho: float, slack: float) -> Cost:
    orders = np.concatenate([renyi.DEFAULT_ORDERS, 1 + np.geomspace(100, 1e6, 200)])
    return _above(_renyi(tuple(orders), rho * orders), slack)


def _renyi(orders: tuple[float, ...], divergences: np.ndarray) -> Curve:
    pinsker = math.sqrt(float(np.min(divergences)) / 2)  # KL ≤ D of every order above one

    def curve(epsilons: np.ndarray) -> np.ndarray:
        deltas = [
            renyi.delta_from_curve(orders, divergences, epsilon=float(one)) for one in epsilons
        ]
        return np.minimum(deltas, pinsker)

    return curve


def _above(curve: Curve, slack: float, *, start: float = 1.0) -> Cost:
    """The least μ whose curve, with s = slack, lies above this one."""
    top = max(start, 1e-3)
    while curve(np.array([top]))[0] > slack:
        top *= 1.25
        if top > 1e4:
            return Cost(math.inf)
    epsilons = np.linspace(0.0, top, _POINTS)
    return Cost(gdp.dominating(epsilons, curve(epsilons), slack=slack), slack)
