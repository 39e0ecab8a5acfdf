"""The tables of the ledger's file, their hash chain, and reading them without trust.

    steps   step, life, time, batch fingerprint, digest of the clipped sum, who took part; where a
            device was not waited for, the digest of the step before (`late`)
    log     everything else that happened: facts, starts of a process (lives), digests that came
            at the end, replays, steps passed over, looks for examples that mix, checkpoints,
            files, the seal
    units   per unit: first step (of its block), last step, count; a summary that is brought up to
            date at checkpoints and recomputed from `steps` by `verify`
    meta    the facts of the log by name, and how many steps the summary covers

Rows of `steps` and `log` are numbered by one sequence, and each holds the hash of itself and of the
row before it (SHA-256),

    link_0 = H(""),      link_i = H(link_{i−1} ‖ kind ‖ fields),

so a row that was changed, cut out or put in between breaks every later link, and a cut at the end
disagrees with the link that statement.json and the checkpoints name. Only a signature (`seal`)
shows that all of it was rewritten. Who took part is kept as compressed differences of integers; the
link of a sampled step takes a commitment to them, so that they can be removed (`secret_units`).

>>> encode_units(np.arange(250)).__len__() < 40
True
>>> decode_units(encode_units(np.array([-5, 7, 2**62])))
array([                 -5,                   7, 4611686018427387904])
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import InvalidInput
from noshuffle.release import secret_units
from noshuffle.release.unit_ids import Ids

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, seq INTEGER NOT NULL, life INTEGER NOT NULL, time REAL NOT NULL,
    batch BLOB NOT NULL, digest BLOB NOT NULL, late BLOB NOT NULL, units INTEGER NOT NULL,
    ids BLOB NOT NULL, link BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS log (
    seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, time REAL NOT NULL, body BLOB NOT NULL,
    link BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS units (
    unit INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL,
    count INTEGER NOT NULL);
"""
#: The form of these tables; a ledger of another form cannot be continued.
FORMAT = "2"
#: The link before the first row.
START = hashlib.sha256(b"").digest()
_NOBODY: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Row:
    """One released step; `claimed_units` is the number written next to a list that is not secret.

    `digest` is empty where it came later (as `late` of the next row, or in the log) or never.
    `units` are empty where they were secret and are removed.
    """

    step: int
    time: float
    batch: bytes
    digest: bytes
    claimed_units: int
    units: Ids
    life: int = 0
    late: bytes = b""
    is_secret: bool = False
    is_removed: bool = False


@dataclass(frozen=True)
class Event:
    """One row of the log."""

    seq: int
    kind: str
    time: float
    body: bytes


def step_link(
    before: bytes, step: int, life: int, time: float, count: int, *fields: bytes
) -> bytes:
    """The link of a step with its batch, digest, late digest and encoded units."""
    *prints, ids = fields
    head = b"step" + struct.pack("<qqdq", step, life, time, count)
    if ids[:1] == secret_units.HIDDEN:
        ids = secret_units.linked(ids)
    return _linked(before, head, *prints, ids)


def event_link(before: bytes, kind: str, time: float, body: bytes) -> bytes:
    return _linked(before, b"log:" + kind.encode() + struct.pack("<d", time), body)


def _linked(before: bytes, head: bytes, *fields: bytes) -> bytes:
    """Lengths go in too, or fields could move into each other."""
    parts = [before, head]
    for field in fields:
        parts += (len(field).to_bytes(8, "little"), field)
    return hashlib.sha256(b"".join(parts)).digest()


def encode_units(units: Ids) -> bytes:
    """Compressed differences; they wrap around, and back, exactly."""
    data = units.astype("<i8", copy=False).tobytes()
    return _cached(data) if len(units) <= _SHORT else _packed(data)


def _packed(data: bytes) -> bytes:
    units = np.frombuffer(data, dtype="<i8")
    steps = units.copy()
    steps[1:] -= units[:-1]
    return zlib.compress(steps.tobytes(), 1)


#: The same batches come in every epoch; those of some hundred steps are cached, if short.
_SHORT = 2048
_cached = lru_cache(maxsize=512)(_packed)


