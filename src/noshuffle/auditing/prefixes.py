"""μ and ε of every stopping point, from the rows that the noise stream emits, beside the statement.

A run that stops after t steps has released G + z·(M Z) for its first t rows: a Gaussian with
covariance z²Σ_t, Σ_t = M_t M_tᵀ, whatever the draws behind it: only the law of what is released
counts. With Σ = L Lᵀ, L lower triangular, the rows l_r of L⁻¹ give all stopping points in one go:

    Σ_t⁻¹ = Σ_{r<t} l_r l_rᵀ,        μ_t = max_u √(uᵀ Σ_t⁻¹ u) / z · (2 for replace-one)

A row without noise of its own (a zero on the diagonal of L) is a release without protection: μ = ∞.
Where batches are drawn in secret there is no one Gaussian: such a plan is not decided here.
Stated ε is whatever the plan says, `Plan.epsilon_after(t)`, or comes from elsewhere.

>>> from noshuffle import Epochs, Plan
>>> plan = Plan.fit(Epochs(epochs=3, steps_per_epoch=4), mechanism="tree", epsilon=2.0)
>>> found = audit_plan(plan)
>>> found.answer, len(found.stops), round(found.stops[-1].low / found.stops[-1].stated, 4)
('HOLDS', 12, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from noshuffle.auditing.answers import HOLDS, REFUTED, UNDECIDED, Finding, combined
from noshuffle.auditing.curve import epsilon_of
from noshuffle.auditing.emitted import Array, emitted_rows
from noshuffle.auditing.worst import Worst, worst
from noshuffle.participation import MinSeparation
from noshuffle.plan import Plan
from noshuffle.rounding import down, up

#: Longest run whose rows are emitted and inverted; of a longer one, its beginning.
MOST_STEPS = 1024
#: Relative error of ε that float32 rows may have.
TOLERANCE = 2e-4
#: Stopping points of participations whose worst pattern is a search.
_SEARCHED = 48


@dataclass(frozen=True)
class Stop:
    """A run stopped after `steps`: ε is at least `low` (an attack), at most `high` (proved)."""

    steps: int
    stated: float
    low: float
    high: float
    mu_low: float
    mu_high: float
    pattern: tuple[int, ...]

    @property
    def answer(self) -> str:
        """Whether the stated ε covers the truth, up to the tolerance."""
        covered = self.stated * (1 + TOLERANCE) + 1e-9
        if self.low > covered:
            return REFUTED
        return HOLDS if self.high <= covered else UNDECIDED


@dataclass(frozen=True)
class PlanAudit(Finding):
    """What was found at every stopping point, and what was left out."""

    mechanism: str
    participation: str
    noise_multiplier: float
    delta: float
    stops: tuple[Stop, ...]
    left_out: str = ""
    kind: ClassVar[str] = "plan"

    @property
    def answer(self) -> str:
        """REFUTED if any stopping point is, HOLDS if all do and none was left out."""
        answers = [stop.answer for stop in self.stops]
        return combined([*answers, UNDECIDED] if self.left_out else answers)

    @property
    def refuted(self) -> tuple[Stop, ...]:
        """Stopping points with a false statement, the falsest first."""
        false = [stop for stop in self.stops if stop.answer == REFUTED]
        return tuple(sorted(false, key=lambda stop: stop.stated / stop.low))

    def words(self) -> str:
        lines = [
            f"{self.answer}: ε of {len(self.stops)} stopping points from the emitted noise",
            f"mechanism: {self.mechanism}",
            f"participation: {self.participation}",
        ]
        for stop in self.refuted[:5]:
            steps = ", ".join(map(str, stop.pattern[:8]))
            more = f", … ({len(stop.pattern)} in all)" if len(stop.pattern) > 8 else ""
            lines.append(
                f"  stopped after {stop.steps}: stated ε = {up(stop.stated, digits=4)}, true ε ≥ "
                f"{down(stop.low, digits=4)} for a unit in steps {steps}{more}"
            )
        if len(self.refuted) > 5:
            lines.append(f"  and {len(self.refuted) - 5} more stopping points")
        if self.stops:
            last = self.stops[-1]
            lines.append(
                f"after {last.steps} steps: stated ε = {up(last.stated)}, emitted ε in "
                f"[{down(last.low)}, {up(last.high)}], "
                f"μ in [{down(last.mu_low)}, {up(last.mu_high)}]"
            )
        finite = [stop for stop in self.stops if 0 < stop.stated < math.inf]
        if finite:
            ratio, after = min((stop.low / stop.stated, stop.steps) for stop in finite)
            lines.append(f"least tight after {after} steps: {ratio:.4f} of the stated ε is reached")
        if self.left_out:
            lines.append(f"not checked: {self.left_out}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the answer of every stopping point."""
        stops = [{**asdict(stop), "answer": stop.answer} for stop in self.stops]
        return {**super().to_dict(), "stops": stops}


