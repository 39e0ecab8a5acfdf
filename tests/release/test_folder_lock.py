"""The lock of a run folder: of the file that others find there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from noshuffle.release import folder_lock
from noshuffle.release.folder_lock import HAS_LOCKS, take

_TAKE = """
import sys
from pathlib import Path
from noshuffle.errors import ReplayRefused
from noshuffle.release.folder_lock import take
try:
    take(Path(sys.argv[1]))
except ReplayRefused:
    sys.exit(3)
"""


@pytest.mark.skipif(not HAS_LOCKS, reason="no locks on this system")
def test_a_lock_that_was_taken_away_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused run removes its folder: who had opened the file before held one that nobody finds,
    and the next process to come had the folder, too."""
    own, times = folder_lock.fcntl.lockf, []

    def late(file: int, how: int) -> None:
        if not times:
            (tmp_path / ".lock").unlink()
        times.append(file)
        own(file, how)

    monkeypatch.setattr(folder_lock.fcntl, "lockf", late)
    lock = take(tmp_path)
    assert lock is not None
    assert len(times) == 2
    found = subprocess.run([sys.executable, "-c", _TAKE, str(tmp_path)], check=False)
    assert found.returncode == 3
