"""One ledger for many ranks: rank 0 holds it, the others hold its facts.

    admit    rank 0 looks at the units of all ranks; all get its leave, or its refusal
    record   rank 0 writes; nobody goes on to the noise before the row is on its disk

The other ranks keep the facts of the run (plan, key, number of released steps) in memory, so that
a statement can be written anywhere without waiting for anybody. Which units took part is known to
rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from noshuffle.errors import Unsupported
from noshuffle.plan import Plan
from noshuffle.release.ledger import Admission, Ledger
from noshuffle.release.ledger_tables import Row
from noshuffle.release.units import Ids, Seen
from noshuffle.training.group.team import Team


class GroupLedger(Ledger):
    """The ledger of a team. `admit`, `record` and `digest` are collective calls; the rest is local.

    Guarantees: every rank is admitted, or every rank raises the same refusal; when `record`
    returns on any rank, the row of the step is durable on rank 0.
    """

    def __init__(self, plan: Plan, *, team: Team, path: Path | None = None) -> None:
        self._team = team
        self._holds_rows = True
        super().__init__(plan.guarded, path=path, unit=plan.unit)

    @classmethod
    def elsewhere(
        cls, plan: Plan, *, team: Team, facts: Mapping[str, str | None], released: int
    ) -> GroupLedger:
        """The ledger as seen by a rank that does not hold it."""
        made = cls(plan, team=team)
        made._told, made._released, made._holds_rows = dict(facts), released, False
        for name, value in facts.items():
            if value is not None and name not in _DERIVED:
                made.bind(name, value)
        return made

    _told: dict[str, str | None]

    def facts(self) -> dict[str, str | None]:
        """On rank 0 as ever; elsewhere what rank 0 said at the start, and what was bound since."""
        if self._holds_rows:
            return super().facts()
        return {**self._told, **self.bound(), "first": None, "last": None}

    def admit(
        self,
        step: int,
        ids: Ids | None,
        batch: bytes,
        *,
        drop: bool = False,
        is_partial: bool = False,
    ) -> Admission:
        """The same leave on every rank, or the same refusal."""
        ask = super().admit
        return self._team.lead(
            f"admission of step {step}",
            lambda: ask(step, ids, batch, drop=drop, is_partial=is_partial),
        )

    def record(self, admission: Admission, digest: bytes = b"") -> None:
        """Durable on rank 0 when this returns, on whatever rank."""
        write = super().record
        self._team.lead(f"record of step {admission.step}", lambda: write(admission, digest))
        if not self._holds_rows:
            if not self.identified_by:
                self.bind("identified_by", admission.identified_by)
            self._released = admission.step + 1

    def digest(self, step: int) -> bytes:
        """That of rank 0, on every rank."""
        ask = super().digest
        return self._team.lead(f"the digest of step {step}", lambda: ask(step))

    def expect_digest(self, step: int, digest: Callable[[], bytes] | bytes) -> None:
        """Rank 0 writes it."""
        if self._holds_rows:
            super().expect_digest(step, digest)

    def note(self, kind: str, **body: Any) -> None:
        """Rank 0 writes it."""
        if self._holds_rows:
            super().note(kind, **body)

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        """Released steps in order; on rank 0 only."""
        self._check_rows()
        return super().rows(start=start)

    def units(self) -> tuple[Ids, Seen]:
        """Every unit with its record; on rank 0 only."""
        self._check_rows()
        return super().units()

    def _check_rows(self) -> None:
        if not self._holds_rows:
            raise Unsupported("who took part is known to rank 0 alone; ask there")


#: What `Ledger.facts` works out, which is no fact to bind.
_DERIVED = (
    *("lives", "version", "torch", "first", "last", "records", "summarised", "format", "unit"),
    "budget_words",
)