def decode_units(blob: bytes) -> Ids:
    """The units again; a blob that is none raises ValueError."""
    try:
        data = zlib.decompress(blob)
    except zlib.error as error:
        raise ValueError(f"a list of units cannot be unpacked ({error})") from None
    return np.cumsum(np.frombuffer(data, dtype="<i8")).astype(np.int64)


def read_log(db: sqlite3.Connection, kind: str = "") -> Iterator[Event]:
    """Rows of the log in order, or those of one kind."""
    query = "SELECT seq, kind, time, body FROM log WHERE ? IN ('', kind) ORDER BY seq"
    for seq, own, when, body in db.execute(query, (kind,)):
        yield Event(seq, own, when, bytes(body))


def last_link(db: sqlite3.Connection) -> tuple[int, bytes]:
    """Number and link of the newest row of both tables; (0, START) where there is none."""
    found = [
        db.execute(f"SELECT seq, link FROM {table} ORDER BY {key} DESC LIMIT 1").fetchone()
        for table, key in (("steps", "step"), ("log", "seq"))
    ]
    newest = max((row for row in found if row is not None), default=(0, START))
    return int(newest[0]), bytes(newest[1])


def stranger(db: sqlite3.Connection) -> str | None:
    """What a database holds that is no part of these tables, or lacks of them; None: nothing.

    A trigger would change rows behind the back of whoever writes the next one.
    """
    with closing(sqlite3.connect(":memory:")) as own:
        own.executescript(SCHEMA)
        wanted, found = (
            {(kind, name, " ".join((text or "").split())) for kind, name, text in parts}
            for parts in (
                each.execute("SELECT type, name, sql FROM sqlite_master") for each in (own, db)
            )
        )
    return next((f"{kind} {name}" for kind, name, _ in sorted(wanted ^ found)), None)


def damage(db: sqlite3.Connection) -> str | None:
    """Where the file is not as SQLite writes it; None where it is.

    Tables are read by their indexes here and row by row there: both must hold the same.
    """
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    return None if found == "ok" else " ".join(str(found).split())


def broken_link(db: sqlite3.Connection) -> str | None:
    """The first place where the chain does not hold, in words; None where all of it does."""
    steps = db.execute(
        "SELECT seq, link, step, life, time, units, batch, digest, late, ids FROM steps "
        "ORDER BY seq"
    )
    log = db.execute("SELECT seq, link, kind, time, body FROM log ORDER BY seq")
    step, event = steps.fetchone(), log.fetchone()
    expected, link = 1, START
    while step is not None or event is not None:
        is_step = event is None or (step is not None and step[0] < event[0])
        row = step if is_step else event
        where = f"the row of step {row[2]}" if is_step else f"row {row[0]} of the log ({row[2]})"
        if row[0] != expected:
            return f"row {expected} of the ledger is missing, or another stands twice"
        try:
            if is_step:
                link = step_link(link, *row[2:6], *map(bytes, row[6:]))
                step = steps.fetchone()
            else:
                link = event_link(link, row[2], row[3], bytes(row[4]))
                event = log.fetchone()
        except (TypeError, ValueError, AttributeError, struct.error):
            return f"{where} holds values of the wrong kind"
        if link != bytes(row[1]):
            return f"{where} was changed, or a row before it"
        expected += 1
    return None


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


