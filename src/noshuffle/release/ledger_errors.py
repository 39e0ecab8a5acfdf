"""What SQLite says of a ledger that it cannot read or write, in words that say what to do.

A full disk, missing permissions and a lock are no damage: once they are mended the run goes on. The
errors stay SQLite's own, so that whoever catches those still does.

>>> full = sqlite3.OperationalError("database or disk is full")
>>> full.sqlite_errorname = "SQLITE_FULL"
>>> in_words(full).partition("; ")[2]
'look after the space on the disk and the permissions of the folder, then go on'
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

_LEDGER = "the ledger (ledger.sqlite)"


def _named(*names: str) -> tuple[str, ...]:
    return tuple(f"SQLITE_{name}" for name in names)


_DISK = _named("FULL", "IOERR", "CANTOPEN", "READONLY")
_IN_USE = _named("BUSY", "LOCKED")
#: What SQLite calls a file that it may not or cannot read, whatever the file holds.
_UNREADABLE = (*_IN_USE, *_named("IOERR", "CANTOPEN", "PERM", "FULL", "NOMEM"))


def is_unreadable(error: Exception) -> bool:
    """Whether a ledger could not be read for reasons that are none of its own (a bad disk, say)."""
    return _name(error).startswith(_UNREADABLE)


def in_words(error: sqlite3.Error) -> str:
    """What happened, and what to do, in one line."""
    if str(error).startswith(_LEDGER):
        return str(error)
    if _name(error).startswith(_DISK):
        return (
            f"{_LEDGER} cannot be opened, read or written: {error}; look after the space on the "
            "disk and the permissions of the folder, then go on"
        )
    if _name(error).startswith(_IN_USE):
        return f"{_LEDGER} is in use by another process: {error}; try again"
    return f"{_LEDGER} cannot be read, the run is damaged: {error}"


@contextmanager
def explained() -> Iterator[None]:
    """Errors of disk and locks that leave here say what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if not _name(error).startswith((*_DISK, *_IN_USE)):
            raise
        told = type(error)(in_words(error))
        told.sqlite_errorname = error.sqlite_errorname
        told.sqlite_errorcode = getattr(error, "sqlite_errorcode", 0)
        raise told from error


def _name(error: Exception) -> str:
    return str(getattr(error, "sqlite_errorname", ""))
