"""Log: an append-only file of hash-chained JSON lines with one writer, for a run or a budget.

    line_i = {"kind": …, …, "link": link_i}     link_i = SHA-256(link_{i−1} ‖ line_i up to its link)

A line that was changed, cut out or put in breaks its link. A cut at the end is seen by whoever
knows a later link (a statement, a checkpoint). The lock is one on the open file (`flock`): it ends
with the process, whatever else that process reads.

A line is written before `append` returns, so it survives a kill. A thread flushes lines without a
pause, so a line is behind the disk by at most two flushes; `flush` waits for all of them, which
whoever stores or sends something computed afterwards must do. A short write or a failed flush ends
the log: the kernel forgets what it could not write, so it is not tried again.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> with Log(Path(folder.name) / "log.jsonl") as log:
...     _ = log.append("run", plan="abc")
>>> [(row["kind"], row["plan"]) for row in read(Path(folder.name) / "log.jsonl")]
[('run', 'abc')]
>>> folder.cleanup()
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from noshuffle.errors import NoshuffleError, ReuseRefused, VerificationFailed
from noshuffle.release.files import sync

START = hashlib.sha256(b"").hexdigest()
Row = dict[str, Any]
#: Seconds that opening waits for another process, and that a line may wait for the disk.
_WAIT, _LAG = 10.0, 1.0
_LINK = b',"link":"'
#: Logs that this process has open, by their files.
_OPEN: WeakValueDictionary[tuple[int, int], Log] = WeakValueDictionary()


class Damaged(VerificationFailed):
    """A line whose link does not hold; `at` is where it begins in the file."""

    def __init__(self, path: Path, number: int, at: int, *, is_torn: bool) -> None:
        self.at, self.is_torn = at, is_torn
        what = "is torn" if is_torn else "or one before it was changed, cut out or damaged"
        super().__init__(f"line {number} of {path} {what}")


def read(path: Path) -> Iterator[Row]:
    """The rows of a log, each with its link. Raises `Damaged` where the chain does not hold."""
    link, at = START, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            body, _, stored = line.rpartition(_LINK)
            link = _link(link, body)
            if stored != link.encode() + b'"}\n':
                is_torn = not line.endswith(b"\n") and not file.read(1)
                raise Damaged(path, number, at, is_torn=is_torn)
            at += len(line)
            row = json.loads(body + b"}")
            row["link"] = link
            yield row


def _link(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


class Log:
    """The rows of one log, and its one writer. `path=None` keeps rows in memory.

    `keeps` says which rows stay in `rows`; `hear` is told of every row that the file holds already.
    `known` are links that other files name: what is damaged behind them is cut off, damage before
    them, or a log that lacks one, is refused. A log that this process opens again is closed where
    it was open before; another process waits for its end.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        hear: Callable[[Row], None] = lambda row: None,
        keeps: Callable[[Row], bool] = lambda row: True,
        known: Collection[str] = (),
    ) -> None:
        self.path, self.rows, self.head = path, list[Row](), START
        self._keeps, self._file, self._owner = keeps, -1, os.getpid()
        self._flusher: _Flusher | None = None
        #: Whether nothing more may be appended.
        self.is_closed = False
        if path is None:
            return
        self._lock(path)
        try:
            self._read(hear, set(known))
        except BaseException:
            self.close()
            raise
        self._flusher = _Flusher(self._file)

    def _lock(self, path: Path) -> None:
        if path.exists() and (before := _OPEN.get(_identity(path))) is not None:
            before.close()
        self._file = _locked(path)
        _OPEN[_identity(path)] = self

    def _read(self, hear: Callable[[Row], None], missing: set[str]) -> None:
        assert self.path is not None
        try:
            for row in read(self.path):
                self.head = row["link"]
                missing.discard(self.head)
                hear(row)
                if self._keeps(row):
                    self.rows.append(row)
        except Damaged as damage:
            if missing:
                raise
            os.ftruncate(self._file, damage.at)
            os.fsync(self._file)
        if missing:
            raise ReuseRefused(
                f"{self.path} lacks rows that other files of its folder were written after: it is "
                "older than they are; bring the newer one back, or begin a new run from the model"
            )

    def append(self, kind: str, **body: Any) -> Row:
        """Write a row; it survives a kill when this returns, and a power cut after `flush`."""
        if self.is_closed:
            raise NoshuffleError(f"{self.path or 'this log'} is closed; open it again")
        row = {"kind": kind, **body}
        if self.path is not None:
            text = json.dumps(row, separators=(",", ":"), allow_nan=False).encode()[:-1]
            self.head = _link(self.head, text)
            line = text + _LINK + self.head.encode() + b'"}\n'
            assert self._flusher is not None
            self._flusher.check()
            try:
                written = os.write(self._file, line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes were written")
            except OSError as error:
                self._flusher.fail(error)
                self._flusher.check()
            self._flusher.ask()
            row["link"] = self.head
        if self._keeps(row):
            self.rows.append(row)
        return row

    def flush(self) -> None:
        """Wait until everything that was appended is on the disk."""
        if self._flusher is not None:
            self._flusher.wait()

    def keep_up(self) -> None:
        """Wait only if a row has waited for the disk for more than a second."""
        if self._flusher is not None and self._flusher.lag > _LAG:
            self._flusher.wait()

    def close(self) -> None:
        """Flush and unlock. Forked workers share the open file, and would keep the lock."""
        self.is_closed = True
        if self._file < 0:
            return
        handle, self._file = self._file, -1
        flusher, self._flusher = self._flusher, None
        try:
            if flusher is not None:
                flusher.stop()
        finally:
            if os.getpid() == self._owner:
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def __del__(self) -> None:
        """A log that nobody closed is let go of. Nothing waits here: the thread that flushes may be
        the one that collects garbage, and has ended where the interpreter does."""
        flusher = getattr(self, "_flusher", None)
        if flusher is not None and os.getpid() == self._owner and not sys.is_finalizing():
            flusher.end()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _identity(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino


def _locked(path: Path) -> int:
    """The file, open for appending by this process alone."""
    end = time.monotonic() + _WAIT
    while True:
        is_new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(handle)
            if path.exists() and _identity(path) == (info.st_dev, info.st_ino):
                break  # else the process before took its file away
        except OSError:
            if time.monotonic() > end:
                os.close(handle)
                raise ReuseRefused(
                    f"another process writes {path}; wait for its end, or end it"
                ) from None
        os.close(handle)
        time.sleep(0.02)
    if is_new:
        sync(path.parent)
    return handle


class _Flusher:
    """A thread that flushes a file as long as there is something to flush."""

    def __init__(self, handle: int) -> None:
        self._handle, self._owner = handle, os.getpid()
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._since = 0.0  # when the oldest line that is not on the disk was written
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    @property
    def lag(self) -> float:
        return time.monotonic() - self._since if self._done < self._asked else 0.0

    def ask(self) -> None:
        with self._changed:
            if self._done == self._asked:
                self._since = time.monotonic()
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._asked or self._is_stopped)
                if self._done == self._asked or self._error is not None:
                    return
                goal, now = self._asked, time.monotonic()
            try:
                os.fdatasync(self._handle)
            except OSError as error:
                self.fail(error)
                return
            with self._changed:
                self._done, self._since = goal, now
                self._changed.notify_all()

    def wait(self) -> None:
        self.check()
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._asked or self._error is not None)
        self.check()

    def fail(self, error: OSError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        if os.getpid() != self._owner:
            raise ReuseRefused("a forked process may not write the log of its parent")
        if self._error is not None:
            raise NoshuffleError(
                f"the log could not be written ({self._error}); make room on the disk, then open "
                "the run again from its folder"
            ) from self._error

    def stop(self) -> None:
        if os.getpid() != self._owner:
            return
        try:
            if self._error is None:
                self.wait()
        finally:
            self.end()
            if self._thread is not None:
                self._thread.join()

    def end(self) -> None:
        """Let the thread end when it has nothing to do."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
