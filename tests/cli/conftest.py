"""What tests of commands share: a live process beside them, and pictures that cost nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from noshuffle.release.folder import take


@pytest.fixture
def held_elsewhere() -> Callable[[Path], AbstractContextManager[int]]:
    """A run folder whose lock another process holds meanwhile: that process."""

    @contextmanager
    def held(folder: Path) -> Iterator[int]:
        ready, told = os.pipe()
        other = os.fork()
        if other == 0:
            try:
                lock = take(folder)
                os.write(told, b"held" if lock is not None else b"none")
                signal.pause()  # until it is killed
            finally:
                os._exit(1)  # the tests are the parent's
        try:
            assert os.read(ready, 4) == b"held"
            yield other
        finally:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)

    return held


@pytest.fixture
def pictures() -> None:
    """Real ones: for tests that look at a page, or draw it again."""


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of modules are drawn as they are (before this); others have empty pictures.

    What is drawn is looked at in tests/report; a picture takes 0.15 s, a page has five.
    """
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("noshuffle.report.plots.rendered", lambda draw: "<svg></svg>")
