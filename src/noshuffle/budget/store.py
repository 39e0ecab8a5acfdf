"""The books of a budget on the disk: a hash-chained log that several processes may add to.

    books.sqlite   one row per event: the limit, reservations, settlements, named exceptions
    budget.json    the limit in plain text, and the newest link that was written down there

Rows have the chain of a run's ledger (`release.ledger_tables`); a log that was cut at its end or
put back as a whole lacks the link that budget.json names. An addition is one transaction that
begins with the look at the books, so of two processes that want the last of a budget one sees what
the other has taken. Plain rollback journal, synchronous = EXTRA. State: none between calls.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, VerificationFailed
from noshuffle.release.files import make_folder, read_json, write_json
from noshuffle.release.ledger_tables import (
    SCHEMA,
    broken_link,
    event_link,
    last_link,
    read_log,
)

#: Seconds to wait for another process that is writing.
_PATIENCE = 60.0
#: Kind, body, time.
Entries = list[tuple[str, dict[str, Any], float]]
Append = Callable[[str, dict[str, Any]], None]


class Books:
    """The log of one budget.

    Guarantees: raises `VerificationFailed` where the log was edited, cut or put back, before
    anything is read from it or added to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file, self.anchor = folder / "books.sqlite", folder / "budget.json"

    @property
    def is_there(self) -> bool:
        """Whether a budget was begun here; a process that died while it began one has left none."""
        if self.anchor.exists() or not self.file.exists():
            return self.anchor.exists()
        with closing(self._connect()) as db:
            try:
                return db.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
            except sqlite3.DatabaseError:  # whoever reads the books says what is the matter
                return True

    def begin(self, limit: dict[str, Any]) -> None:
        """Write the first row, unless another process was faster."""
        make_folder(self.file.parent)
        with closing(self._connect()) as db:
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA}")  # tables and first row come together
            if last_link(db)[0] == 0:
                self._add(db, "limit", limit)
            db.execute("COMMIT")
            self._write_anchor(db)

    @contextmanager
    def reading(self) -> Iterator[Entries]:
        """Every event, oldest first; meanwhile nobody adds one."""
        with closing(self._connect()) as db:
            db.execute("BEGIN")
            yield self._checked(db)

    @contextmanager
    def writing(self) -> Iterator[tuple[Entries, Append]]:
        """Look at the books and add to them, as one step; what raises leaves no trace."""
        with closing(self._connect()) as db:
            db.execute("BEGIN IMMEDIATE")
            events, before = self._checked(db), last_link(db)
            try:
                yield events, lambda kind, body: self._add(db, kind, body)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite has undone it by itself where the disk is full
                    db.execute("ROLLBACK")
                raise
            if last_link(db) != before:
                self._write_anchor(db)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, isolation_level=None, timeout=_PATIENCE)
        try:
            db.execute("PRAGMA synchronous=EXTRA")
        except sqlite3.DatabaseError as error:
            db.close()
            raise self._lost(f"it cannot be read ({error})") from None
        return db

    @staticmethod
    def _add(db: sqlite3.Connection, kind: str, body: dict[str, Any]) -> None:
        (seq, link), now = last_link(db), time.time()
        data = json.dumps(body, sort_keys=True).encode()
        row = (seq + 1, kind, now, data, event_link(link, kind, now, data))
        db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", row)

    def _write_anchor(self, db: sqlite3.Connection) -> None:
        seq, link = last_link(db)
        (body,) = db.execute("SELECT body FROM log WHERE seq = 1").fetchone()
        limit = json.loads(body)  # that of the books, whoever began them
        write_json(self.anchor, {"limit": limit, "rows": seq, "link": link.hex()})

    def _checked(self, db: sqlite3.Connection) -> Entries:
        """The events, once the chain and the anchor were compared with them."""
        try:
            wrong = broken_link(db)
            events = [(e.kind, json.loads(e.body), e.time) for e in read_log(db)]
            if wrong is None:
                wrong = self._anchored(db, events)
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError, OSError) as error:
            wrong, events = f"it cannot be read ({error})", []
        if wrong is not None or not events or events[0][0] != "limit":
            why = wrong or "it does not begin with a limit"
            raise self._lost(why)
        return events

    def _lost(self, why: str) -> VerificationFailed:
        return VerificationFailed(
            f"{self.file}: {why}; bring the budget back as it was: what was spent is not known"
        )

    def _anchored(self, db: sqlite3.Connection, events: Entries) -> str | None:
        if not self.anchor.exists():
            return None if len(events) == 1 else f"{self.anchor.name} is missing"
        anchor = read_json(self.anchor)
        found = db.execute("SELECT link FROM log WHERE seq = ?", (anchor["rows"],)).fetchone()
        if found is None or bytes(found[0]).hex() != anchor["link"]:
            return f"it lacks rows that {self.anchor.name} knows of"
        if events and anchor["limit"] != events[0][1]:
            return f"{self.anchor.name} names another limit"
        return None


def folder_of(path: str | Path) -> Path:
    """A folder that is there or can be made; the same one after the process has gone elsewhere."""
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"a budget is kept in a folder, {folder} is a file; use another name")
    return folder
