"""How many steps a run in a folder has on record, written down where no backup of the run reaches.

A backup that is written into the very files of a run that was killed cannot be told from the run by
its folder: the file is the same, its chain is whole, and the steps that it lacks are on no disk. So
the folder of the budget holds eight bytes for every run that is under way, written after each row
and before its noise is used. They are not flushed, which would cost as much as the row: they
outlive the process and not a power cut, after which they say less, never more.

State: an open file.

>>> import tempfile
>>> from pathlib import Path
>>> with tempfile.TemporaryDirectory() as folder:
...     known = Progress(Path(folder), "budget/run")
...     known.begin().came_to(6)
...     known.steps, Progress(Path(folder), "budget/another").steps
(6, 0)
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

_BYTES = 8


class Progress:
    """The number of steps that one run, by its name in the books, has come to.

    Guarantees: never more than the rows of the run; no less than the steps whose noise was used,
    unless the system itself went down.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"steps-{name.rpartition('/')[2]}"

    @property
    def steps(self) -> int:
        """0 where nothing is known."""
        try:
            return int.from_bytes(self.file.read_bytes(), "little")
        except FileNotFoundError:
            return 0

    def begin(self) -> Progress:
        """Make the file at its full length, so that no later write finds the disk full."""
        if not self.file.exists():
            self.came_to(0)
        return self

    @cached_property
    def _handle(self) -> int:
        return os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def came_to(self, steps: int) -> None:
        os.pwrite(self._handle, steps.to_bytes(_BYTES, "little"), 0)

    def end(self) -> None:
        """The books know how far the run came."""
        self.file.unlink(missing_ok=True)

    def __del__(self) -> None:
        if "_handle" in self.__dict__:
            os.close(self._handle)
