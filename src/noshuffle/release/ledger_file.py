"""The ledger's file, open for writing: a row is on the disk when the call that wrote it returns.

    SQLite, write-ahead log, synchronous = FULL        one process at a time comes first

Tables and packing are those of `ledger_tables`, which reads them without trust. A write that was
interrupted half-way (a key press, a full disk) is taken back before the next one, or that would
wait for the end of it. `path=None` keeps the same tables in memory. What may be written is decided
by `ledger`.

State: the connection, and how units are identified, which never changes once it is written.

>>> file = LedgerFile(None)
>>> file.add_step(0, batch=b"batch", state=b"", units=np.array([5, 6]), identified_by="ids")
>>> [(row.step, row.units.tolist()) for row in file.rows()], file.identified_by
([(0, [5, 6])], 'ids')
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from noshuffle.errors import InvalidInput, ReplayRefused, VerificationFailed
from noshuffle.release.ledger_tables import SCHEMA, Row, encode_units, read_rows, read_units
from noshuffle.release.units import Ids, Seen

#: One statement, so that nobody can end the run in between.
_ADD = (
    "INSERT INTO steps SELECT ?, ?, ?, ?, ?, ? "
    "WHERE NOT EXISTS (SELECT 1 FROM meta WHERE name = 'forked')"
)
_END = "INSERT OR IGNORE INTO meta SELECT 'forked', CAST(COUNT(*) AS TEXT) FROM steps"


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
        self.db.executescript(SCHEMA)
        self._identified_by = ""

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
        self._undo()
        self.db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
        if self.fact(name) != value:
            raise InvalidInput(
                f"this ledger was started with {name} = {self.fact(name)}, got {value}; use a new "
                "run folder"
            )

    def add_step(
        self, step: int, *, batch: bytes, state: bytes, units: Ids, identified_by: str
    ) -> None:
        """Write the row of a step; durable when this returns."""
        row = (step, time.time(), batch, state, len(units), encode_units(units))
        self._undo()
        is_first = not self.identified_by
        try:
            if is_first:  # two writes that belong together; one alone is a transaction by itself
                self.db.execute("BEGIN IMMEDIATE")
                self.db.execute("INSERT INTO meta VALUES ('identified_by', ?)", (identified_by,))
            if not self.db.execute(_ADD, row).rowcount:
                raise ReplayRefused(
                    f"this run was forked after {self.fact('forked')} steps and may not go on "
                    "itself; continue the fork"
                )
            if is_first:
                self.db.execute("COMMIT")
        except sqlite3.IntegrityError:
            self._undo()
            raise ReplayRefused(
                f"step {step} was released by another process of this run; stop one"
            ) from None
        except BaseException:
            self._undo()
            raise

    def end(self) -> int:
        """Take no step any more, from any process; returns how many there are."""
        self._undo()
        self.db.execute(_END)
        return int(self.db.execute("SELECT COUNT(*) FROM steps").fetchone()[0])

    def _undo(self) -> None:
        """Before every write: take back one that did not come to its end."""
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")
            self._identified_by = ""  # may have been read from what was taken back

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        """Released steps in order."""
        return read_rows(self.db, start=start)

    def batch(self, step: int) -> bytes:
        """The batch fingerprint of one released step, without the rest of its row."""
        found = self.db.execute("SELECT batch FROM steps WHERE step = ?", (step,)).fetchone()
        if found is None:
            raise VerificationFailed(f"the ledger lacks step {step}; it was cut or edited")
        return bytes(found[0])

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
        self._undo()
        try:
            self.db.execute("BEGIN IMMEDIATE")
            covered = self.summarised
            if covered <= released:
                new = np.flatnonzero(seen.last >= covered)
                rows = zip(*(a[new].tolist() for a in (ids, seen.first, seen.last, seen.count)))
                self.db.executemany("INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?)", rows)
                self.db.execute(
                    "INSERT OR REPLACE INTO meta VALUES ('summarised', ?)", (str(released),)
                )
            self.db.execute("COMMIT")
        except BaseException:
            self._undo()
            raise

    def close(self) -> None:
        """Let go of the file as it is; nothing is written."""
        self.db.close()
