"""Files that are either the old version or the new one, never something in between.

Write to a temporary name in the same folder, flush to the disk, rename, flush the folder: after a
crash at any instant the reader sees one complete version.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput


def sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and those above it that are missing, if it is not there.

    Guarantees: their names are durable when this returns (where the system lets us see to it);
    otherwise a power cut may take a whole run, and with it every step that it released.
    """
    above = [each.parent for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for each in above:
        with suppress(PermissionError):  # a folder in which names may be made, and not listed
            sync(each)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Nobody else is in here with this folder meanwhile.

    Guarantees: raises BlockingIOError at once while another process is. A file system that locks no
    folders keeps nobody out.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file atomically; it has its permissions from the first byte on."""
    if not path.name:
        raise OSError(errno.EISDIR, "a file is needed, a folder was given", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # a full disk, or a folder in place of the file: leave nothing behind
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync(path.parent)


def finite(value: Any) -> Any:
    """The same with None for every number in it that is none, as JSON has it."""
    if isinstance(value, dict):
        return {name: finite(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any) -> bytes:
    """The one form in which we write a value."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write_bytes(path, as_json(value), mode=mode)


def read_json(path: Path) -> Any:
    """Read a JSON file; anything else in it is one clear line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise InvalidInput(f"{path} is not JSON: {error}") from None
