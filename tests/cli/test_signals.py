"""Signals: one line, the status that shells give them, and a step that is under way is finished."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noshuffle.cli import job_view
from noshuffle.cli.job_view import JobWords, Stopped
from noshuffle.cli.settings import RunOptions
from noshuffle.cli.signals import Interrupted, StopRequest, status_of
from noshuffle.cli.train_settings import TrainSettings

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def of_a_terminal() -> Iterator[None]:
    """The signal of a closed terminal is heard, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def in_process(program: str, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *given]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_asks_and_the_second_stops(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in NUMBERS]  # a shell's background jobs ignore SIGINT
    with StopRequest() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(number)
        assert is_stopped()
        assert is_stopped.status == 128 + number
        with pytest.raises(Interrupted) as stopped:
            signal.raise_signal(signal.SIGTERM)
    assert status_of(stopped.value) == 143
    assert [signal.getsignal(one) for one in NUMBERS] == before


def test_a_command_that_waits_stops_at_once() -> None:
    with StopRequest(lambda: True) as is_stopped, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert is_stopped.status == 130


def test_a_process_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as is_stopped:
            signal.raise_signal(signal.SIGHUP)
            assert not is_stopped()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_job_that_is_stopped(
    number: signal.Signals,
    has_begun: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After its step with everything saved, and at once before there is a plan."""
    path, saved = tmp_path / "my run", []

    def job(settings: Any, path: Path, *, is_stopped: Any, **_: Any) -> Any:
        if has_begun:
            path.mkdir()
            (path / "plan.json").touch()
        signal.raise_signal(number)
        assert is_stopped()
        saved.append(path)
        raise Stopped

    monkeypatch.setattr(job_view, "finished", lambda path: None)
    given: Any = ("train", job, TrainSettings.of({}), path, RunOptions(), JobWords())
    if has_begun:
        assert job_view.run_and_tell(*given) == 128 + number
        said = capsys.readouterr().err
        assert said == f"noshuffle: stopped; go on with noshuffle train --resume '{path}'\n"
    else:
        with pytest.raises(KeyboardInterrupt) as stopped:
            job_view.run_and_tell(*given)
        assert status_of(stopped.value) == 128 + number
    assert bool(saved) == has_begun


@pytest.mark.parametrize("number", NUMBERS[1:])
def test_any_other_command(number: signal.Signals) -> None:
    program = (
        "import os, signal, sys, noshuffle.cli as c, noshuffle.cli.application as a\n"
        f"a.application = lambda *_: signal.raise_signal({int(number)})\n"
        "sys.argv = ['noshuffle', 'plan']\n"
        "c.run()\n"
    )
    done = in_process(program)
    assert (done.returncode, done.stderr) == (128 + number, "noshuffle: stopped\n")


@pytest.mark.parametrize("module", ["commands", "help_page", "application"])
def test_ctrl_c_while_the_command_line_is_loaded(module: str) -> None:
    program = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'noshuffle.cli.{module}':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['noshuffle', 'plan']\n"
        "from noshuffle.__main__ import run\n"
        "run()\n"
    )
    done = in_process(program)
    assert (done.returncode, done.stderr) == (130, "noshuffle: stopped\n")


def test_words_for_a_terminal_that_was_closed_are_no_errors(tmp_path: Path) -> None:
    program = (
        "import os, pty, signal, sys\n"
        "from pathlib import Path\n"
        "from noshuffle.cli.signals import StopRequest\n"
        "terminal, end = pty.openpty()\n"
        "for stream in (1, 2): os.dup2(end, stream)\n"
        "os.close(terminal)\n"
        "with StopRequest():\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    print('progress', flush=True)\n"
        "    print('noshuffle: stopped', file=sys.stderr, flush=True)\n"
        "Path(sys.argv[1]).touch()\n"
    )
    done = in_process(program, str(tmp_path / "saved"))
    assert done.returncode == 0
    assert (tmp_path / "saved").exists()
