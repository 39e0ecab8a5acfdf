"""The ledger: who may take part in a step, and the durable record of what was released.

    admit    the step, the batch and its units, against the plan and all earlier steps
    record   on the disk when it returns (`ledger_file`); only then is the noisy gradient used

A step that was released before may be repeated only if its clipped sum is the same to the bit: its
row holds a keyed digest of the sum. Without ids a batch is its own unit, named by its content: a
weaker check, and the statement says so; every epoch must then bring the batches of the one before
(`guard.is_content_enough`), under independent noise in any order.

State: the file (`path=None`: memory); the table of units, which learns of the last recorded step
when it is next asked (`settle`); the units of batches that came before; when examples were last
seen apart.

>>> from noshuffle.participation import SinglePass
>>> ledger = Ledger(SinglePass(steps=10))
>>> ledger.record(ledger.admit(0, np.array([5, 6]), b"batch 0"))
>>> ledger.admit(1, np.array([7, 6]), b"batch 1")
Traceback (most recent call last):
    ...
noshuffle.errors.ParticipationViolation: unit 6 may not take part in step 1: it already took part \
in step 0 and the plan allows one step; keep the order of the plan, or use on_violation='drop'
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    ParticipationViolation,
    ReplayRefused,
    VerificationFailed,
)
from noshuffle.participation import Participation, Restarted
from noshuffle.release import guard
from noshuffle.release.guard import Admission as Admission
from noshuffle.release.ledger_file import LedgerFile, lacking
from noshuffle.release.ledger_tables import Row, described
from noshuffle.release.sampler import Sampler
from noshuffle.release.unit_ids import name_to_id
from noshuffle.release.units import BatchCache, Ids, Seen, UnitTable

#: `tidy` summarises after this many participations for each unit, or this many steps.
_TIDY_UNITS, _TIDY_STEPS = 32, 16384


class Ledger(LedgerFile):
    """Admission and evidence for one run; a forked process may read it, and nothing else."""

    #: Whose draws the batches of a sampled plan must be.
    sampler: Sampler | None = None

    def __init__(
        self, participation: Participation, *, path: Path | None = None, unit: str = "example"
    ) -> None:
        super().__init__(path)
        self.participation, self._planned = participation, participation.steps
        self._groups_users = unit == "user"
        self.bind("unit", unit)
        self._table = UnitTable()
        self._later: tuple[int, Ids] | None = None  # a recorded step that the table lacks
        self._known = BatchCache()
        #: Whether a further pass over the same data began: batches without ids must be known then.
        self.is_read_again = False
        self._released = 0
        self._since = (0, 0)  # participations and steps that the saved summary does not cover
        with self._reading():
            self._catch_up()

    @property
    def released(self) -> int:
        """How many steps were released; also the index of the next one."""
        return self._released

    def facts(self) -> dict[str, str | None]:
        """Every fact, and what follows from the rows: when, how many lives and units, by what."""
        self.settle()
        ends = (0, self._released - 1) if self._released else ()
        times = [float(self._of_step("time", step)) for step in ends]
        units = None if self.participation.is_sampled else len(self._table)
        notes = (self.notes("life"), self.notes("budget"))
        return described(self.bound(), *notes, ends=times, units=units)

    def admit(
        self,
        step: int,
        ids: Ids | None,
        batch: bytes,
        *,
        drop: bool = False,
        is_partial: bool = False,
    ) -> Admission:
        """Leave to release `step` from this batch; writes nothing.

        `is_partial`: these are the units of the first part of a batch that comes in several; the
        whole batch is admitted once more, with its fingerprint, before it is released.

        Guarantees: raises, before anything is released and with ids before any gradient is
        computed, if the step lies beyond the plan, if a released step would be repeated from
        another batch (as far as that is known before its sum), or if a unit is outside its
        participation (with `drop`, its rows are left out instead). A unit appears once in a batch
        unless the plan's unit is a user, whose examples form one contribution.
        """
        if os.getpid() != self._owner:
            self.check_owner()
        if step >= self._planned:
            raise HorizonExceeded(
                f"step {step} (counted from 0) lies beyond the {self._planned} planned "
                "steps; fit a longer plan for a new run"
            )
        if step > self._released:
            raise InvalidInput(f"the next step is {self._released}, got {step}")
        mode = "fingerprints" if ids is None else "ids"
        if self.identified_by not in ("", mode):
            raise InvalidInput(
                f"this run identifies units by {self.identified_by}, step {step} came with {mode}; "
                "do the same in every step"
            )
        if step < self._released:
            return self._replay(step, ids, batch, is_partial=is_partial)
        if self.participation.is_sampled:
            return self._sampled(step, ids, batch, is_partial=is_partial)
        if ids is None and is_partial:  # the unit is the whole batch, which nobody knows yet
            return Admission(step, batch, "fingerprints", np.empty(0, dtype=np.int64))
        self.settle()
        if ids is None:
            return self._by_fingerprint(step, batch, drop=drop)
        return self._by_ids(step, ids, batch, drop=drop)

    def _by_ids(self, step: int, ids: Ids, batch: bytes, *, drop: bool) -> Admission:
        """The rule for every unit; once for all where they have always come together."""
        ids = np.asarray(ids, dtype=np.int64)  # of another width, other units have the same bytes
        known = self._known.get(ids)
        if known is not None:
            shared = self._table.shared(known)
            if shared and guard.is_group_admitted(self.participation, step=step, record=shared):
                return Admission(step, batch, "ids", known)
        units, repeat = guard.distinct(step=step, ids=ids, groups=self._groups_users, drop=drop)
        if len(ids) and repeat is None:
            spread = self._table.spread(units)
            if guard.are_all_admitted(self.participation, step=step, spread=spread):
                self._known.add(ids, units)
                return Admission(step, batch, "ids", units)
        seen = self._table.look_up(units)
        mask = guard.is_admitted(self.participation, step=step, seen=seen)
        if not drop:
            guard.refuse(self.participation, step=step, ids=units, seen=seen, mask=mask)
        if len(ids) and repeat is None and mask.all():
            self._known.add(ids, units)
            return Admission(step, batch, "ids", units)
        keep = mask[np.searchsorted(units, ids)]
        if repeat is not None:
            keep &= ~repeat
        return Admission(step, batch, "ids", units[mask], guard.unless_all(keep), not keep.any())

    def _sampled(self, step: int, ids: Ids | None, batch: bytes, *, is_partial: bool) -> Admission:
        if self.sampler is None:
            raise ParticipationViolation(
                "a sampled plan takes its batches from our sampler; make one with "
                "private.sampler(population)"
            )
        drawn = self.sampler.handed_out(step)
        if ids is not None and self._groups_users:
            ids = np.unique(ids)
        units = guard.check_sampled(step=step, ids=ids, drawn=drawn, is_partial=is_partial)
        # the caller may write into its own, a loop into what it was handed out
        return Admission(step, batch, "ids", units.copy(), is_empty=not len(units))

    def _by_fingerprint(self, step: int, batch: bytes, *, drop: bool) -> Admission:
        """Without ids the batch is the unit, and every epoch must bring the same batches."""
        unit = np.array([name_to_id(batch)], dtype=np.int64)
        record = self._table.shared(unit)
        if record is not None:  # the same rule on plain numbers
            is_fine = guard.is_group_admitted(self.participation, step=step, record=record)
            last: Any = record[1]
        else:
            seen = self._table.look_up(unit)
            is_fine = bool(guard.is_admitted(self.participation, step=step, seen=seen).all())
            last = seen.last
        again = self.is_read_again
        is_fine = is_fine and guard.is_content_enough(
            self.participation, step=step, last=last, is_read_again=again
        )
        if not is_fine and not drop:
            base = getattr(self.participation, "participation", self.participation)
            length = getattr(base, "steps_per_epoch", None)
            raise ParticipationViolation(
                f"the batch of step {step} was seen before, or differs from the batches of the "
                "last epoch; keep one order, or pass ids= (shuffled and augmented data need them)"
                + ("" if length is None else f"; the plan has {length} batches in an epoch")
            )
        units = unit if is_fine else unit[:0]
        return Admission(step, batch, "fingerprints", units, None, not is_fine)

    def _replay(self, step: int, ids: Ids | None, batch: bytes, *, is_partial: bool) -> Admission:
        """Whose rows the released sum held; whether it comes out the same is seen by its digest."""
        row = self.row(step)
        if row.is_removed:
            raise ReplayRefused(
                f"who took part in step {step} was removed when this run was sealed; it cannot be "
                "repeated"
            )
        if row.batch and batch and row.batch != batch and not is_partial:
            raise ReplayRefused(
                f"step {step} is on record with other data; the same noise would cancel in the "
                "difference; give it exactly what it had, or pass it over (private.skip)"
            )
        if ids is None:
            is_empty = not len(row.units)
            return Admission(step, batch, "fingerprints", row.units, None, is_empty, True)
        _, repeat = guard.distinct(step=step, ids=ids, groups=self._groups_users, drop=True)
        keep = np.isin(ids, row.units)
        if repeat is not None:
            keep &= ~repeat
        return Admission(
            step, batch, "ids", row.units, guard.unless_all(keep), not keep.any(), True
        )

    def record(self, admission: Admission, digest: bytes = b"") -> None:
        """Write the row of a step; durable when this returns.

        `digest` is that of its clipped sum, where it is known already (see `expect_digest`).
        """
        self.settle()
        step = admission.step
        try:
            self.add_step(
                step,
                batch=admission.batch,
                digest=digest,
                units=admission.units,
                identified_by=admission.identified_by,
                is_secret=self.participation.is_sampled,
            )
            self._take_in(step, admission.units)
            self._tried.clear()
        except ReplayRefused:
            if self._notice(step):
                raise ReplayRefused(
                    f"the row of step {step} was written by a call that was interrupted; give the "
                    "step exactly what it had once more, or pass it over (private.skip)"
                ) from None
            raise
        except Exception:
            raise
        except BaseException:  # interrupted, perhaps right after the row was written
            self._notice(step)
            raise

    def _notice(self, step: int) -> bool:
        """Take in the row of the next step if this object wrote it before it was interrupted."""
        if step != self._released or not self.is_own(step):
            return False
        self._take_in(step, self.row(step).units)
        return True

    def _take_in(self, step: int, units: Ids) -> None:
        """The row of the next step is on the disk."""
        self._later, self._released = (step, units), step + 1

    def settle(self) -> None:
        """Tell the table of units what was recorded (once more, if interrupted: it counts once)."""
        later = self._later
        if later is not None:
            self._take(*later)
            if self._later is later:  # another thread may have recorded the next step meanwhile
                self._later = None

    def _take(self, step: int, units: Ids) -> None:
        if not self.participation.is_sampled:
            anew = None
            if isinstance(self.participation, Restarted):  # else only units never seen do
                seen = self._table.look_up(units)
                anew = guard.starts_anew(self.participation, step=step, seen=seen)
            self._table.update(units, step=step, first=anew)
        self._since = (self._since[0] + len(units), self._since[1] + 1)

    def _catch_up(self) -> None:
        """Rebuild the table: the saved summary, then the steps after it.

        Guarantees: a summary that does not add up to its steps is refused, since units that it
        forgot would be admitted again.
        """
        self._released, saved = self.saved_units()
        ids, first, last, count = np.array(saved, dtype=np.int64).reshape(-1, 4).T
        self._table.restore(ids, Seen(first=first, last=last, count=count))
        sums = "SELECT COUNT(*), TOTAL(units) FROM steps WHERE step < ?"
        steps, listed = map(int, self.db.execute(sums, (self._released,)).fetchone())
        known, wanted = (0, 0) if self.participation.is_sampled else (int(count.sum()), listed)
        if (steps, wanted) != (self._released, known):
            raise VerificationFailed(
                f"the ledger sums up {self._released} steps with {known} participations and holds "
                f"{steps} with {wanted} of them; it was cut or edited"
            )
        for row in self.rows(start=self._released):
            if row.step != self._released:
                raise lacking(self._released)
            self._take(row.step, row.units)
            self._released = row.step + 1

    def row(self, step: int) -> Row:
        return next(self.rows(start=step))

    def units(self) -> tuple[Ids, Seen]:
        """Every unit with first step, last step and count, from the steps."""
        self.settle()
        return self._table.all()

    def tidy(self) -> None:
        """Summarise if it pays: a row for every unit takes longer than many steps do."""
        self.settle()
        participations, steps = self._since
        if participations >= _TIDY_UNITS * len(self._table) or steps >= _TIDY_STEPS:
            self.summarise()

    def summarise(self) -> None:
        """Bring the per-unit summary up to date (units seen since the last time only).

        One of more steps, which another process may have written just now, stays.
        """
        self.settle()
        ids, seen = self._table.all()
        with self._writing():
            covered = int(self.meta("summarised") or 0)
            if covered <= self._released:
                new = np.flatnonzero(seen.last >= covered)
                rows = zip(*(a[new].tolist() for a in (ids, seen.first, seen.last, seen.count)))
                self.db.executemany("INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?)", rows)
                told = ("summarised", str(self._released))
                self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", told)
        self._since = (0, 0)

    def close(self) -> None:
        self.summarise()
        self.let_go()

    def copy_to(self, path: Path) -> None:
        self.summarise()
        super().copy_to(path)