class LedgerTables:
    """Reading the tables of an open connection."""

    db: sqlite3.Connection

    def meta(self, name: str) -> str | None:
        found = self.db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def names(self) -> set[str]:
        """The tables that there are."""
        return {str(name) for (name,) in self.db.execute("SELECT name FROM sqlite_master")}

    @property
    def is_made(self) -> bool:
        """Whether the tables are there; not where a process ended while it made them."""
        return {"log", "steps"} <= self.names()

    def bound(self) -> dict[str, str]:
        """Every fact that was bound, and how many steps the summary covers."""
        return {str(k): str(v) for k, v in self.db.execute("SELECT name, value FROM meta")}

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        names = "step, time, batch, digest, units, ids, life, late"
        query = f"SELECT {names} FROM steps WHERE step >= ? ORDER BY step"
        for step, when, batch, digest, count, blob, life, late in self.db.execute(query, (start,)):
            is_removed = secret_units.is_removed(blob)
            units = _NOBODY if is_removed else decode_units(secret_units.listed(blob))
            is_secret = is_removed or secret_units.is_hidden(blob)
            yield Row(step, when, batch, digest, count, units, life, late, is_secret, is_removed)

    def log(self, kind: str) -> Iterator[Event]:
        """Rows of the log of one kind, in order."""
        return read_log(self.db, kind)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """What was written down of one kind, oldest first."""
        return [json.loads(event.body) for event in self.log(kind)]

    def digests_of(self, name: str) -> set[str]:
        """Every digest of a file that a note of files has, oldest and newest alike."""
        known = (note["files"].get(name) for note in self.notes("files"))
        return {digest for digest, _ in filter(None, known)}

    def links(self) -> dict[int, str]:
        """The link of every row, by its number."""
        both = "SELECT seq, link FROM steps UNION ALL SELECT seq, link FROM log"
        return {int(seq): bytes(link).hex() for seq, link in self.db.execute(both)}

    def late_digests(self) -> dict[int, bytes]:
        """Digests in the log, which came after the row of their step, by step."""
        found = (item for note in self.notes("digest") for item in note.items())
        return {int(step): bytes.fromhex(digest) for step, digest in found}

    def saved_units(self) -> tuple[int, list[tuple[int, int, int, int]]]:
        """How many steps the summary covers, and the summary: (unit, first, last, count)."""
        units = "SELECT unit, first, last, count FROM units ORDER BY unit"
        return int(self.meta("summarised") or 0), self.db.execute(units).fetchall()


def edits(ledger: LedgerTables) -> Iterator[str]:
    """What shows that a ledger is not as runs wrote it: a row was changed, cut out or put in
    between, a fact is not the one in the chain, or something else is in the file."""
    if (part := stranger(ledger.db)) is not None:
        yield f"the ledger has another {part} than the tables of a run"
    if (wrong := damage(ledger.db)) is not None:
        yield f"ledger.sqlite is damaged: {wrong}"
    broken = broken_link(ledger.db)
    if broken is not None:
        yield broken
    meta, chained = ledger.bound(), dict(json.loads(event.body) for event in ledger.log("fact"))
    for name in sorted((meta.keys() | chained.keys()) - {"summarised"}):
        if meta.get(name) != chained.get(name):
            yield f"the ledger says {name} = {meta.get(name)}, its chain {chained.get(name)}"


def missing_head(ledger: LedgerTables, told: Mapping[str, Any]) -> Iterator[str]:
    """The row that statement.json (`told`) was written after must be there."""
    rows = told.get("ledger_rows")
    link = ledger.links().get(rows) if type(rows) is int else None
    if link is None or link != told.get("ledger_link"):
        yield f"row {rows} of the ledger is not the one that statement.json was written after"


def refuse_version_1(db: sqlite3.Connection, path: Path | None) -> None:
    """Raise if the tables are of noshuffle 0.1: nothing can be said of rows without digests."""
    columns = {row[1] for row in db.execute("PRAGMA table_info(steps)")}
    if columns and "link" not in columns:
        raise InvalidInput(
            f"{path} was written by noshuffle 0.1, whose rows have no digests; verify it and go on "
            "with that version, or begin a new run from its model"
        )


class Evidence(LedgerTables):
    """A ledger opened for reading only."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path.name} is missing")
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        log = path.with_name(path.name + "-wal")
        is_settled = not log.exists() or log.stat().st_size == 0
        try:
            self.db = _open(path, "immutable=1" if is_settled else "mode=ro")
        except sqlite3.OperationalError:
            # A folder that may not be written to, with a log that was not yet folded in.
            self._copy = tempfile.TemporaryDirectory()
            for file in (path, log):
                shutil.copyfile(file, Path(self._copy.name) / file.name)
            self.db = _open(Path(self._copy.name) / path.name, "mode=rw")
        try:
            refuse_version_1(self.db, path)
        except (InvalidInput, sqlite3.DatabaseError):
            self.close()
            raise

    def close(self) -> None:
        self.db.close()
        if self._copy is not None:
            self._copy.cleanup()


def _open(path: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)
    try:
        db.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError:
        db.close()
        raise
    except UnicodeDecodeError:  # of sqlite3 (Python 3.12), where its own message quotes bad bytes
        db.close()
        raise sqlite3.DatabaseError("malformed database schema") from None
    return db
