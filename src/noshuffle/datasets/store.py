"""Where data files are found: $NOSHUFFLE_DATA, then the cache, then the original publisher.

A file counts only if its checksum is the published one. A download goes to a temporary name, shows
a progress bar, is checked, and only then takes its place, so that a broken one is never used.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from noshuffle.errors import DataUnavailable, InvalidInput
from noshuffle.user_cache import user_cache


@dataclass(frozen=True)
class Remote:
    """One file at its publisher, with the MD5 sum that the publisher or its users quote."""

    name: str
    url: str
    md5: str


def local(name: str) -> Path | None:
    """The file of that name in $NOSHUFFLE_DATA, if it is there."""
    folder = os.environ.get("NOSHUFFLE_DATA")
    path = Path(folder or "").expanduser() / name
    return path if folder and path.is_file() else None


@contextmanager
def looked_up_in(folder: Path | None) -> Iterator[None]:
    """$NOSHUFFLE_DATA is this folder in here, for child processes too, and then what it was."""
    if folder is None:
        yield
        return
    if not folder.is_dir():
        raise InvalidInput(f"data must be a folder that holds the data files, got '{folder}'")
    before = os.environ.get("NOSHUFFLE_DATA")
    os.environ["NOSHUFFLE_DATA"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("NOSHUFFLE_DATA")
        if before is not None:
            os.environ["NOSHUFFLE_DATA"] = before


def needed(name: str) -> Path:
    """The file of that name in $NOSHUFFLE_DATA, which is not downloaded and must be there."""
    path = local(name)
    if path is None:
        raise DataUnavailable(
            f"{name} is not in $NOSHUFFLE_DATA; set NOSHUFFLE_DATA to the folder that holds it, "
            "or use the data set digits, which needs no download"
        )
    return path


def checked(path: Path, remote: Remote) -> None:
    """Refuse a file that is not what its publisher has."""
    found = _md5(path)
    if found != remote.md5:
        raise DataUnavailable(
            f"{path} has checksum {found}, expected {remote.md5}; fetch it again from {remote.url}"
        )


def fetch(remote: Remote, *, folder: Path | None = None) -> Path:
    """The file from the cache ($XDG_CACHE_HOME or ~/.cache), else downloaded and checked."""
    folder = folder or user_cache()
    path = folder / remote.name
    if path.is_file() and _md5(path) == remote.md5:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=remote.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            _download(remote, out.fileno())
        found = _md5(Path(temporary))
        if found != remote.md5:
            raise DataUnavailable(
                f"{remote.name} from {remote.url} has checksum {found}, expected {remote.md5}; "
                "fetch it by hand and set NOSHUFFLE_DATA to its folder"
            )
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _download(remote: Remote, descriptor: int) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with (
            urllib.request.urlopen(remote.url, timeout=30) as response,
            Progress(*columns, TransferSpeedColumn(), disable=not sys.stderr.isatty()) as bar,
        ):
            size = int(response.headers.get("Content-Length") or 0) or None
            task = bar.add_task(remote.name, total=size)
            while chunk := response.read(1 << 16):
                os.write(descriptor, chunk)
                bar.advance(task, len(chunk))
    except (urllib.error.URLError, OSError) as error:
        raise DataUnavailable(
            f"{remote.name} is not in $NOSHUFFLE_DATA and could not be downloaded from "
            f"{remote.url} ({error}); put the file into a folder and set NOSHUFFLE_DATA to it, "
            "or use the data set digits, which needs no download"
        ) from None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
