"""The ledger's file, open for writing: a row is on the disk when the call that wrote it returns.

    SQLite, write-ahead log, synchronous = FULL        one process at a time comes first

Tables and hash chain are those of `ledger_tables`. A write that was interrupted half-way (a key
press, a full disk) is taken back before the next one, or that would wait for the end of it. Digests
that come later than their row wait in memory for the next write, which takes them along.
`path=None` keeps the same tables in memory. What may be written is decided by `ledger`.

State: the connection, the newest link, those that an interrupted call may have written, digests
that wait, and how units are identified.

>>> import numpy as np
>>> file = LedgerFile(None)
>>> file.add_step(0, batch=b"batch", digest=b"", units=np.array([5, 6]), identified_by="ids")
>>> [(row.step, row.units.tolist()) for row in file.rows()], file.identified_by
([(0, [5, 6])], 'ids')
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused, VerificationFailed
from noshuffle.one_owner import OneOwner
from noshuffle.release import ledger_tables as tables
from noshuffle.release import secret_units
from noshuffle.release.files import sync
from noshuffle.release.ledger_errors import explained
from noshuffle.release.unit_ids import Ids

#: Bytes of a page, and how many of them the write-ahead log holds before it begins anew.
_PAGE, _LOG_PAGES = 1024, 128
#: One statement, so that nobody can end the run in between, or go on with it. (Two questions of
#: meta: for IN (…) SQLite makes a table in every step.)
_ADD = (
    "INSERT INTO steps SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ? "
    "WHERE NOT EXISTS (SELECT 1 FROM meta WHERE name = 'forked') "
    "AND NOT EXISTS (SELECT 1 FROM meta WHERE name = 'sealed') "
    "AND NOT EXISTS (SELECT 1 FROM log WHERE seq > ?)"
)


def lacking(step: int) -> VerificationFailed:
    return VerificationFailed(f"the ledger lacks step {step}; it was cut or edited")


class LedgerFile(tables.LedgerTables, OneOwner):
    """The tables of one ledger; a forked process may read them, and nothing else.

    Guarantees: what `add_step` wrote survives a power cut; of two processes that write the same
    step the second is refused, and after `end` everybody is.
    """

    def __init__(self, path: Path | None) -> None:
        self.db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._log = None if path is None else path.with_name(f"{path.name}-wal")
        # Small pages, and a short log that is written over and over: a disk confirms those sooner.
        settings = (f"page_size={_PAGE}", "journal_mode=WAL", "synchronous=FULL")
        for how in (*settings, f"wal_autocheckpoint={_LOG_PAGES}"):
            self.db.execute(f"PRAGMA {how}")
        tables.refuse_version_1(self.db, path)
        self.db.executescript(tables.SCHEMA)
        if path is not None and (part := tables.stranger(self.db)) is not None:
            raise VerificationFailed(
                f"{path} has another {part} than the tables of a run; bring the file back as it was"
            )
        self._identified_by = ""
        self._life = 0
        self._seq, self._link = tables.last_link(self.db)
        self._is_left = False  # whether a newer life has begun
        self._waiting: dict[int, Callable[[], bytes] | bytes] = {}
        # Steps and links of rows that calls tried to write, since the last that came to its end.
        self._tried: list[tuple[int, bytes]] = []
        self.bind("format", tables.FORMAT)

    @property
    def head(self) -> tuple[int, bytes]:
        """Number and link of the newest row: names everything before it."""
        return self._seq, self._link

    @property
    def identified_by(self) -> str:
        """ "ids", "fingerprints", or "" before the first step."""
        if not self._identified_by:  # once written it stays
            self._identified_by = self.meta("identified_by") or ""
        return self._identified_by

    def bind(self, name: str, value: str) -> None:
        """Write a fact once; a different value later is refused."""
        self.check_owner()
        known = self.meta(name)
        if known is None:
            with self._writing():
                self._bind(name, value)
        elif known != value:
            raise InvalidInput(
                f"this ledger was started with {name} = {known}, got {value}; use a new run folder"
            )

    def _bind(self, name: str, value: str) -> None:
        self.db.execute("INSERT INTO meta VALUES (?, ?)", (name, value))
        self._append("fact", [name, value])

    def note(self, kind: str, **body: Any) -> None:
        """Write down that something happened (a replay, a step passed over, a checkpoint)."""
        with self._writing():
            self._append(kind, body)

    def begin_life(self, **body: Any) -> int:
        """Write down that a process starts to use this ledger; the number of its life.

        Guarantees: the row is in the file itself, so that a lost -wal file does not lose it.
        """
        number = self.lives
        with self._writing():
            self._append("life", {"life": number, "released": self._count(), **body})
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._lengthen_log()
        self._life = number
        return number

    def _lengthen_log(self) -> None:
        """Give an empty log its full length: a disk confirms sooner what makes no file longer.

        SQLite reads zeros as a log without content, and begins to write at its start.
        """
        if self._log is None:
            return
        self.db.execute("BEGIN IMMEDIATE")  # nobody else writes into it meanwhile
        try:
            with suppress(OSError), self._log.open("r+b") as file:
                if not file.seek(0, os.SEEK_END):
                    file.write(bytes(32 + _LOG_PAGES * (24 + _PAGE)))
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            self.db.execute("ROLLBACK")

    @property
    def newest_life(self) -> int:
        """The number of the last life that released a step; 0 where none has."""
        return int(self.db.execute("SELECT MAX(life) FROM steps").fetchone()[0] or 0)

    @property
    def lives(self) -> int:
        return sum(1 for _ in self.log("life"))

    def add_step(
        self,
        step: int,
        *,
        batch: bytes,
        digest: bytes,
        units: Ids,
        identified_by: str,
        is_secret: bool = False,
    ) -> None:
        """Write the row of a step; durable when this returns.

        `is_secret`: its units can be removed later, and their number stands nowhere else.
        """
        if os.getpid() != self._owner:
            self.check_owner()
        now, count, ids = time.time(), len(units), tables.encode_units(units)
        if is_secret:
            count, ids = 0, secret_units.hidden(ids)
        try:
            if not self.identified_by:
                with self._writing():  # writes that belong together
                    self._bind("identified_by", identified_by)
                    self._add(step, now, count, batch, digest, b"", ids)
                return
            late = b""
            if self._waiting:
                if self._waiting.keys() - {step - 1}:
                    self.flush()
                late = self.collect_digests().get(step - 1, b"")
            self._undo()  # one insertion is a transaction by itself
            self._add(step, now, count, batch, digest, late, ids)
            self._waiting.clear()
        except sqlite3.IntegrityError:
            raise ReplayRefused(
                f"step {step} was released by another process of this run; stop one"
            ) from None
        except sqlite3.OperationalError:
            with explained():  # here, not around the insertion: every step would pay for it
                raise

    def is_own(self, step: int) -> bool:
        """Whether the row of this step is there, and written by this object."""
        row = self.db.execute("SELECT link FROM steps WHERE step = ?", (step,)).fetchone()
        return row is not None and (step, bytes(row[0])) in self._tried

    def _add(self, step: int, now: float, count: int, *fields: bytes) -> None:
        """`fields`: batch, digest, late digest, encoded units."""
        self._check_newest()
        *prints, ids = fields
        try:
            while True:
                link = tables.step_link(self._link, step, self._life, now, count, *fields)
                row = (step, self._seq + 1, self._life, now, *prints, count, ids, link)
                self._tried.append((step, link))
                if self.db.execute(_ADD, (*row, self._seq)).rowcount:
                    break
                self._read_head()
                self._check_newest()
                self._check_ended()
            self._seq, self._link = self._seq + 1, link
        except BaseException:  # an interrupt comes right after a row was written, as a rule
            self._read_head()
            raise

    def _check_ended(self) -> None:
        for how, advice in (
            ("sealed", "begin a new one, or a fork"),
            ("forked", "continue the fork"),
        ):
            if steps := self.meta(how):
                raise ReplayRefused(
                    f"this run was {how} after {steps} steps and may not go on itself; {advice}"
                )

    def _check_newest(self) -> None:
        """Raise if somebody goes on with the run under newer keys, which the folder holds now."""
        if self._is_left:
            raise ReplayRefused(
                "another process or object has gone on with this run, under keys of its own; "
                "stop this one, or open the run again"
            )

    def _read_head(self) -> None:
        """Go on behind whatever was written; a newer life among it ends this one."""
        newer = "SELECT 1 FROM log WHERE seq > ? AND kind = 'life'"
        if self.db.execute(newer, (self._seq,)).fetchone() is not None:
            self._is_left = True
        self._seq, self._link = tables.last_link(self.db)

    def _append(self, kind: str, record: Any) -> None:
        now, body = time.time(), json.dumps(record, sort_keys=True).encode()
        link = tables.event_link(self._link, kind, now, body)
        row = (self._seq + 1, kind, now, body, link)
        self.db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", row)
        self._seq, self._link = self._seq + 1, link

    def expect_digest(self, step: int, digest: Callable[[], bytes] | bytes) -> None:
        """The digest of a step on record is still being computed; the next write takes it along."""
        self._waiting[step] = digest

    def collect_digests(self, *, or_lose: bool = False) -> dict[int, bytes]:
        """Wait for the digests that are on their way; they are written with the next row.

        `or_lose`: a step whose digest does not come any more has none, and is never repeated.
        """
        found: dict[int, bytes] = {}
        for step, digest in list(self._waiting.items()):
            try:
                own = digest if isinstance(digest, bytes) else digest()
                found[step] = self._waiting[step] = own
            except NoshuffleError:
                if not or_lose:
                    raise
                del self._waiting[step]
        return found

    def flush(self) -> None:
        if self._waiting:
            with self._writing():
                pass

    def digest(self, step: int) -> bytes:
        """The digest of the clipped sum of a released step; empty if it never reached the disk."""
        self.flush()
        own = self._of_step("digest", step)
        late = self.db.execute("SELECT late FROM steps WHERE step = ?", (step + 1,)).fetchone()
        return bytes(own or (late and late[0]) or self.late_digests().get(step, b""))

    @contextmanager
    def _writing(self, *, by_anyone: bool = False) -> Iterator[None]:
        """A transaction; digests that wait go first, and what fails leaves no trace.

        Refused where a newer process has gone on with the run, unless it is `by_anyone`.
        """
        self.check_owner()
        with explained():
            self._undo()
            waiting = self.collect_digests()
            self.db.execute("BEGIN IMMEDIATE")
            try:
                if tables.last_link(self.db) != self.head:
                    self._read_head()
                if not by_anyone:
                    self._check_newest()
                if waiting:
                    self._append("digest", {step: digest.hex() for step, digest in waiting.items()})
                yield
                self.db.execute("COMMIT")
            except BaseException:
                self._undo()
                self._identified_by = ""
                self._read_head()
                raise
        for step in waiting:
            del self._waiting[step]

    def end(self, how: str = "forked") -> int:
        """Let nobody record a step any more, a process that has it open included; their number."""
        if self.meta(how) is None:
            # A process that has the ledger open may have written since it was opened here.
            with self._writing(by_anyone=True):
                self._bind(how, str(self._count()))
        return self._count()

    def refuse_edited(self, told: Mapping[str, Any] | None) -> None:
        """Raise if rows or facts are not as they were written, or lack those that a statement.json
        was written after (`told`; None: there is none)."""
        with self._reading():
            head = () if told is None else tables.missing_head(self, told)
            found = next(chain(tables.edits(self), head), None)
        if found is not None:
            raise VerificationFailed(f"{found}; bring ledger.sqlite back as it was")

    @property
    def hides_units(self) -> bool:
        """Whether there are secret lists of units, which `remove_units` would remove."""
        return bool(secret_units.commitments(self.db))

    def remove_units(self) -> None:
        """Remove the secret lists of units for good; the chain holds as before.

        Guarantees: when this returns, nothing of them is in the file or its log. After a crash
        there are all of them or none, and to call it again brings it to its end.
        """
        self.db.execute("PRAGMA secure_delete=ON")
        with self._writing(by_anyone=True):
            new = secret_units.commitments(self.db)
            self.db.executemany("UPDATE steps SET ids = ? WHERE step = ?", new)
        secret_units.scrub(self.db, self._log)

    def _undo(self) -> None:
        """Before every write: take back one that did not come to its end."""
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
            self._identified_by = ""  # may have been read from what was taken back

    def _count(self) -> int:
        return int(self.db.execute("SELECT COUNT(*) FROM steps").fetchone()[0])

    def _of_step(self, column: str, step: int) -> Any:
        query = f"SELECT {column} FROM steps WHERE step = ?"
        found = self.db.execute(query, (step,)).fetchone()
        if found is None:
            raise lacking(step)
        return found[0]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is read inside is of one moment, whatever another process writes meanwhile."""
        self._undo()
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            self.db.execute("COMMIT")

    def copy_to(self, path: Path) -> None:
        """The same tables in a file, on the disk when this returns."""
        self.flush()
        with closing(sqlite3.connect(path, isolation_level=None)) as target:
            self.db.backup(target)
        sync(path)

    def let_go(self) -> None:
        """Close the file as it is; only digests that wait are written."""
        try:
            self.flush()
        finally:
            self.db.close()
