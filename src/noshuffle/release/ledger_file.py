"""The ledger's file, open for writing: a row is on the disk when the call that wrote it returns.

    SQLite, write-ahead log, synchronous = FULL        one process at a time comes first

Tables, packing and hash chain are those of `ledger_tables`, which reads them without trust. A write
that was interrupted half-way (a key press, a full disk) is taken back before the next one, or that
would wait for the end of it. Digests that come later than their row wait in memory for the next
write, which takes them along. `path=None` keeps the same tables in memory. What may be written is
decided by `ledger`.

State: the connection, the newest link, digests that wait, and how units are identified, which never
changes once it is written.

>>> file = LedgerFile(None)
>>> file.add_step(0, batch=b"batch", digest=b"", units=np.array([5, 6]), identified_by="ids")
>>> [(row.step, row.units.tolist()) for row in file.rows()], file.identified_by
([(0, [5, 6])], 'ids')
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused, VerificationFailed
from noshuffle.release.files import sync_file
from noshuffle.release.ledger_tables import (
    FORMAT,
    SCHEMA,
    Event,
    Row,
    encode_units,
    event_link,
    last_link,
    read_log,
    read_rows,
    read_units,
    step_link,
)
from noshuffle.release.units import Ids, Seen

#: One statement, so that nobody can end the run in between, or go on with it.
_ADD = (
    "INSERT INTO steps SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ? "
    "WHERE NOT EXISTS (SELECT 1 FROM meta WHERE name IN ('forked', 'sealed')) "
    "AND NOT EXISTS (SELECT 1 FROM log WHERE seq > ?)"
)


class LedgerFile:
    """The tables of one ledger.

    Guarantees: what `add_step` wrote survives a power cut; of two processes that write the same
    step the second is refused, and after `end` everybody is.
    """

    def __init__(self, path: Path | None) -> None:
        self.db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        # Small pages, and a short log that is written over and over: a disk confirms those sooner.
        self.db.execute("PRAGMA page_size=1024")
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_autocheckpoint=128")
        _check_format(self.db, path)
        self.db.executescript(SCHEMA)
        self._identified_by = ""
        self.life = 0
        self._seq, self._link = last_link(self.db)
        self._is_left = False  # whether a newer life has begun
        self._waiting: dict[int, Callable[[], bytes] | bytes] = {}
        self.bind("format", FORMAT)

    @property
    def head(self) -> tuple[int, bytes]:
        """Number and link of the newest row: names everything before it."""
        return self._seq, self._link

    @property
    def identified_by(self) -> str:
        """ "ids", "fingerprints", or "" before the first step."""
        if not self._identified_by:  # once written it stays
            self._identified_by = self.fact("identified_by") or ""
        return self._identified_by

    def fact(self, name: str) -> str | None:
        """A fact about the run."""
        found = self.db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def facts(self) -> dict[str, str]:
        """All of them."""
        return dict(self.db.execute("SELECT name, value FROM meta"))

    def bind(self, name: str, value: str) -> None:
        """Write a fact once; a different value later is refused."""
        known = self.fact(name)
        if known is None:
            with self._writing():
                self._bind(name, value)
        elif known != value:
            raise InvalidInput(
                f"this ledger was started with {name} = {known}, got {value}; use a new run folder"
            )

    def _bind(self, name: str, value: str) -> None:
        self.db.execute("INSERT INTO meta VALUES (?, ?)", (name, value))
        self._append("fact", json.dumps([name, value]).encode())

    def record(self, kind: str, body: dict[str, Any]) -> None:
        """Add a row to the log; durable when this returns."""
        with self._writing():
            self._append(kind, json.dumps(body, sort_keys=True).encode())

    def log(self, kind: str | None = None) -> Iterator[Event]:
        """Rows of the log in order, or those of one kind."""
        return read_log(self.db, kind)

    def add_step(
        self, step: int, *, batch: bytes, digest: bytes, units: Ids, identified_by: str
    ) -> None:
        """Write the row of a step; durable when this returns."""
        now, ids = time.time(), encode_units(units)
        try:
            if not self.identified_by:
                with self._writing():  # writes that belong together
                    self._bind("identified_by", identified_by)
                    self._add(step, now, batch, digest, b"", len(units), ids)
                return
            if self._waiting.keys() - {step - 1}:
                self.flush()
            self.collect_digests()
            late = self._waiting.get(step - 1, b"")
            self._undo()  # one insertion is a transaction by itself
            self._add(step, now, batch, digest, late, len(units), ids)  # type: ignore[arg-type]
            self._waiting.clear()
        except sqlite3.IntegrityError:
            raise ReplayRefused(
                f"step {step} was released by another process of this run; stop one"
            ) from None

    def _add(
        self,
        step: int,
        now: float,
        batch: bytes,
        digest: bytes,
        late: bytes,
        count: int,
        ids: bytes,
    ) -> None:
        self._check_newest()
        try:
            while True:
                link = step_link(self._link, step, self.life, now, count, batch, digest, late, ids)
                row = (step, self._seq + 1, self.life, now, batch, digest, late, count, ids, link)
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
        """Raise if nobody may add a step any more."""
        how = next((name for name in ("sealed", "forked") if self.fact(name)), "")
        if how:
            raise ReplayRefused(
                f"this run was {how} after {self.fact(how)} steps and may not go on itself"
                + ("; continue the fork" if how == "forked" else "; begin a new one, or a fork")
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
        self._seq, self._link = last_link(self.db)

    def _append(self, kind: str, body: bytes) -> None:
        now = time.time()
        link = event_link(self._link, kind, now, body)
        row = (self._seq + 1, kind, now, body, link)
        self.db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", row)
        self._seq, self._link = self._seq + 1, link

    def expect_digest(self, step: int, digest: Callable[[], bytes] | bytes) -> None:
        """The digest of a step that is written already comes later: with the next write."""
        self._waiting[step] = digest

    def collect_digests(self, *, or_lose: bool = False) -> None:
        """Wait for the digests that are on their way; they are written with the next row.

        `or_lose`: a step whose digest does not come any more has none, and is never repeated.
        """
        for step, digest in list(self._waiting.items()):
            if isinstance(digest, bytes):
                continue
            try:
                self._waiting[step] = digest()
            except NoshuffleError:
                if not or_lose:
                    raise
                del self._waiting[step]

    def flush(self) -> None:
        """Write the digests that wait."""
        if self._waiting:
            with self._writing():
                pass

    def digest(self, step: int) -> bytes:
        """The digest of the clipped sum of a released step; empty if it never reached the disk."""
        self.flush()
        found = self.db.execute("SELECT digest FROM steps WHERE step = ?", (step,)).fetchone()
        if found is None:
            raise VerificationFailed(f"the ledger lacks step {step}; it was cut or edited")
        if found[0]:
            return bytes(found[0])
        after = self.db.execute("SELECT late FROM steps WHERE step = ?", (step + 1,)).fetchone()
        if after is not None and after[0]:
            return bytes(after[0])
        return late_digests(self.log("digest")).get(step, b"")

    @contextmanager
    def _writing(self, *, by_anyone: bool = False) -> Iterator[None]:
        """A transaction; digests that wait go first, and what fails leaves no trace.

        Refused where a newer process has gone on with the run, unless it is `by_anyone`.
        """
        self._undo()
        self.collect_digests()
        waiting = {step: digest.hex() for step, digest in self._waiting.items()}  # type: ignore[union-attr]
        self.db.execute("BEGIN IMMEDIATE")
        try:
            if last_link(self.db) != self.head:
                self._read_head()
            if not by_anyone:
                self._check_newest()
            if waiting:
                self._append("digest", json.dumps(waiting).encode())
            yield
            self.db.execute("COMMIT")
        except BaseException:
            self._undo()
            self._identified_by = ""
            self._read_head()
            raise
        for step in waiting:
            del self._waiting[int(step)]

    def end(self, how: str = "forked") -> int:
        """Take no step any more, from any process; returns how many there are."""
        steps = int(self.db.execute("SELECT COUNT(*) FROM steps").fetchone()[0])
        if self.fact(how) is None:
            # A process that has the ledger open may have written since it was opened here.
            with self._writing(by_anyone=True):
                steps = int(self.db.execute("SELECT COUNT(*) FROM steps").fetchone()[0])
                self._bind(how, str(steps))
        return steps

    def _undo(self) -> None:
        """Before every write: take back one that did not come to its end."""
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
            self._identified_by = ""  # may have been read from what was taken back

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        """Released steps in order."""
        return read_rows(self.db, start=start)

    def has_step(self, step: int) -> bool:
        """Whether the row of a step is there."""
        found = self.db.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone()
        return found is not None

    def batch(self, step: int) -> bytes:
        """The batch fingerprint of one released step, without the rest of its row."""
        found = self.db.execute("SELECT batch FROM steps WHERE step = ?", (step,)).fetchone()
        if found is None:
            raise VerificationFailed(f"the ledger lacks step {step}; it was cut or edited")
        return bytes(found[0])

    def time(self, step: int) -> float:
        """When a step was recorded."""
        found = self.db.execute("SELECT time FROM steps WHERE step = ?", (step,)).fetchone()
        if found is None:
            raise VerificationFailed(f"the ledger lacks step {step}; it was cut or edited")
        return float(found[0])

    @property
    def summarised(self) -> int:
        """How many steps the saved summary of units covers."""
        return int(self.fact("summarised") or 0)

    def units(self) -> tuple[Ids, Seen]:
        """The saved summary."""
        data = np.array(read_units(self.db), dtype=np.int64).reshape(-1, 4).T
        return data[0], Seen(first=data[1], last=data[2], count=data[3])

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """What is read inside is of one moment, whatever another process writes meanwhile."""
        self._undo()
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            self.db.execute("COMMIT")

    def counted(self, *, before: int) -> tuple[int, int]:
        """How many steps lie before that one, with how many participations; units are not read."""
        sums = "SELECT COUNT(*), TOTAL(units) FROM steps WHERE step < ?"
        steps, participations = self.db.execute(sums, (before,)).fetchone()
        return int(steps), int(participations)

    def save_units(self, ids: Ids, seen: Seen, *, released: int) -> None:
        """Bring the summary up to date with what is known of all units after `released` steps.

        One of more steps, which another process may have written just now, stays.
        """
        with self._writing():
            covered = self.summarised
            if covered <= released:
                new = np.flatnonzero(seen.last >= covered)
                rows = zip(*(a[new].tolist() for a in (ids, seen.first, seen.last, seen.count)))
                self.db.executemany("INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?)", rows)
                self.db.execute(
                    "INSERT OR REPLACE INTO meta VALUES ('summarised', ?)", (str(released),)
                )

    def copy_to(self, path: Path) -> None:
        """The same tables in a file, on the disk when this returns."""
        self.flush()
        target = sqlite3.connect(path, isolation_level=None)
        with closing(target):
            self.db.backup(target)
        sync_file(path)

    def fold(self) -> None:
        """Bring everything into the one file, so that a lost -wal file loses nothing of it."""
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Let go of the file as it is; only digests that wait are written."""
        try:
            self.flush()
        finally:
            self.db.close()


def late_digests(log: Iterator[Event]) -> dict[int, bytes]:
    """Digests that came after their row, by step."""
    found: dict[int, bytes] = {}
    for event in log:
        for step, digest in json.loads(event.body).items():
            found[int(step)] = bytes.fromhex(digest)
    return found


def _check_format(db: sqlite3.Connection, path: Path | None) -> None:
    columns = {row[1] for row in db.execute("PRAGMA table_info(steps)")}
    if columns and "link" not in columns:
        raise InvalidInput(
            f"{path} was written by noshuffle 0.1, whose rows have no digests; go on with that "
            "version, or begin a new run from its model"
        )
