"""Reservation: what a run asks of a budget before it starts, and the place that it gets.

    new run      an `open` event with the whole cost
    comes back   its own place, open again with the whole cost
    a copy       or an older state of a run, which lacks keys or steps that the books know of: a
                 place of its own, since both continuations release; refused where their units would
                 share secret positions

All of it is one transaction on the books, in which the limit is checked. State: none.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from noshuffle.budget.entries import BooksState, Entry
from noshuffle.budget.limit import SpendingLimit
from noshuffle.budget.open_run import OpenRun
from noshuffle.budget.store import Books
from noshuffle.errors import InvalidInput, Unsupported, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.statement import PrivacyStatement


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A run that is about to start; the fields are those of `release.account.Account.open`."""

    what: str
    #: By what the books list it, where that is another name.
    listed_as: str = ""
    statement: PrivacyStatement
    plan: Plan | None
    steps: int
    run: Path | None
    origin: str | None
    parents: tuple[str, ...]
    lives: tuple[str, ...]
    released: int
    keeps_draws: bool

    def enter(self, limit: SpendingLimit, books: Books) -> OpenRun:
        """Write it into the books.

        Guarantees: raises, and writes nothing, where the limit would be passed. When this returns,
        the reservation is durable.
        """
        origin, lives = self.origin, self.lives
        with books.writing() as (events, append):
            state = BooksState.of(events)
            self._check_books(state, limit, books)
            known = self._found(state)
            if origin is not None and known is None and self.keeps_draws:
                raise Unsupported(
                    f"{self.what} is a copy or an older state of a run whose units keep their "
                    "secret positions: two continuations share them, and cost more than two runs; "
                    "go on with the newest state in its own folder, or begin a new run"
                )
            but = known.id if known else ""
            cost = limit.cost(self.statement, self.plan, self.steps, state, but=but)
            limit.check(state, self.what, cost, but=but)
            if known is not None:
                new = [life for life in lives if life not in known.lives]
                body = {"id": known.id, "cost": asdict(cost), "is_open": True, "lives": new}
                append("settle", body)
                own = known.id
            else:
                own = f"{limit.name}/{secrets.token_hex(8)}"
                append("open", {
                    "id": own, "origin": origin or own, "what": self.listed_as or self.what,
                    "cost": asdict(cost), "reserved": asdict(cost), "lives": list(lives),
                    "run": "" if self.run is None else str(self.run),
                })  # fmt: skip
        known_by = (*known.lives, *new) if known is not None else lives
        begun = origin or (own if known is None else known.origin)
        return OpenRun(limit, books, own, begun, known_by)

    def _check_books(self, state: BooksState, limit: SpendingLimit, books: Books) -> None:
        """The run, and those it was forked from, are in these books if they say so."""
        for own in filter(None, (self.origin, *self.parents)):
            if not own.startswith(f"{limit.name}/"):
                raise InvalidInput(
                    f"this run draws on the budget {own.partition('/')[0]}, not this"
                )
            if own not in state.entries:
                raise VerificationFailed(
                    f"{books.folder} does not know of a run that draws on it: the budget is older "
                    "than the run; bring the newer one back"
                )

    def _found(self, state: BooksState) -> Entry | None:
        """The place of a run that comes back, if it is not a copy of it."""
        origin = self.origin
        if origin is None:  # its process may have ended before its ledger heard of its place
            mine = [one for one in state.entries.values() if one.lives]
        else:
            mine = [one for one in state.entries.values() if one.origin == origin]
        known = (one for one in reversed(mine) if set(one.lives) <= set(self.lives))
        return next((one for one in known if self.released >= one.rows), None)
