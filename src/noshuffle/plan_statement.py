"""What a plan promises for its first steps, as a statement with all its assumptions.

Functions take the `Plan` that asks (`noshuffle.plan`). No state.

>>> from noshuffle.participation import SinglePass
>>> from noshuffle.plan import Plan
>>> plan = Plan.fit(SinglePass(steps=8), mechanism="tree", noise_multiplier=2.0)
>>> [said for said in statement_of(plan, 3, ()).assumptions if said.startswith("So far")]
['So far 3 of 8 planned steps were released.']
"""

from __future__ import annotations

from typing import Any

from noshuffle.statement import PrivacyStatement, sentences, so_far, stopped


def statement_of(plan: Any, steps: int, notes: tuple[str, ...]) -> PrivacyStatement:
    """The guarantee of the first `steps` steps; `notes` are further assumptions."""
    mu, twice, reach = plan.mu(steps), plan.multiplier_of_sensitivity, plan.sensitivity
    if not plan.participation.is_sampled:
        reach = plan.sensitivity_after(steps)
    assumptions = sentences(
        plan.guarded,
        unit=plan.unit,
        neighbours=plan.neighbours,
        noise_multiplier=plan.noise_multiplier,
        is_exact=reach.exact,
        accountant=plan.accountant,
    )
    epsilon = plan.epsilon_after(steps)
    if steps < plan.steps:
        notes = (*notes, so_far(steps, plan.steps))
        if 0 < epsilon < plan.epsilon():
            notes = (*notes, stopped(steps))
    return PrivacyStatement(
        epsilon=epsilon,
        delta=plan.delta,
        mu=mu,
        rho=None if mu is None else mu * mu / 2,
        sensitivity=reach.value * twice,
        squared_sensitivity=reach.squared * twice * twice,
        noise_multiplier=plan.noise_multiplier,
        unit=plan.unit,
        neighbours=plan.neighbours,
        participation=plan.guarded.words(),
        mechanism=plan.strategy.words(),
        accountant=plan.accountant,
        exact=reach.exact and plan.accountant == "exact",
        assumptions=assumptions + notes,
    )
