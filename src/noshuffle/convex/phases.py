"""Phases: the plan of a stream, and what to do when nobody knows how long it will be.

A phase is a run of known length: a participation, a strategy fitted to it, noise calibrated to
(ε, δ), a planned batch size. With a known horizon there is one. Otherwise the stream is cut into
phases of n₀, n₀, 2n₀, 4n₀, … rows, each with its own strategy and independent noise: as one matrix,
C = diag(C_1, C_2, …). A row takes part in one step, hence in one block, so the sensitivity is the
largest of the blocks' and every phase may spend the whole (ε, δ). The price is noise: the variance
of the running sum is Σ_j z_j² E(n_j)², after m phases at most √m times the deviation. Several
passes would meet several blocks, and are refused without a horizon.

>>> phase = make_phase(PhaseBudget(epsilon=1.0, delta=1e-6, mechanism="tree"), rows=100, passes=1,
...                    batch_size=10)
>>> phase.plan.steps, phase.batch_size
(10, 10)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from noshuffle.convex.arrays import Array
from noshuffle.errors import instance_of, open_unit, positive, whole
from noshuffle.participation import Epochs, Participation, SinglePass
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.strategies import Strategy, error

#: Rows of the first phase of a stream of unknown length.
FIRST_PHASE = 1024
#: A batch size that is not given aims at this many steps, within these limits.
AIM_STEPS, MOST_ROWS = 500, 256

UNKNOWN_HORIZON = (
    "The length of the stream was not known: it is cut into phases of 1024, 1024, 2048, 4096, … "
    "rows with independent noise. A row lies in one phase, so the phases do not add up and ε is "
    "that of each; the price is noise, whose variance in the running sum adds up over phases."
)


@dataclass(frozen=True)
class PhaseBudget:
    """What every phase may spend, and how its noise is correlated."""

    epsilon: float
    delta: float
    mechanism: str | Strategy = "blt"
    neighbours: str = "zero-out"
    unit: str = "example"

    def __post_init__(self) -> None:
        if self.epsilon != math.inf:
            positive(epsilon=self.epsilon)
        open_unit(delta=self.delta)
        instance_of((str, Strategy), mechanism=self.mechanism)
        instance_of(str, neighbours=self.neighbours)


@dataclass(frozen=True, eq=False)
class Phase:
    """A run of known length. `error` is the deviation of the noisy sum at every step, in clips."""

    plan: Plan
    rows: int
    passes: int
    batch_size: int
    error: Array

    @property
    def worst_error(self) -> float:
        """Largest deviation of one coordinate of the running sum, in clip norms."""
        return float(self.error.max())


def default_batch(rows: int) -> int:
    """About five hundred steps; small streams take single rows, long ones at most 256."""
    return min(max(rows // AIM_STEPS, 1), MOST_ROWS)


def make_phase(budget: PhaseBudget, *, rows: int, passes: int, batch_size: int | None) -> Phase:
    """Fit strategy and noise for so many rows; the same question is answered once.

    Guarantees: the plan's ε at δ never exceeds the budget's. An infinite ε means no noise, and the
    plan then states that there is no privacy.
    """
    whole(rows=rows, passes=passes)
    if batch_size is None:
        batch_size = default_batch(rows)
    whole(batch_size=batch_size)
    steps = math.ceil(rows / batch_size)
    part = SinglePass(steps) if passes == 1 else Epochs(passes, steps)
    plan, deviation = _planned(budget, part)
    return Phase(plan, rows, passes, batch_size, deviation)


@lru_cache(maxsize=256)
def _planned(budget: PhaseBudget, part: Participation) -> tuple[Plan, Array]:
    strategy = _fitted(budget.mechanism, part)
    is_private = budget.epsilon != math.inf
    plan = Plan.fit(
        part,
        mechanism=strategy,
        epsilon=budget.epsilon if is_private else None,
        noise_multiplier=None if is_private else 0.0,
        delta=budget.delta,
        neighbours=budget.neighbours,
        unit=budget.unit,
    )
    per_step = error(plan.strategy, plan.steps).per_step * plan.noise_multiplier
    return plan, per_step


@lru_cache(maxsize=256)
def _fitted(mechanism: str | Strategy, part: Participation) -> Strategy:
    """Fitting does not depend on ε, so a sweep over ε fits once."""
    if isinstance(mechanism, Strategy):
        return mechanism
    return Plan.fit(part, mechanism=mechanism, noise_multiplier=1.0).strategy


def next_phase(budget: PhaseBudget, done: list[Phase], *, batch_size: int | None) -> Phase:
    """The phase after those of a stream of unknown length: as long as all before it."""
    rows = sum(phase.rows for phase in done) or FIRST_PHASE
    return make_phase(budget, rows=rows, passes=1, batch_size=batch_size)


def statement_of(
    phases: list[Phase], *, notes: tuple[str, ...], participation_checked: bool = True
) -> PrivacyStatement:
    """The guarantee of all phases together: that of the worst, since no row lies in two."""
    said = [
        phase.plan.statement(notes=notes, participation_checked=participation_checked)
        for phase in phases
    ]
    worst = max(said, key=lambda statement: statement.epsilon)
    if len(said) == 1:
        return worst
    return replace(
        worst,
        participation=f"each unit lies in one of {len(said)} phases; there, {worst.participation}",
        mechanism=f"{said[-1].mechanism} (last of {len(said)} phases)",
        exact=all(statement.exact for statement in said),
    )
