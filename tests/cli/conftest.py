"""What tests of commands share: a live process beside them, and pictures that cost nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle import cli

LIMIT = 900.0  # seconds, lest a fault wait for ever


def _run(line: list[str]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.argv = ["noshuffle", *line]
    torch.set_num_threads(1)
    cli.run()


@pytest.fixture
def interrupted() -> Callable[..., int | None]:
    """A command in a process of its own that gets a signal once `file` has lines; its status.

    Forked, since the import of torch would be most of its time; in test_train and in a stream of
    test_sum the process is started as a person starts it.
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")

    def stop(line: list[str], number: signal.Signals, *, file: Path, lines: int) -> int | None:
        child: BaseProcess = multiprocessing.get_context("fork").Process(target=_run, args=(line,))
        child.start()
        end = time.monotonic() + LIMIT
        try:
            while not file.exists() or file.read_bytes().count(b"\n") < lines:
                assert child.is_alive(), "the run ended before it could be stopped"
                assert time.monotonic() < end, f"no {lines} lines after a quarter of an hour"
                time.sleep(0.01)
            assert child.pid is not None
            os.kill(child.pid, number)
            child.join(timeout=LIMIT)
        finally:
            child.kill()
            child.join(timeout=LIMIT)
        return child.exitcode

    return stop


@pytest.fixture
def held_elsewhere() -> Callable[..., AbstractContextManager[int]]:
    """A context (a lock, say) that another process is in meanwhile: that process."""

    @contextmanager
    def held(entered: Callable[[], AbstractContextManager[Any]]) -> Iterator[int]:
        ready, told = os.pipe()
        other = os.fork()
        if other == 0:
            try:
                with entered():
                    os.write(told, b"held")
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
