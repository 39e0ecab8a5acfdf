"""A file that was removed and made again is another one, also where it gets the same number."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from noshuffle.release.file_identity import identity, is_same


def test_a_file_in_the_place_of_a_removed_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for _ in range(50):
        path.write_bytes(b"one")
        mine = identity(path)
        path.write_bytes(b"two")  # written into, it stays the same file
        assert is_same(mine, identity(path))
        moved = path.rename(tmp_path / "moved")
        assert is_same(mine, identity(moved))
        moved.unlink()
        time.sleep(0.02)  # file systems take the time of a tick of the kernel
        path.write_bytes(b"one")
        other = identity(path)
        assert not is_same(mine, other)
        if mine["inode"] == other["inode"]:
            assert mine["born"] is not None
            return
        path.unlink()
    pytest.skip("this file system gives no number twice")


def test_what_a_record_lacks_tells_nothing() -> None:
    """A system may tell no time, and lives in memory have no file."""
    whole = {"inode": 1, "born": 5}
    assert is_same({"inode": 1}, whole)
    assert is_same({}, whole)
    assert not is_same({"inode": 2}, whole)
