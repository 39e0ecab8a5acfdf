"""A live stream on the disk: go on in another process, and never put one noise row on two batches.

    FOLDER/model.pkl       the estimator as pickle gives it: released numbers only
           stream.pt       key, unfinished sum, noise buffers, ids (mode 0600): a secret
           released.sqlite step → keyed hash of the rows behind it

The noise of step t depends on the key and on t alone, so a copy of a half-consumed stream that goes
on with other rows would release sums whose difference is free of noise. The rule is that of a run
folder: from the first `save` on, every step writes the hash of its rows durably before its noise is
used, and whoever comes to a step that is written there (a process that was killed after its last
save, or a second one that loaded the same folder) may repeat it from exactly the same rows, which
gives the same answer and costs nothing; other rows are refused.

The log must not be rolled back behind the stream's back: a copy or a restored backup of the folder
is told by the log's inode and refused, unless the caller promises that it was moved.

State kept: hashers of the rows of the unfinished batch. Rows are hashed as one stream of bytes, so
it does not matter into which pieces a batch was cut; a save in the middle of a batch is part of it.
"""

from __future__ import annotations

import hashlib
import io
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.release.files import write_bytes

FORMAT = "noshuffle-stream/1"
MODEL, STREAM, LOG = "model.pkl", "stream.pt", "released.sqlite"


class ReleaseLog:
    """What every released step was made of. One per folder, shared by all who loaded it.

    Guarantees: `before(step)` returns only when the step's hash is durable and is the first or
    the same that was ever written for that step in this folder.
    """

    def __init__(self, folder: Path, *, key: bytes, prefix: bytes = b"") -> None:
        self.folder = folder
        self._secret = hashlib.blake2b(b"stream rows", key=key, person=b"ns-secret").digest()
        self._prefix = prefix
        self._db = sqlite3.connect(
            folder / LOG, isolation_level=None, timeout=60, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS released (step INTEGER PRIMARY KEY, rows BLOB)"
        )
        self._clear()

    @property
    def inode(self) -> int:
        """Tells this file from a copy of it."""
        return (self.folder / LOG).stat().st_ino

    @property
    def prefix(self) -> bytes:
        """Hash of the rows of the unfinished batch up to the last `cut`."""
        return self._prefix

    def _clear(self) -> None:
        self._hashers = [hashlib.blake2b(key=self._secret, digest_size=32) for _ in range(4)]
        self._has_rows = False

    def saw(self, x: Any, y: Any) -> None:
        """Take in rows of the unfinished batch, in order."""
        self._has_rows = True
        lengths, columns, cells, targets = self._hashers
        if sparse.issparse(x):
            rows = x.tocsr()
            lengths.update(np.diff(rows.indptr).astype(np.int64).tobytes())
            columns.update(rows.indices.astype(np.int64).tobytes())
            cells.update(np.ascontiguousarray(rows.data, dtype=np.float64).tobytes())
        else:
            cells.update(np.ascontiguousarray(x, dtype=np.float64).tobytes())
        targets.update(np.ascontiguousarray(y).astype(np.float64).tobytes())

    def _digest(self) -> bytes:
        whole = hashlib.blake2b(self._prefix, key=self._secret, digest_size=32)
        for one in self._hashers:
            whole.update(one.digest())
        return whole.digest()

    def cut(self) -> bytes:
        """The hash so far, from which the rest of the batch goes on: a save happens here."""
        if self._has_rows:
            self._prefix = self._digest()
            self._clear()
        return self._prefix

    def before(self, step: int) -> None:
        """Step `step` is about to be released from the rows taken in since the last one."""
        digest = self._digest()
        self._db.execute("INSERT OR IGNORE INTO released VALUES (?, ?)", (step, digest))
        found = self._db.execute("SELECT rows FROM released WHERE step = ?", (step,)).fetchone()
        if found is None or bytes(found[0]) != digest:
            raise ReplayRefused(
                f"step {step} of {self.folder} was already released from other rows; the same "
                "noise would cancel in the difference; give the rows that came after the last "
                "save again, in their order, or start a new model on new rows"
            )
        self._prefix = b""
        self._clear()


def write_stream(folder: Path, state: dict[str, Any], *, inode: int) -> None:
    """Replace stream.pt atomically; it is readable by its owner only from the first byte on."""
    buffer = io.BytesIO()
    torch.save({**state, "format": FORMAT, "inode": inode}, buffer)
    write_bytes(folder / STREAM, buffer.getvalue(), mode=0o600)


def read_stream(folder: Path, *, moved: bool) -> dict[str, Any]:
    """The state of a saved stream; a folder that is a copy is refused unless `moved`."""
    for name in (MODEL, STREAM, LOG):
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} holds no saved stream ({name} is missing)")
    # Tensors and plain values only: loading runs no code.
    state: dict[str, Any] = torch.load(folder / STREAM, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise InvalidInput(f"{folder / STREAM} is not a {FORMAT} file")
    if not moved and state["inode"] != (folder / LOG).stat().st_ino:
        raise ReplayRefused(
            f"{folder} is a copy or a restored backup; if both went on, the same noise would cover "
            "different rows. If it was moved and the original is gone, say load(..., moved=True)"
        )
    return state
