"""The log: chained, locked, durable, and ended by whatever could not be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noshuffle.errors import NoshuffleError, ReuseRefused, VerificationFailed
from noshuffle.release.log import Damaged, Log, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Log(tmp_path / "log.jsonl") as log:
        for step in range(5):
            log.append("step", step=step)
    return tmp_path / "log.jsonl"


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


def test_rows_come_back_in_order_and_go_on(path: Path) -> None:
    with Log(path) as log:
        assert [row["step"] for row in log.rows] == [0, 1, 2, 3, 4]
        log.append("step", step=5)
    assert steps(path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", range(5))
@pytest.mark.parametrize("change", ["edit", "cut out", "twice", "swap"])
def test_a_changed_line_breaks_the_chain(path: Path, line: int, change: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[line] = lines[line].replace(b'"step":%d' % line, b'"step":9')
    elif change == "cut out":
        del lines[line]
    elif change == "twice":
        lines.insert(line, lines[line])
    else:
        lines[line], lines[line - 1] = lines[line - 1], lines[line]
    path.write_bytes(b"".join(lines))
    if change == "cut out" and line == 4:
        assert steps(path) == [0, 1, 2, 3]  # a cut at the end is seen by later links only
        with pytest.raises(ReuseRefused, match="older than they are"):
            Log(path, known=["a link that a statement named"])
        return
    with pytest.raises(VerificationFailed, match=r"line .* was changed, cut out or damaged"):
        steps(path)


def test_damage_behind_the_last_known_link_is_cut_off_and_damage_before_it_refused(
    path: Path,
) -> None:
    known = [row["link"] for row in read(path)]
    with path.open("ab") as file:
        file.write(b'{"kind":"step","ste')
    with Log(path, known=[known[3]]) as log:
        log.append("step", step=5)
    assert steps(path) == [0, 1, 2, 3, 4, 5]
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], bytes(len(lines[2])), *lines[3:]]))  # a lost page
    with pytest.raises(Damaged, match="line 3"):
        Log(path, known=[known[3]])
    with Log(path, known=[known[1]]) as log:
        assert len(log.rows) == 2
    assert steps(path) == [0, 1]


def test_another_process_waits_and_is_refused(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from noshuffle.release import log\n"
        "log._WAIT = 0.1; log.Log(Path(sys.argv[1])).close()"
    )

    def other() -> str:
        run = [sys.executable, "-c", code, str(path)]
        return subprocess.run(run, check=False, capture_output=True, text=True).stderr

    with Log(path):
        shutil.copy(path, path.with_name("copy"))  # reading the file does not drop the lock
        assert "another process writes" in other()
    assert other() == ""


def test_a_log_that_is_opened_again_in_one_process_ends_where_it_was_open(path: Path) -> None:
    old = Log(path)
    with Log(path) as new:
        with pytest.raises(NoshuffleError, match="is closed; open it again"):
            old.append("step", step=5)
        new.append("step", step=5)
    assert steps(path) == [0, 1, 2, 3, 4, 5]


def test_a_file_that_was_taken_away_while_somebody_waited_is_made_anew(path: Path) -> None:
    log, fork = Log(path), os.fork()
    if not fork:
        with Log(path) as other:  # waits for the lock on a file that is about to go
            other.append("step", step=9)
        os._exit(0)
    time.sleep(0.3)
    path.unlink()
    log.close()
    os.waitpid(fork, 0)
    assert steps(path) == [9]


def test_forked_workers_do_not_keep_the_lock(path: Path) -> None:
    log = Log(path)
    child = os.fork()
    if not child:  # a worker of a loader, which outlives the run
        time.sleep(20)
        os._exit(0)
    try:
        log.close()
        Log(path).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("what", ["short", "full", "flush"])
def test_what_could_not_be_written_ends_the_log(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = Log(path), os.write
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        if what == "flush":
            patched.setattr(os, "fdatasync", fail)
        else:
            is_short = what == "short"
            patched.setattr(os, "write", lambda f, d: write(f, d[:7]) if is_short else fail())

        def write_and_wait() -> None:
            log.append("step", step=5)
            log.flush()

        with pytest.raises(NoshuffleError, match="could not be written"):
            write_and_wait()
    with pytest.raises(NoshuffleError, match="could not be written"):
        log.append("step", step=6)
    log.close()
    with Log(path) as again:
        again.append("step", step=7)
    assert steps(path)[:5] == [0, 1, 2, 3, 4]
    assert steps(path)[-1] == 7


def test_a_row_survives_a_kill_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from noshuffle.release.log import Log\n"
        "log = Log(Path(sys.argv[1]))\n"
        "for step in range(100): log.append('step', step=step)\n"
        "os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "log.jsonl"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert steps(path) == [*range(100)]


def test_lines_are_json(path: Path) -> None:
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]
