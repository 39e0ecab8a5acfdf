"""Damaged run folders: every answer is a verdict or one line, never PROVED for what was changed."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz.damage import EXAMPLES, check_one_line, counted, spoiled
from tests.release import folders

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.budget import Budget
from noshuffle.errors import NoshuffleError
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.verify import verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    folders.train(folders.open_run(path)).close()
    assert verify(path).answer == "PROVED"
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a kill leaves it: rows in the -wal file, keys, two checkpoints."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    private = folders.train(folders.open_run(path), stop=10)
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    folders.killed(private)
    return kept


def content(path: Path) -> Any:
    """What the ledger of a folder says."""
    db = sqlite3.connect(f"file:{path / 'ledger.sqlite'}?mode=ro&immutable=1", uri=True)
    try:
        tables = ("meta", "steps", "log", "units")
        return {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    finally:
        db.close()


def files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name != ".lock")


def test_spoiled_bytes_of_a_finished_run(finished: Path, tmp_path: Path) -> None:
    chance, said = random.Random(0), content(finished)
    names = [file.relative_to(finished) for file in files(finished)]
    for number in range(40 * EXAMPLES):
        copy = tmp_path / str(number)
        shutil.copytree(finished, copy)
        name = chance.choice(names)
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(spoiled(before, chance))
        verdict = verify(copy)
        if verdict.answer == "PROVED":  # free space of the database, or the same bytes again
            is_same = (copy / name).read_bytes() == before
            assert is_same or (name.name.startswith("ledger") and content(copy) == said), name
        shutil.rmtree(copy)


def test_spoiled_bytes_of_a_stopped_run(stopped: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    names = [file.relative_to(stopped) for file in files(stopped)]
    went_on = 0
    for number in range(25 * EXAMPLES):
        copy = tmp_path / str(number)
        shutil.copytree(stopped, copy)
        name = chance.choice(names)
        (copy / name).write_bytes(spoiled((copy / name).read_bytes(), chance))
        try:
            private = folders.open_run(copy)
            private.resume()
        except NoshuffleError as error:
            check_one_line(error)
        else:
            went_on += 1
            assert private.epsilon >= 0
            folders.killed(private)
        shutil.rmtree(copy)
    assert went_on < 25 * EXAMPLES


def test_the_last_write_cut_at_every_byte(stopped: Path, tmp_path: Path) -> None:
    """A row is there or it is not; what was there before stays."""
    wal = (stopped / "ledger.sqlite-wal").read_bytes()
    frame = 24 + int.from_bytes(wal[8:12], "big")  # the page size stands in the header
    assert len(wal) >= 32 + frame
    found = set()
    places = [*range(len(wal) - frame, len(wal), 1 + frame // 16 if EXAMPLES == 1 else 1), len(wal)]
    for place in places:
        copy = tmp_path / str(place)
        shutil.copytree(stopped, copy)
        (copy / "ledger.sqlite-wal").write_bytes(wal[:place])
        try:
            private = folders.open_run(copy)
        except NoshuffleError as error:
            check_one_line(error)
            found.add(-1)
        else:
            found.add(private.ledger.released)
            folders.killed(private)
        shutil.rmtree(copy)
    assert max(found) == 10
    assert found <= {-1, 9, 10}


KINDS = {
    "plan": "plan.json",
    "statement": "statement.json",
    "keys": "checkpoints/key.json",
    "model": "checkpoints/step-00000008/model.safetensors",
    "state": "checkpoints/step-00000008/state.pt",
    "ledger": "ledger.sqlite",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_every_byte(stopped: Path, tmp_path: Path, kind: str) -> None:
    """A file that ends too early is refused, or left aside with what it says; ε stays."""
    file = stopped / KINDS[kind]
    data = file.read_bytes()
    fair = folders.open_run(shutil.copytree(stopped, tmp_path / "fair"))
    spent, released = fair.epsilon, fair.ledger.released
    folders.killed(fair)
    for place in range(
        0, len(data), 1 + len(data) // 4 if EXAMPLES == 1 else 1 + len(data) // 2000
    ):
        counted()
        copy = tmp_path / "copy"
        shutil.copytree(stopped, copy)
        (copy / KINDS[kind]).write_bytes(data[:place])
        assert verify(copy).answer != "PROVED"
        try:
            private = folders.open_run(copy)
            private.resume()
        except (NoshuffleError, sqlite3.DatabaseError) as error:
            check_one_line(error)
        else:
            assert (private.epsilon, private.ledger.released) == (spent, released)
            folders.killed(private)
        shutil.rmtree(copy)


def test_what_a_kill_leaves_of_an_atomic_write(stopped: Path, tmp_path: Path) -> None:
    """Sealing writes states anew; half of one, beside the whole, is not of the checkpoint."""
    copy = shutil.copytree(stopped, tmp_path / "copy")
    path = copy / "checkpoints" / "step-00000008"
    (path / ".state.pt.4711.tmp").write_bytes(b"half")
    private = folders.open_run(copy)
    assert private.resume() == 8
    folders.train(private).close()
    assert verify(copy).answer == "PROVED"
    assert not list(copy.rglob(".state.pt.*"))
    (copy / "checkpoints" / "step-00000020" / ".other").write_bytes(b"")
    assert verify(copy).answer == "REFUTED"


def test_the_books_of_a_budget_cut_at_every_byte(tmp_path: Path) -> None:
    plan = Plan.fit(SinglePass(steps=4), mechanism="tree", epsilon=1.0)
    budget = Budget(tmp_path / "books", epsilon=4.0, delta=1e-6)
    sums = PrivateSum(plan, clip=1.0, shape=(), budget=budget)
    sums.add([1.0], ids=["ada"])
    sums.close()
    spent = budget.total()
    for file in map(budget.folder.joinpath, BOOKS):
        data = file.read_bytes()
        for place in range(0, len(data), 1 + len(data) // 8 if EXAMPLES == 1 else 1):
            counted()
            file.write_bytes(data[:place])
            try:
                assert Budget(budget.folder).total() == spent  # free space of the books
                assert file.name == "books.sqlite"
            except NoshuffleError as error:
                check_one_line(error)
        file.write_bytes(data)
    assert budget.total() == spent


BOOKS = ("books.sqlite", "budget.json")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_ended_goes_on(tmp_path: Path, number: int) -> None:
    """SIGTERM at any moment of a run: the next process finishes it, and it is proved."""
    chance, lives, steps = random.Random(number), 0, 12
    path = tmp_path / "run"
    while lives < 3 * EXAMPLES:
        lives += 1
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                signal.signal(number, signal.SIG_DFL)
                run = running_sum(path, steps=steps)
                while run.step < run.released:
                    run.skip()
                for step in range(run.step, steps - 1):
                    run.add(torch.ones(1, 3), ids=[step])
                    run.save()
                    os.write(writer, b".")
                signal.pause()
            finally:
                os._exit(1)
        counted()
        os.read(reader, 1)  # it has begun, or it waits at the end
        time.sleep(chance.random() * 0.05)
        os.kill(child, number)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
        os.close(reader)
        os.close(writer)
        if len(list(Evidence(path / "ledger.sqlite").rows())) >= steps - 1:
            break
    last = running_sum(path, steps=steps)
    while last.step < last.released:
        last.skip()
    for step in range(last.step, steps):
        last.add(torch.ones(1, 3), ids=[step])
    last.close()
    assert verify(path).answer == "PROVED"


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail, as on a full disk (EFBIG for ENOSPC)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def running_sum(path: Path, steps: int = 40) -> PrivateSum:
    plan = Plan.fit(SinglePass(steps=steps), mechanism="tree", noise_multiplier=2.0)
    return PrivateSum(plan, clip=1.0, shape=(3,), run=path)


@pytest.mark.parametrize("spare", [0, 1, 4096, 9000])
def test_a_full_disk_releases_nothing_without_its_row(tmp_path: Path, spare: int) -> None:
    run = running_sum(tmp_path / "run")
    done = 0
    for step in range(3):
        run.add(torch.ones(1, 3), ids=[step])
        done += 1
    wal = (tmp_path / "run" / "ledger.sqlite-wal").stat().st_size
    with no_file_beyond(wal + spare):
        for step in range(3, 30):
            try:
                run.add(torch.ones(1, 3), ids=[step])
            except (NoshuffleError, OSError, sqlite3.Error):
                break
            done += 1
        else:
            pytest.skip("the disk did not fill up")
    run._release.ledger.let_go()
    run._release._lock = None
    again = running_sum(tmp_path / "run")
    assert done <= again.released <= done + 1  # the row may be there; its noise was not used
    while again.step < again.released:
        again.skip()
    again.save()
    assert verify(tmp_path / "run").answer != "REFUTED"


def test_a_clock_that_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    run = running_sum(tmp_path / "run", steps=4)
    for step in range(4):
        monkeypatch.setattr(time, "time", lambda step=step: now - 1e6 * step)
        run.add(torch.ones(1, 3), ids=[step])
    run.close()
    assert verify(tmp_path / "run").answer == "PROVED"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises((NoshuffleError, OSError)) as told:
        running_sum(tmp_path / "shut" / "run")
    assert getattr(told.value, "errno", errno.EACCES) == errno.EACCES
