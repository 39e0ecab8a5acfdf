"""The lock of a run folder: one live process at a time.

It is one of the operating system, on `.lock`, and ends with its process: a second one would read
checkpoints that are about to be replaced, or pass over the round that the first has open. Runs of
one process share it; a fork does not inherit it. Where there are no locks, the ledger decides.

State: the locks that this process holds.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     first = take(Path(folder))
...     take(Path(folder)) is first
True
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from noshuffle.errors import ReplayRefused

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # not on this system
    HAS_LOCKS = False


class FolderLock:
    """Holds the folder until the last reference is gone."""

    def __init__(self, file: int) -> None:
        weakref.finalize(self, os.close, file)


#: One file per folder and process: to close any other of the same file would end the lock too.
_LOCKS = weakref.WeakValueDictionary[tuple[int, int, int], FolderLock]()


def take(folder: Path) -> FolderLock | None:
    """The lock of a run folder that exists; None where there are no locks.

    Guarantees: raises while another process holds the folder.
    """
    if not HAS_LOCKS:
        return None
    path = folder / ".lock"
    lock = _LOCKS.get(_file_of(os.stat(path))) if path.exists() else None
    if lock is not None:
        return lock
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.pread(file, 20, 0).decode(errors="replace").strip()
        os.close(file)
        raise ReplayRefused(
            f"a run goes on in {folder} already (process {owner or 'unknown'}); wait for its end, "
            "or stop it: a run folder has one process at a time"
        ) from None
    except OSError:
        os.close(file)
        return None
    if not _is_at(path, file):  # a run that was refused has taken it away since it was opened
        os.close(file)
        return take(folder)
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    _LOCKS[_file_of(os.fstat(file))] = lock = FolderLock(file)
    return lock


def _is_at(path: Path, file: int) -> bool:
    """Whether others that come to this path find the file that is open here."""
    try:
        return _file_of(os.stat(path)) == _file_of(os.fstat(file))
    except FileNotFoundError:
        return False


def _file_of(found: os.stat_result) -> tuple[int, int, int]:
    """Which file, in which process: a fork inherits the table and not the locks."""
    return os.getpid(), found.st_dev, found.st_ino