def audit_plan(
    plan: Plan, *, stated: Mapping[int, float] | None = None, most_steps: int | None = None
) -> PlanAudit:
    """Compare the plan's ε of every stopping point with the one of the rows it emits.

    `stated` gives ε by number of steps, where it is not that of `plan.epsilon_after`.
    """
    part, stated = plan.guarded, stated or {}
    common = (plan.strategy.words(), part.words(), plan.noise_multiplier, plan.delta)
    if part.is_sampled:
        return PlanAudit(*common, (), "the ε of batches that are drawn in secret")
    n = min(plan.steps, most_steps or MOST_STEPS)
    left_out = "" if n == plan.steps else f"stopping points after step {n} of {plan.steps}"
    rows = emitted_rows(plan.strategy.recipe(plan.steps), steps=n, horizon=plan.steps)
    factor = whitening(rows @ rows.T)
    moved = 2.0 if plan.neighbours == "replace-one" else 1.0
    scale = moved / plan.noise_multiplier if plan.noise_multiplier else math.inf
    X, stops, chosen = np.zeros((n, n)), [], _stops(plan, n)
    for t in range(1, n + 1):
        X[:t, :t] += np.outer(factor[t - 1, :t], factor[t - 1, :t])
        if t not in chosen:
            continue
        found = Worst(math.inf, math.inf, (t - 1,))
        if np.all(np.isfinite(X[:t, :t])):
            found = worst(X[:t, :t], part)
        low, high = scale * math.sqrt(found.low), scale * math.sqrt(found.high)
        spent = float(stated[t]) if t in stated else plan.epsilon_after(t)
        ends = (epsilon_of(low, delta=plan.delta), epsilon_of(high, delta=plan.delta))
        stops.append(Stop(t, spent, *ends, low, high, found.pattern))
    return PlanAudit(*common, tuple(stops), left_out)


def whitening(covariance: Array) -> Array:
    """L⁻¹ for Σ = L·Lᵀ, row by row; infinite from the first row on without noise of its own."""
    n = len(covariance)
    inverse = np.zeros((n, n))
    for t in range(n):
        shared = inverse[:t, :t] @ covariance[:t, t]
        own = covariance[t, t] - shared @ shared
        if not own > 1e-9 * covariance[t, t]:
            inverse[t:] = math.inf
            break
        inverse[t, :t] = -(shared @ inverse[:t, :t]) / math.sqrt(own)
        inverse[t, t] = 1 / math.sqrt(own)
    return inverse


def _stops(plan: Plan, n: int) -> set[int]:
    """All stopping points, or, where each is a search, some of them and of the ends of blocks."""
    if not isinstance(plan.participation.base, MinSeparation) or n <= _SEARCHED:
        return set(range(1, n + 1))
    every = getattr(plan.strategy, "restart_every", None) or n
    ends = range(every, n + 1, every)
    spread = np.geomspace(1, n, _SEARCHED // 2).round().astype(int).tolist()
    return {*spread, *ends[:: 1 + 2 * len(ends) // _SEARCHED], n}
