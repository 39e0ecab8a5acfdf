"""What a run has spent, from its plan, its released steps and the runs it was forked from.

    one run                   the plan's own statement for the steps released so far
    a fork (no sampling)      μ² = Σ μ_i² over the run and its ancestors, still Gaussian
    a fork (sampled)          ε and δ add up (basic composition)

Everything that goes into a statement is derived here from recorded facts, so that `verify` can
derive it again and compare.

>>> round(gaussian_sum([3.0, 4.0]), 3)
5.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from noshuffle import accounting
from noshuffle.errors import InvalidInput, whole
from noshuffle.plan import Plan
from noshuffle.statement import PrivacyStatement, of_stops, so_far

ADAPTIVE_CLIP = (
    "The clip norm follows a quantile of the gradient norms; the noisy counts it is steered by are "
    "part of the stated ε, paid for by more noise on the gradients."
)


@dataclass(frozen=True)
class Ancestor:
    """A run that this one was forked from: its plan and how many steps it had released.

    `notes` are the sentences that its facts add to a statement: what it rested on, the fork does.
    `budget`: by what it is known in the budget that it draws on, if any.
    """

    plan: Plan
    released: int
    is_adaptive: bool = False
    notes: tuple[str, ...] = ()
    budget: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "released": self.released,
            "is_adaptive": self.is_adaptive,
            "notes": list(self.notes),
            "budget": self.budget,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Ancestor:
        whole(at_least=0, released=record["released"])
        adaptive = bool(record.get("is_adaptive", True))
        notes = tuple(str(note) for note in record.get("notes", ()))
        budget = str(record.get("budget", ""))
        plan, released = Plan.from_json(record["plan"]), int(record["released"])
        return cls(plan, released, adaptive, notes, budget)


def gaussian_sum(mus: Sequence[float]) -> float:
    """GDP parameter of several Gaussian mechanisms on the same data."""
    return math.sqrt(math.fsum(mu * mu for mu in mus))


def spent(
    plan: Plan,
    released: int,
    *,
    ancestors: Sequence[Ancestor] = (),
    notes: tuple[str, ...] = (),
) -> PrivacyStatement:
    """The guarantee of what was released so far, with everything it rests on."""
    if released > plan.steps:
        raise InvalidInput(f"{released} steps were released, the plan covers {plan.steps}")
    own = _statement(plan, released, notes)
    before = [
        _statement(a.plan, a.released, (ADAPTIVE_CLIP,) if a.is_adaptive else ())
        for a in ancestors
        if a.released
    ]
    if not before:
        return own
    words = f"This run is a fork; it adds up with {len(before)} earlier run(s) on the same data."
    parts = [*before, own]
    if any(part.unit != own.unit or part.neighbours != own.neighbours for part in parts):
        raise InvalidInput("a fork must keep the unit and the neighbours of the run it came from")
    mus = [part.mu for part in parts if part.mu is not None]
    inherited = [note for one in ancestors if one.released for note in one.notes]
    inherited += [said for part in before for said in of_stops(part.assumptions)]
    own = own.with_assumptions(words, *map(_inherited, inherited))
    if len(mus) == len(parts) and own.accountant == "exact":
        mu = gaussian_sum(mus)
        epsilon = accounting.gdp.epsilon(mu=mu, slack=0.0, delta=own.delta)
        shift = mu * own.noise_multiplier  # S of all of them, in units of this run's noise
        if not math.isfinite(shift):  # a run without noise: no sensitivity says so
            shift = own.sensitivity
        return replace(
            own,
            epsilon=epsilon,
            mu=mu,
            rho=mu * mu / 2,
            sensitivity=shift,
            squared_sensitivity=shift * shift,
            exact=all(part.exact for part in parts),
        )
    return replace(
        own,
        epsilon=math.fsum(part.epsilon for part in parts),
        delta=math.fsum(part.delta for part in parts),
        mu=None,
        rho=None,
        exact=False,
    )


def _inherited(sentence: str) -> str:
    return f"Of an earlier run: {sentence}"


def _statement(plan: Plan, released: int, notes: tuple[str, ...]) -> PrivacyStatement:
    """The plan's statement for its first `released` steps."""
    if 0 < released < plan.steps and ADAPTIVE_CLIP in notes:
        # The budget was split between counts and gradients for the participations of the whole
        # run; over a part of them the same split can cost more than the part of the plan does.
        return plan.statement(notes=(*notes, so_far(released, plan.steps)))
    return plan.statement(steps=released, notes=notes)
