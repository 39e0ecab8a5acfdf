"""The place of one run in a budget: what it is charged when it ends, and what its statement says.

It is what `release.account` calls a charge; `Budget.open` makes it, with the whole cost reserved.

State: none; the books hold it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from noshuffle.budget.cost import counts_twice
from noshuffle.budget.entries import BooksState
from noshuffle.budget.limit import SpendingLimit
from noshuffle.budget.progress import Progress
from noshuffle.budget.store import Books
from noshuffle.budget.units import UnitSpending, amounts
from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.release.unit_ids import Ids
from noshuffle.rounding import up
from noshuffle.statement import PrivacyStatement


def check_kind(known: str, kind: str) -> None:
    """Raise where units were told apart in another way before."""
    if known and kind and kind != known:
        raise InvalidInput(
            f"the runs of this budget tell their units apart by {known}, and now {kind} came; 5 "
            "and '5' would count as two units, so give the same kind in every run"
        )


@dataclass(frozen=True)
class OpenRun:
    """One run that draws on a budget."""

    limit: SpendingLimit
    books: Books
    id: str
    origin: str
    barred: Ids
    id_secret: bytes | None
    #: The lives of the run, this one the last.
    lives: tuple[str, ...]
    #: How far it has come, of a run in a folder.
    progress: Progress | None = None

    def came_to(self, steps: int) -> None:
        """So many steps are on record; before the noise of the last of them is used."""
        if self.progress is not None:
            self.progress.came_to(steps)

    def identify(self, kind: str) -> None:
        """Where units are followed, all runs name them in the same way: a fact of the books."""
        if not self.limit.is_individual:
            return
        with self.books.writing() as (events, append):
            known = BooksState.of(events).kind_of_ids
            check_kind(known, kind)
            if not known:
                append("ids", {"kind": kind})

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        units: tuple[Ids, Ids] | None = None,
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
            body: dict[str, Any] = {"id": self.id, "cost": asdict(cost), "is_open": False}
            body["rows"] = rows
            if limit.is_individual and units is not None and plan is not None:
                ids, counts = units
                twice = counts_twice(plan.neighbours, under=limit.neighbours)
                own = amounts(plan, steps, counts, at_most=cost.mu**2, factor=2.0 if twice else 1.0)
                spent = UnitSpending.load(limit.folder, state.units).add(ids, own)
                body |= {"is_by_unit": True, "units": spent.save(limit.folder)}
                if entry.run:  # it may come back
                    body["own_units"] = UnitSpending().add(ids, own).save(limit.folder)
            append("settle", body)
        if self.progress is not None:
            self.progress.end()
        if "units" in body:
            self._tidy()

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
            spent = limit.total(state)
        number = list(state.entries).index(self.id) + 1
        bare = [one.what for one in state.entries.values() if not math.isfinite(one.cost.mu)]
        beside = f" Beside them, without any privacy: {', '.join(bare)}." if bare else ""
        for one in state.void():  # in other words: of this run a statement says it by itself
            beside += f" No ε holds for {one.what}, whose charge is in that sum: {one.not_private}"
        whose = "the unit that has spent most: " if limit.is_individual else ""
        return (
            f"This is run {number} of {len(state.entries)} on this data; all together ({whose}"
            f"those under way as reserved) cost ε = {up(spent.epsilon(limit.delta))} at δ = "
            f"{up(limit.delta)}, {spent.kind}, and the limit of their budget {limit.name} is ε = "
            f"{limit.epsilon:g}, whoever chose the next run by the results of the last.{beside} "
            "Runs that do not draw on it are not counted."
        )

    def _tidy(self) -> None:
        """Remove files of units that the books do not name any more."""
        with self.books.writing() as (events, _):
            state = BooksState.of(events)
            named = [state.units, *(one.own_units for one in state.entries.values())]
            kept = {record["file"] for record in named if record is not None}
            for file in self.limit.folder.glob("units-*.npy"):
                if file.name not in kept:
                    file.unlink(missing_ok=True)
