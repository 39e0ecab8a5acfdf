"""The tables of the ledger's file, and reading them without trust (`ledger_file` writes them).

    steps   step, time, batch and state fingerprints, number of units, who they were
    units   per unit: first step (of its block), last step, count; a summary that is brought up to
            date at checkpoints and recomputed from `steps` by `verify`
    meta    plan hash, key fingerprint, unit, how units are identified

Who took part is kept as compressed differences of 64-bit integers: a batch in natural order takes
some thirty bytes.

>>> encode_units(np.arange(250)).__len__() < 40
True
>>> decode_units(encode_units(np.array([-5, 7, 2**62])))
array([                 -5,                   7, 4611686018427387904])
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from noshuffle.release.units import Ids

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, time REAL NOT NULL, batch BLOB NOT NULL, state BLOB NOT NULL,
    units INTEGER NOT NULL, ids BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS units (
    unit INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL,
    count INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class Row:
    """One released step; `claimed_units` is the number written next to the list."""

    step: int
    time: float
    batch: bytes
    state: bytes
    claimed_units: int
    units: Ids


def encode_units(units: Ids) -> bytes:
    """Compressed differences; they wrap around, and back, exactly."""
    data = units.astype("<i8", copy=False).tobytes()
    return _remembered(data) if len(units) <= _SHORT else _packed(data)


def _packed(data: bytes) -> bytes:
    units = np.frombuffer(data, dtype="<i8")
    steps = units.copy()
    steps[1:] -= units[:-1]
    return zlib.compress(steps.tobytes(), 1)


#: The same batches come in every epoch; those of some hundred steps are remembered, if short.
_SHORT = 2048
_remembered = lru_cache(maxsize=512)(_packed)


def decode_units(blob: bytes) -> Ids:
    """The units again; a blob that is none raises ValueError."""
    try:
        data = zlib.decompress(blob)
    except zlib.error as error:
        raise ValueError(f"a list of units cannot be unpacked ({error})") from None
    return np.cumsum(np.frombuffer(data, dtype="<i8")).astype(np.int64)


def read_rows(db: sqlite3.Connection, *, start: int = 0) -> Iterator[Row]:
    """Released steps in order."""
    cursor = db.execute(
        "SELECT step, time, batch, state, units, ids FROM steps WHERE step >= ? ORDER BY step",
        (start,),
    )
    for step, when, batch, state, count, blob in cursor:
        yield Row(step, when, batch, state, count, decode_units(blob))


def read_units(db: sqlite3.Connection) -> list[tuple[int, int, int, int]]:
    """The summary per unit: (unit, first, last, count), in order."""
    return db.execute("SELECT unit, first, last, count FROM units ORDER BY unit").fetchall()


class Evidence:
    """A ledger opened for reading only."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"{path.name} is missing")
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        log = path.with_name(path.name + "-wal")
        is_settled = not log.exists() or log.stat().st_size == 0
        try:
            self._db = _open(path, "immutable=1" if is_settled else "mode=ro")
        except sqlite3.OperationalError:
            # A folder that may not be written to, with a log that was not yet folded in.
            self._copy = tempfile.TemporaryDirectory()
            for file in (path, log):
                shutil.copyfile(file, Path(self._copy.name) / file.name)
            self._db = _open(Path(self._copy.name) / path.name, "mode=rw")

    def facts(self) -> dict[str, str]:
        """Everything in `meta`."""
        return {str(k): str(v) for k, v in self._db.execute("SELECT name, value FROM meta")}

    def rows(self, *, start: int = 0) -> Iterator[Row]:
        """Released steps in order."""
        return read_rows(self._db, start=start)

    def saved_units(self) -> tuple[int, list[tuple[int, int, int, int]]]:
        """How many steps the summary covers, and the summary."""
        return int(self.facts().get("summarised", 0)), read_units(self._db)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()


def _open(path: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)
    try:
        db.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db
