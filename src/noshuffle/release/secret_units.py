"""The units of a sampled step in the ledger: a list while the run lives, a commitment afterwards.

    form       in the column of units      in the hash chain
    listed     zlib(ids)                   as it is: without sampling the order is public
    hidden     1 ‖ salt ‖ zlib(ids)        0 ‖ HMAC(salt, zlib(ids)), the salt fresh for every row
    removed    0 ‖ HMAC(salt, zlib(ids))   as it is

Who took part in which secret draw is what amplification by sampling rests on, and so is how many
did (docs/security.md). A sealed run has neither: lists and salts are removed, and since a hidden
row and a removed one are linked alike, the chain holds as before. Of a hidden row no other column
tells its number of units.

Guarantees: HMAC-SHA-256 is taken once under each salt of 256 bits, so whoever has no salt learns
nothing from its value (a pseudorandom function), neither the units nor their number. To put another
list or salt into its place would be a collision of SHA-256.

State: none.

>>> row = hidden(b"some units")
>>> linked(row) == linked(removed(row)) == removed(row), listed(row), is_removed(removed(row))
(True, b'some units', True)
"""

from __future__ import annotations

import hmac
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from noshuffle.errors import NoshuffleError

#: First bytes. A list that is not hidden begins with that of zlib, 0x78.
_REMOVED, HIDDEN = b"\0", b"\1"
#: Bytes of a salt, and of a commitment.
_SALT, _SIZE = 32, 32
#: Of the header of a write-ahead log, without which SQLite reads nothing of it.
_HEADER = 32


def hidden(encoded: bytes) -> bytes:
    """An encoded list of units that can be removed later, under a fresh salt."""
    return HIDDEN + os.urandom(_SALT) + encoded


def is_hidden(blob: bytes) -> bool:
    return blob[:1] == HIDDEN


def is_removed(blob: bytes) -> bool:
    return blob[:1] == _REMOVED and len(blob) == 1 + _SIZE


def listed(blob: bytes) -> bytes:
    """The encoded list of units, where it is not removed."""
    return blob[1 + _SALT :] if is_hidden(blob) else blob


def linked(blob: bytes) -> bytes:
    """What the hash chain takes of it."""
    return removed(blob) if is_hidden(blob) else blob


def removed(blob: bytes) -> bytes:
    """The commitment to a hidden list."""
    salt, encoded = blob[1 : 1 + _SALT], blob[1 + _SALT :]
    return _REMOVED + hmac.digest(salt, encoded, "sha256")


def commitments(db: sqlite3.Connection) -> list[tuple[bytes, int]]:
    """Of all hidden lists in a ledger, each with its step."""
    rows = db.execute("SELECT ids, step FROM steps ORDER BY step")
    return [(removed(ids), step) for ids, step in rows if is_hidden(ids)]


def scrub(db: sqlite3.Connection, log: Path | None) -> None:
    """Leave nothing of what was removed in a database and its write-ahead log.

    Pages are written anew (VACUUM), so that free ones and the unused ends of others go; the log is
    overwritten and cut. It may be interrupted anywhere, and done again.
    """
    _fold(db, "RESTART")
    db.execute("VACUUM")
    _fold(db, "RESTART")
    if log is not None:
        _overwrite(db, log)
    _fold(db, "TRUNCATE")


def _fold(db: sqlite3.Connection, how: str) -> None:
    """Bring all of the log into the database, with nobody reading from the log any more."""
    is_busy, *_ = db.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
    if is_busy:
        raise NoshuffleError(
            "the ledger is being read by somebody else, so secret positions stay in its log; end "
            "that, then seal the run once more"
        )


def _overwrite(db: sqlite3.Connection, log: Path) -> None:
    """Zeros over a log of which everything is in the database.

    Its header first, and on the disk: a log that has its header and lost some of its later pages
    would bring older ones back.
    """
    db.execute("BEGIN IMMEDIATE")  # nobody writes into it meanwhile
    try:
        with suppress(FileNotFoundError), log.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for start, end in ((0, min(_HEADER, size)), (_HEADER, size)):
                file.seek(start)
                file.write(bytes(max(0, end - start)))
                file.flush()
                os.fsync(file.fileno())
    finally:
        db.execute("ROLLBACK")
