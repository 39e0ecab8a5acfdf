"""The place of one run in a budget: what it is charged when it ends, and what its statement says.

It is what `release.account` calls a charge; `Budget.open` makes it, with the whole cost reserved.

State: none; the books hold it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from noshuffle.budget.entries import BooksState
from noshuffle.budget.limit import SpendingLimit
from noshuffle.budget.store import Books
from noshuffle.plan import Plan
from noshuffle.rounding import up
from noshuffle.statement import PrivacyStatement


@dataclass(frozen=True)
class OpenRun:
    """One run that draws on a budget."""

    limit: SpendingLimit
    books: Books
    id: str
    origin: str
    #: The lives of the run, this one the last.
    lives: tuple[str, ...]

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        rows: int = 0,
    ) -> None:
        """Charge what was released. More than was reserved is refused where it passes the limit.

        A run that somebody else has gone on with since is left to him; that no ε holds for what it
        released is written down in any case.
        """
        limit = self.limit
        if statement.not_private and (statement.epsilon > 0 or statement.mu):
            self.mark_not_private(" ".join(statement.not_private))
        if plan is not None and plan.participation.is_sampled:
            with self.books.reading() as events:
                state = BooksState.of(events)
            limit.cost(statement, plan, steps, state)  # long work, and remembered
        with self.books.writing() as (events, append):
            state = BooksState.of(events)
            entry = state.entries[self.id]
            if not entry.is_open or entry.lives != self.lives:
                return
            cost = limit.cost(statement, plan, steps, state, but=self.id)
            old = entry.cost
            if cost.mu > old.mu or cost.slack > old.slack or cost.pure > old.pure:
                limit.check(state, entry.what, cost, but=self.id)
            body = {"id": self.id, "cost": asdict(cost), "is_open": False, "rows": rows}
            append("settle", body)

    def mark_not_private(self, why: str) -> None:
        """No ε holds for what this run released: its charge stays, and the books say so."""
        with self.books.writing() as (events, append):
            if BooksState.of(events).entries[self.id].not_private != why:
                append("not_private", {"id": self.id, "why": why})

    def words(self) -> str:
        """Which run this is, and what all of them cost, for its statement."""
        limit = self.limit
        with self.books.reading() as events:
            state = BooksState.of(events)
        spent = state.total()
        number = list(state.entries).index(self.id) + 1
        bare = [one.what for one in state.entries.values() if not math.isfinite(one.cost.mu)]
        beside = f" Beside them, without any privacy: {', '.join(bare)}." if bare else ""
        for one in state.void():  # in other words: of this run a statement says it by itself
            beside += f" No ε holds for {one.what}, whose charge is in that sum: {one.not_private}"
        return (
            f"This is run {number} of {len(state.entries)} on this data; all together ("
            f"those under way as reserved) cost ε = {up(spent.epsilon(limit.delta))} at δ = "
            f"{up(limit.delta)}, {spent.kind}, and the limit of their budget {limit.name} is ε = "
            f"{limit.epsilon:g}, whoever chose the next run by the results of the last.{beside} "
            "Runs that do not draw on it are not counted."
        )
