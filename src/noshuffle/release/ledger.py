"""The ledger: who may take part in a step, and the durable record of what was released.

    admit    the step, the batch and its units, against the plan and all earlier steps
    record   on the disk when it returns (`ledger_file`); only then is the noisy gradient used

A step that was released before may be repeated only if its clipped sum is the same to the bit: its
row holds a keyed digest of the sum (`digest`), `release` compares. `path=None` keeps the record in
memory.

Without ids a batch is its own unit, named by its content: a weaker check, and the statement says
so. Under Epochs the batch of step t must then equal that of step t − b.

State: the file; of every unit its first and last step and their number (`units`), which learns of
the last recorded step when it is next asked (`settle`); the units of batches that came before.

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

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    ParticipationViolation,
    ReplayRefused,
    VerificationFailed,
)
from noshuffle.one_owner import OneOwner
from noshuffle.participation import Participation, Restarted
from noshuffle.release import guard
from noshuffle.release.guard import Mask
from noshuffle.release.ledger_file import LedgerFile
from noshuffle.release.ledger_tables import Row
from noshuffle.release.units import BatchCache, Ids, Seen, UnitTable, name_to_id

FINGERPRINTS_ONLY = (
    "Participation was checked by batch fingerprints only: that no unit sits in two different "
    "batches is the word of whoever built them."
)
#: `tidy` summarises after this many participations for each unit, or this many steps.
_TIDY_UNITS, _TIDY_STEPS = 32, 16384


class SecretDraw(Protocol):
    """What the guard asks of a secret sampler."""

    def draw(self, step: int) -> Ids:
        """The units of this step."""
        ...


@dataclass(frozen=True)
class Admission:
    """Leave to release a step: the units admitted, and which rows of the batch are theirs.

    `keep` is one truth value per row (None: all of them); `is_empty` says that nothing of the
    batch may be used, and noise alone is released.
    """

    step: int
    batch: bytes
    identified_by: str
    units: Ids
    keep: Mask | None = None
    is_empty: bool = False
    is_replay: bool = False


class Ledger(OneOwner):
    """Admission and evidence for one run; a forked process may read it, and nothing else."""

    def __init__(
        self,
        participation: Participation,
        *,
        path: Path | None = None,
        unit: str = "example",
        sampler: SecretDraw | None = None,
    ) -> None:
        self.participation = participation
        self.sampler = sampler
        self._planned = participation.steps
        self._groups_users = unit == "user"
        self._file = LedgerFile(path)
        self.bind("unit", unit)
        self._table = UnitTable()
        self._later: tuple[int, Ids] | None = None  # a recorded step that the table lacks
        self._known = BatchCache()
        self._released = 0
        self._since = (0, 0)  # participations and steps that the saved summary does not cover
        self.barred: Ids = np.empty(0, dtype=np.int64)  # have used up the budget of their data
        with self._file.standing_still():
            self._catch_up()

    @property
    def released(self) -> int:
        """How many steps were released; also the index of the next one."""
        return self._released

    @property
    def identified_by(self) -> str:
        """ "ids", "fingerprints", or "" before the first step."""
        return self._file.identified_by

    def meta(self, name: str) -> str | None:
        """A fact about the run."""
        return self._file.fact(name)

    def facts(self) -> dict[str, str | None]:
        """Every fact, and what follows from the rows: when, how many lives and units, by what."""
        self.settle()
        ends = [self._file.time(step) for step in (0, self._released - 1)] if self._released else []
        units = None if self.participation.is_sampled else len(self._table)
        told = self.notes("budget")
        return described(self._file.facts(), self.notes("life"), told, ends=ends, units=units)

    def flush(self) -> None:
        """Write digests that have come since the last row."""
        self.check_owner()
        self._file.flush()

    def bind(self, name: str, value: str) -> None:
        """Write a fact once; a different value later is refused."""
        self.check_owner()
        self._file.bind(name, value)

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

        `is_partial` checks the units of the first part of a batch that comes in several; the
        whole batch is then admitted once more, with its fingerprint, before it is released.

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
        if ids is None:
            return self._by_fingerprint(step, batch, drop=drop)
        self.settle()
        return self._by_ids(step, ids, batch, drop=drop)

    def _by_ids(self, step: int, ids: Ids, batch: bytes, *, drop: bool) -> Admission:
        """The rule for every unit; once for all where they have always come together."""
        ids = np.asarray(ids, dtype=np.int64)  # of another width, other units have the same bytes
        key = ids.tobytes()
        known = self._known.get(key)
        if known is not None:
            shared = self._table.shared(known[1])
            if shared and guard.is_party_admitted(self.participation, step=step, record=shared):
                return Admission(step, batch, "ids", known[0])
        units, rows = guard.distinct(step=step, ids=ids, groups=self._groups_users, drop=drop)
        seen = self._table.look_up(units)
        mask = guard.is_admitted(self.participation, step=step, seen=seen)
        is_barred = np.isin(units, self.barred)
        if not drop:
            guard.refuse(self.participation, step=step, ids=units, seen=seen, mask=mask | is_barred)
        mask &= ~is_barred
        keep = (rows >= 0) & mask[rows] if len(ids) else np.zeros(0, dtype=bool)
        if len(ids) and keep.all():
            self._known.add(key, units)
            return Admission(step, batch, "ids", units)
        return Admission(step, batch, "ids", units[mask], _unless_all(keep), not keep.any())

    def _sampled(self, step: int, ids: Ids | None, batch: bytes, *, is_partial: bool) -> Admission:
        if self.sampler is None:
            raise ParticipationViolation(
                "a sampled plan takes its batches from our sampler; make one with "
                "private.sampler(population)"
            )
        drawn = self.sampler.draw(step)
        if ids is not None and self._groups_users:
            ids = np.unique(ids)
        guard.check_sampled(step=step, ids=ids, drawn=drawn, is_partial=is_partial)
        assert ids is not None
        return Admission(step, batch, "ids", np.sort(ids), is_empty=not len(ids))

    def _by_fingerprint(self, step: int, batch: bytes, *, drop: bool) -> Admission:
        """Without ids the batch is the unit, and every epoch must bring the same batches."""
        self.settle()
        if len(self.barred):
            raise ParticipationViolation(
                f"{len(self.barred)} units have used up the budget of this data and must be left "
                "out; pass ids=, so that they can be told apart"
            )
        unit = np.array([name_to_id(batch)], dtype=np.int64)
        shared = self._table.shared(unit.tobytes())
        if shared is not None:
            is_fine = guard.is_party_admitted(self.participation, step=step, record=shared)
        else:
            seen = self._table.look_up(unit)
            is_fine = bool(guard.is_admitted(self.participation, step=step, seen=seen).all())
        before = guard.same_batch(self.participation, step=step)
        is_fine = is_fine and (before is None or self._file.batch(before) == batch)
        if not is_fine and not drop:
            raise ParticipationViolation(
                f"the batch of step {step} was seen before, or differs from the batch at its "
                "place in the last epoch; keep one order, or pass ids= (augmented data needs them)"
            )
        units = unit if is_fine else unit[:0]
        return Admission(step, batch, "fingerprints", units, None, not is_fine)

    def _replay(self, step: int, ids: Ids | None, batch: bytes, *, is_partial: bool) -> Admission:
        """Whose rows the released sum held; whether it comes out the same is seen by its digest."""
        row = self.row(step)
        if row.batch and batch and row.batch != batch and not is_partial:
            raise ReplayRefused(
                f"step {step} was already released with other data; the same noise would cancel in "
                "the difference; give it exactly what it had, or pass it over (private.skip)"
            )
        if ids is None:
            by, keep, is_empty = "fingerprints", None, not len(row.units)
        else:
            by = "ids"
            _, rows = guard.distinct(step=step, ids=ids, groups=self._groups_users, drop=True)
            keep = (rows >= 0) & np.isin(ids, row.units)
            is_empty = not keep.any()
            keep = _unless_all(keep)
        return Admission(step, batch, by, row.units, keep, is_empty, is_replay=True)

    def record(self, admission: Admission, digest: bytes = b"") -> None:
        """Write the row of a step; durable when this returns.

        `digest` is that of its clipped sum, where it is known already (see `expect_digest`).
        """
        if os.getpid() != self._owner:
            self.check_owner()
        self.settle()
        step = admission.step
        try:
            self._file.add_step(
                step,
                batch=admission.batch,
                digest=digest,
                units=admission.units,
                identified_by=admission.identified_by,
            )
        except Exception:
            raise
        except BaseException:  # interrupted, perhaps right after the row was written
            if self._file.has_step(step):
                self._later, self._released = (step, admission.units), step + 1
            raise
        self._later, self._released = (step, admission.units), step + 1

    def expect_digest(self, step: int, digest: Callable[[], bytes] | bytes) -> None:
        """The digest of a step on record is still being computed; the next write takes it along."""
        self._file.expect_digest(step, digest)

    def collect_digests(self, *, or_lose: bool = False) -> None:
        """Wait for digests that are on their way; `or_lose` gives up those that do not come."""
        self._file.collect_digests(or_lose=or_lose)

    def digest(self, step: int) -> bytes:
        """The digest of the clipped sum of a released step; empty if it never reached the disk."""
        return self._file.digest(step)

    def note(self, kind: str, **body: Any) -> None:
        """Write down that something happened (a replay, a step passed over, a checkpoint)."""
        self.check_owner()
        self._file.record(kind, body)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """What was written down of one kind, oldest first."""
        return [json.loads(event.body) for event in self._file.log(kind)]

    def begin_life(self, **body: Any) -> int:
        """Write down that a process starts to use this ledger; returns the number of its life.

        Guarantees: the row is in the file itself, so that a lost -wal file does not lose it.
        """
        self.check_owner()
        number = sum(1 for _ in self._file.log("life"))
        self._file.record("life", {"life": number, "released": self._released, **body})
        self._file.fold()
        self._file.life = number
        return number

    @property
    def lives(self) -> int:
        """How many processes have gone on with this run."""
        return sum(1 for _ in self._file.log("life"))

    @property
    def head(self) -> tuple[int, bytes]:
        """Number and link of the newest row."""
        return self._file.head

    def settle(self) -> None:
        """Tell the table of units what was recorded; whoever asks it does that first.

        If it is interrupted, the step is told once more, and the table counts it once.
        """
        if self._later is not None:
            self._take(*self._later)
            self._later = None

    def _take(self, step: int, units: Ids) -> None:
        if not self.participation.is_sampled:
            anew = None
            if isinstance(self.participation, Restarted):  # else only units never seen start anew
                seen = self._table.look_up(units)
                anew = guard.starts_anew(self.participation, step=step, seen=seen)
            self._table.update(units, step=step, first=anew)
        self._since = (self._since[0] + len(units), self._since[1] + 1)

    def _catch_up(self) -> None:
        """Rebuild the table: the saved summary, then the steps after it.

        Guarantees: a summary that does not add up to the steps it covers is refused, since units
        that it forgot would be admitted again.
        """
        ids, seen = self._file.units()
        self._table.restore(ids, seen)
        self._released = self._file.summarised
        known = 0 if self.participation.is_sampled else int(seen.count.sum())
        steps, participations = self._file.counted(before=self._released)
        wanted = 0 if self.participation.is_sampled else participations
        if (steps, wanted) != (self._released, known):
            raise VerificationFailed(
                f"the ledger sums up {self._released} steps with {known} participations and holds "
                f"{steps} with {wanted} of them; it was cut or edited"
            )
        for row in self.rows(start=self._released):
            if row.step != self._released:
                raise VerificationFailed(
                    f"the ledger lacks step {self._released}; it was cut or edited"
                )
            self._take(row.step, row.units)
            self._released = row.step + 1

    def end(self, how: str = "forked") -> int:
        """Let nobody record a step any more, a process that has it open included; their number."""
        self.check_owner()
        return self._file.end(how)

    def row(self, step: int) -> Row:
        """One released step."""
        return next(self.rows(start=step))

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        """Released steps in order."""
        return self._file.rows(start=start)

    def units(self) -> tuple[Ids, Seen]:
        """Every unit with first step, last step and count, from the steps."""
        self.settle()
        return self._table.all()

    def tidy(self) -> None:
        """Summarise if it pays: a row for every unit takes longer than many steps do.

        What the summary does not cover is read from the steps when the ledger is opened again.
        """
        self.settle()
        participations, steps = self._since
        if participations >= _TIDY_UNITS * len(self._table) or steps >= _TIDY_STEPS:
            self.summarise()

    def summarise(self) -> None:
        """Bring the per-unit summary up to date (units seen since the last time only)."""
        self.check_owner()
        self.settle()
        self._file.save_units(*self._table.all(), released=self._released)
        self._since = (0, 0)

    def close(self) -> None:
        """Summarise and let go of the file."""
        self.summarise()
        self.let_go()

    def copy_to(self, path: Path) -> None:
        """Everything that is on record, as a ledger in this file."""
        self.check_owner()
        self.summarise()
        self._file.copy_to(path)

    def let_go(self) -> None:
        """Close the file as it is; nothing is written."""
        self._file.close()


def described(
    facts: Mapping[str, str],
    lives: Sequence[Mapping[str, Any]],
    budget: Sequence[Mapping[str, Any]],
    *,
    ends: Sequence[float],
    units: int | None,
) -> dict[str, str | None]:
    """Facts, and what follows from rows: times of the first and last step, number of units."""
    newest = lives[-1] if lives else {}
    has_units = facts.get("identified_by") == "ids" and units is not None
    return {
        **facts,
        "lives": str(len(lives)),
        "version": newest.get("version"),
        "torch": newest.get("torch"),
        "budget_words": budget[-1].get("words") if budget else None,
        **{name: repr(when) for name, when in zip(("first", "last"), ends)},
        "records": str(units) if has_units else facts.get("population"),
    }


def _unless_all(keep: Mask) -> Mask | None:
    return None if keep.all() else keep
