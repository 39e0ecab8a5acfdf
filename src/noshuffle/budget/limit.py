"""The limit of a budget: what a run would cost under it, and whether that still fits.

Two parts are limited apart: pure ε is added up as it is, up to what was set aside for it; all else
is composed as μ² and a failure probability, and must stay within the rest of ε at the budget's δ.
Each run may be chosen by the results of the last: both parts are privacy filters (`budget.cost`).

State: none; what was spent is in the books.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from noshuffle.accounting import gdp
from noshuffle.budget.cost import Cost, cost_of, total
from noshuffle.budget.entries import BooksState
from noshuffle.errors import BudgetExceeded, InvalidInput
from noshuffle.plan import Plan
from noshuffle.rounding import down, up
from noshuffle.statement import PrivacyStatement


@dataclass(frozen=True)
class SpendingLimit:
    """What the runs of one budget may cost together."""

    name: str
    epsilon: float
    delta: float
    pure: float
    unit: str
    neighbours: str

    def capacity(self, slack: float) -> float:
        """μ of everything that is not pure ε, beside a failure probability."""
        if not self.delta or self.pure == self.epsilon:
            return 0.0
        return gdp.capacity(epsilon=self.epsilon - self.pure, delta=self.delta, slack=slack)

    def left(self, spent: Cost) -> float:
        """The largest ε of one more Gaussian run (of pure ε, where δ = 0)."""
        if not self.delta:
            return max(0.0, (self.epsilon - spent.pure) * (1 - 1e-9))
        most = self.capacity(spent.slack)
        mu = math.sqrt(max(0.0, most**2 - spent.mu**2)) * (1 - 1e-9)
        return gdp.epsilon(mu=mu, slack=0.0, delta=self.delta)

    def cost(
        self,
        statement: PrivacyStatement,
        plan: Plan | None,
        steps: int,
        state: BooksState,
        *,
        but: str = "",
    ) -> Cost:
        """What a run of that statement costs under this limit."""
        if statement.unit != self.unit:
            raise InvalidInput(
                f"this budget protects one {self.unit}, the run one {statement.unit}; use "
                "a budget of its own for it"
            )
        near, aside = self.neighbours, self.pure - state.total(but=but).pure
        return cost_of(
            statement, delta=self.delta, neighbours=near, plan=plan, steps=steps, aside=aside
        )

    def check(self, state: BooksState, what: str, cost: Cost, *, but: str = "") -> None:
        """Raise where a run of this cost would pass the limit."""
        if not math.isfinite(cost.mu):
            return
        before = state.total(but=but)
        after = total([before, cost])
        if self.fits(after):
            return
        aside = " (of pure ε only what is set aside by pure= is added up as it is)"
        raise BudgetExceeded(
            f"{what} would bring what this data has cost from ε = "
            f"{up(before.epsilon(self.delta), digits=4)} to "
            f"{up(after.epsilon(self.delta), digits=4)} at δ = {up(self.delta)}, and the limit "
            f"is {self.epsilon:g}{aside if self.pure else ''}; a "
            f"run of at most ε = {down(self.left(before), digits=4)} would fit"
        )

    def fits(self, spent: Cost) -> bool:
        """Whether both parts of the limit hold: what is set aside for pure ε, and the rest."""
        rest = replace(spent, pure=0.0).epsilon(self.delta)
        return spent.pure <= self.pure and rest <= self.epsilon - self.pure
