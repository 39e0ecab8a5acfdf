"""Which file a ledger is, so that a copy or a backup that was put back is told from the original.

An inode number alone does not tell: ext4 gives the number of a removed file to the next one (18 of
19 times in `rm -r RUN; cp -r BACKUP RUN`). The time at which a file was made comes with it, where
the system says: statx of Linux, which Python offers from 3.15 on and C does before, and macOS.

State: none.

>>> import tempfile
>>> with tempfile.NamedTemporaryFile() as one, tempfile.NamedTemporaryFile() as other:
...     mine = identity(Path(one.name))
...     is_same(mine, identity(Path(one.name))), is_same(mine, identity(Path(other.name)))
(True, False)
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

#: Of statx: relative to the working directory, the time of birth, seconds and nanoseconds of it.
_HERE, _BORN, _SIZE = -100, 0x800, 256
_MASK_AT, _BORN_AT = 0, 80


def identity(file: Path) -> dict[str, int | None]:
    """What stays the same as long as a file is the same one; None for what is not told."""
    return {"inode": file.stat().st_ino, "born": _born(file)}


def is_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two records of a file may be of the same one. What one of them lacks tells nothing:
    a system may tell no time, and lives in memory have no file."""
    names = ("inode", "born")
    both = [(one.get(name), other.get(name)) for name in names]
    return all(None in pair or pair[0] == pair[1] for pair in both)


def _born(file: Path) -> int | None:
    """Nanoseconds of the time at which a file was made."""
    if sys.platform != "linux":
        seconds = getattr(file.stat(), "st_birthtime", None)
        return None if seconds is None else int(seconds * 1e9)
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:  # a C library from before 2018
        return None
    found = ctypes.create_string_buffer(_SIZE)
    if statx(_HERE, os.fsencode(file), 0, ctypes.c_uint(_BORN), found) != 0:
        return None
    (told,) = struct.unpack_from("=I", found, _MASK_AT)
    seconds, more = struct.unpack_from("=qI", found, _BORN_AT)
    return seconds * 10**9 + more if told & _BORN else None
