"""One ledger for many ranks: rank 0 holds it, the others hold its facts.

    admit    rank 0 looks at the units of all ranks; all get its leave, or its refusal
    record   rank 0 writes; nobody goes on to the noise before the row is on its disk

The other ranks keep the facts of the run (plan, key, number of released steps) in memory, so that
a statement can be written anywhere without waiting for anybody. Which units took part is known to
rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from noshuffle.errors import Unsupported
from noshuffle.plan import Plan
from noshuffle.release import ledger_location as place
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Admission, Ledger
from noshuffle.release.ledger_tables import Row
from noshuffle.release.units import Ids, Seen
from noshuffle.training.group.team import Team


class GroupLedger(Ledger):
    """The ledger of a team. `admit` and `record` are collective calls; the rest is local.

    Guarantees: every rank is admitted, or every rank raises the same refusal; when `record`
    returns on any rank, the row of the step is durable on rank 0. A folder that was copied, rolled
    back or lost its ledger is refused on every rank, as `ledger_location` says.
    """

    _holds_rows = True

    def __init__(self, run: RunFolder | None, plan: Plan, *, team: Team, moved: bool) -> None:
        self._team = team

        def start() -> tuple[dict[str, str], int]:
            Ledger.__init__(self, plan.participation, path=place.ready(run, plan), unit=plan.unit)
            place.settle(self, run, moved=moved)
            return self._file.facts(), self.released

        facts, released = team.lead("open the ledger", start)
        if not team.is_lead:
            super().__init__(plan.participation, unit=plan.unit)
            for name, value in facts.items():
                self.bind(name, value)
            self._released = released
            self._holds_rows = False

    def admit(
        self,
        step: int,
        ids: Ids | None,
        batch: bytes,
        *,
        state: bytes = b"",
        drop: bool = False,
        is_partial: bool = False,
    ) -> Admission:
        """The same leave on every rank, or the same refusal; see `Ledger.admit`."""
        ask = super().admit
        return self._team.lead(
            f"admission of step {step}",
            lambda: ask(step, ids, batch, state=state, drop=drop, is_partial=is_partial),
        )

    def record(self, admission: Admission) -> None:
        """Durable on rank 0 when this returns, on whatever rank."""
        write = super().record
        self._team.lead(f"record of step {admission.step}", lambda: write(admission))
        if not self._holds_rows and not admission.is_replay:
            if not self.identified_by:
                self.bind("identified_by", admission.identified_by)
            self._released = admission.step + 1

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
