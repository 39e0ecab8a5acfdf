"""What the first steps of a plan cost: their sensitivity, and ε.

S of the first t steps is that of the first t rows of noise that the whole run uses, so a stopped
run, a fork and one user are accounted by the same function (`strategies.prefix_sensitivity`).

Functions take the `Plan` that asks (`noshuffle.plan`). State: what was found is kept with the plan.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

from noshuffle import accounting, plan_accountant
from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.participation import Participation
from noshuffle.strategies.sensitivity import Sensitivity, prefix_sensitivity


def sensitivity_after(plan: Any, steps: int, participation: Participation | None) -> Sensitivity:
    """`Plan.sensitivity_after`, which says what it guarantees."""
    whole(at_least=0, at_most=plan.steps, steps=steps)
    part = plan.participation if participation is None else participation
    if part.steps != plan.steps:
        raise InvalidInput(f"participation must have {plan.steps} steps, got {part.steps}")
    if steps == 0:
        return Sensitivity(0.0, 0.0, exact=True)
    of_all: Sensitivity = plan.sensitivity
    if steps == plan.steps and part == plan.participation:
        return of_all
    cache: dict[Any, Sensitivity] = plan.__dict__.setdefault("_prefixes", {})
    if (steps, part) not in cache:
        why = "upper bound: the whole run's sensitivity"
        found = covered = replace(of_all, exact=False, notes=why)
        with suppress(Unsupported):  # nothing is proved for this part: the whole run covers it
            found = prefix_sensitivity(
                plan.strategy, part, steps, tree_accounting=plan.tree_accounting
            )
        cache[steps, part] = found if found.squared <= covered.squared else covered
    return cache[steps, part]


def epsilon_after(plan: Any, steps: int, participation: Participation | None) -> float:
    """`Plan.epsilon_after`."""
    whole(at_least=0, at_most=plan.steps, steps=steps)
    if steps == 0:
        return 0.0
    if plan.participation.is_sampled:
        cache: dict[int, float] = plan.__dict__.setdefault("_sampled", {})
        if steps not in cache:
            cache[steps] = plan_accountant.sampled_epsilon(plan, steps)
        return cache[steps]
    mu, delta = mu_of(plan, plan.sensitivity_after(steps, participation=participation)), plan.delta
    if mu == 0 or math.isinf(mu):
        return mu
    if plan.accountant == "rdp":
        return accounting.renyi.epsilon(noise_multiplier=1 / mu, delta=delta)
    return accounting.gaussian.epsilon(mu=mu, delta=delta)


def mu_of(plan: Any, reach: Sensitivity) -> float:
    """The GDP parameter of steps with this sensitivity."""
    shift, noise = reach.value * float(plan.multiplier_of_sensitivity), float(plan.noise_multiplier)
    if not shift:
        return 0.0
    return shift / noise if noise else math.inf
