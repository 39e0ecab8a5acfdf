"""The runs in a budget's books, and what the events of the books add up to.

    open          a run and what it reserves
    settle        what it is charged now: at its end, or when it comes back
    not_private   why no ε holds for a run that was let in
    unprotected   a name that a run without privacy may have

State: none; `BooksState.of` replays the events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from noshuffle.budget.cost import Cost, total
from noshuffle.budget.store import Entries


@dataclass(frozen=True)
class Entry:
    """One run in the books. `cost` is what it is charged now: reserved while it is open."""

    id: str
    origin: str
    what: str
    cost: Cost
    reserved: Cost
    began: float
    is_open: bool = True
    run: str = ""
    lives: tuple[str, ...] = ()
    #: Steps on record when it was last settled; a ledger with fewer is an older state of it.
    rows: int = 0
    #: Why no ε holds for it, if that was found out.
    not_private: str = ""


@dataclass
class BooksState:
    """What the events of the books add up to."""

    limit: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    unprotected: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, events: Entries) -> BooksState:
        state = cls(events[0][1])
        for kind, body, when in events[1:]:
            if kind == "open":
                body |= {name: Cost(**body[name]) for name in ("cost", "reserved")}
                body["lives"] = tuple(body["lives"])
                state.entries[body["id"]] = Entry(**body, began=when)
            elif kind == "settle":
                old = state.entries[body["id"]]
                state.entries[old.id] = replace(
                    old,
                    cost=Cost(**body["cost"]),
                    is_open=body["is_open"],
                    lives=(*old.lives, *body.get("lives", ())),
                    rows=body.get("rows", old.rows),
                )
            elif kind == "not_private":
                old = state.entries[body["id"]]
                state.entries[old.id] = replace(old, not_private=body["why"])
            elif kind == "unprotected":
                state.unprotected.append(body["name"])
        return state

    def total(self, *, but: str = "") -> Cost:
        """What all runs cost together; runs without a finite cost are apart.

        The charge of a run that turned out NOT PRIVATE stays, so that nothing is given back for it;
        for the others the sum is a bound then.
        """
        found = total(
            entry.cost
            for entry in self.entries.values()
            if entry.id != but and math.isfinite(entry.cost.mu)
        )
        return replace(found, is_exact=found.is_exact and not self.void())

    def void(self) -> list[Entry]:
        """Runs that were let in and turned out NOT PRIVATE."""
        return [entry for entry in self.entries.values() if entry.not_private]
