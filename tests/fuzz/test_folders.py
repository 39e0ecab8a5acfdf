"""Damaged run folders: each answer is a verdict or one line, not VERIFIED for what was changed."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from tests.fuzz.damage import EXAMPLES, check_one_line, counted, spoiled

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.errors import NoshuffleError
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.log import read
from noshuffle.release.verify import verify

STEPS, SAVED, STOPPED = 12, 8, 10


def running_sum(path: Path, steps: int = STEPS) -> PrivateSum:
    plan = Plan.fit(SinglePass(steps=steps), mechanism="tree", noise_multiplier=2.0)
    return PrivateSum(plan, clip=1.0, shape=(3,), run=path)


def advanced(sums: PrivateSum, until: int) -> PrivateSum:
    for step in range(sums.step, until):
        sums.add(torch.ones(1, 3), ids=[step])
    return sums


def killed(sums: PrivateSum) -> None:
    sums.release.log.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    advanced(running_sum(path), STEPS).close()
    assert verify(path).is_verified
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a kill leaves it: rows after the last checkpoint, and the secret."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    sums = advanced(running_sum(path), SAVED)
    sums.save()
    killed(advanced(sums, STOPPED))
    return path


def test_spoiled_bytes_of_a_finished_run(finished: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    names = [file.relative_to(finished) for file in finished.rglob("*") if file.is_file()]
    for number in range(40 * EXAMPLES):
        copy = shutil.copytree(finished, tmp_path / str(number))
        name = chance.choice(names)
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(spoiled(before, chance))
        try:
            verdict = verify(copy)
        except NoshuffleError as error:
            check_one_line(error)
        else:
            assert not verdict.is_verified or (copy / name).read_bytes() == before, name
        shutil.rmtree(copy)


def test_spoiled_bytes_of_a_stopped_run(stopped: Path, tmp_path: Path) -> None:
    chance, went_on = random.Random(1), 0
    names = [file.relative_to(stopped) for file in stopped.rglob("*") if file.is_file()]
    for number in range(25 * EXAMPLES):
        copy = shutil.copytree(stopped, tmp_path / str(number))
        name = chance.choice(names)
        (copy / name).write_bytes(spoiled((copy / name).read_bytes(), chance))
        try:
            sums = running_sum(copy)
        except NoshuffleError as error:
            check_one_line(error)
        else:
            went_on += 1
            assert SAVED <= sums.step <= STOPPED
            killed(sums)
        shutil.rmtree(copy)
    assert went_on < 25 * EXAMPLES


def test_the_last_row_cut_at_every_byte(stopped: Path, tmp_path: Path) -> None:
    """A row is there or it is not; what was there before stays."""
    log = (stopped / "log.jsonl").read_bytes()
    last = len(log.splitlines(keepends=True)[-1])
    found = set()
    for place in [*range(len(log) - last, len(log), 16 if EXAMPLES == 1 else 1), len(log)]:
        copy = shutil.copytree(stopped, tmp_path / str(place))
        (copy / "log.jsonl").write_bytes(log[:place])
        assert verify(copy).is_verified
        sums = running_sum(copy)
        found.add((place == len(log), sums.step))
        killed(sums)
        shutil.rmtree(copy)
    assert found == {(False, STOPPED - 1), (True, STOPPED)}


KINDS = {
    "plan": "plan.json",
    "statement": "statement.json",
    "model": f"checkpoints/step-{SAVED:08d}/model.safetensors",
    "state": f"checkpoints/step-{SAVED:08d}/state.pt",
    "secret": "secret.json",
    "secret state": f"checkpoints/step-{SAVED:08d}/secret.pt",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_every_byte(stopped: Path, tmp_path: Path, kind: str) -> None:
    """A file that ends too early is refused."""
    data = (stopped / KINDS[kind]).read_bytes().rstrip()
    for place in range(0, len(data), 1 + len(data) // (4 if EXAMPLES == 1 else 2000)):
        counted()
        copy = shutil.copytree(stopped, tmp_path / "copy")
        (copy / KINDS[kind]).write_bytes(data[:place])
        with suppress(NoshuffleError):
            assert not verify(copy).is_verified or "secret" in kind
        with pytest.raises(NoshuffleError) as told:
            running_sum(copy)
        check_one_line(told.value)
        shutil.rmtree(copy)


def test_what_a_kill_leaves_of_a_write_is_removed_at_the_end(stopped: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stopped, tmp_path / "copy")
    half = copy / "checkpoints" / ".step-00000009.4711.tmp"
    half.mkdir()
    for file in (half / "secret.pt", copy / ".secret.json.4711.tmp"):
        file.write_bytes(b"half")
    advanced(running_sum(copy), STEPS).close()
    assert verify(copy).is_verified
    assert not [file for file in copy.rglob("*") if "secret" in file.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_ended_goes_on(tmp_path: Path, number: int) -> None:
    """A signal at any moment of a run: the next process finishes it, and it is verified."""
    chance, path = random.Random(number), tmp_path / "run"
    for _ in range(3 * EXAMPLES):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                signal.signal(number, signal.SIG_DFL)
                run = running_sum(path)
                os.write(writer, b".")
                for step in range(run.step, STEPS - 1):
                    run.add(torch.ones(1, 3), ids=[step])
                    run.save()
                signal.pause()
            finally:
                os._exit(1)
        counted()
        os.read(reader, 1)
        time.sleep(chance.random() * 0.05)
        os.kill(child, number)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
        os.close(reader)
        os.close(writer)
    advanced(running_sum(path), STEPS).close()
    assert verify(path).is_verified
    assert History.read(RunFolder(path)).steps == STEPS


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


@pytest.mark.parametrize("spare", [0, 1, 300, 900])
def test_a_full_disk_releases_nothing_without_its_row(tmp_path: Path, spare: int) -> None:
    path = tmp_path / "run"
    run = advanced(running_sum(path, steps=40), 3)
    done = 3
    with no_file_beyond((path / "log.jsonl").stat().st_size + spare):
        for step in range(3, 30):
            try:
                run.add(torch.ones(1, 3), ids=[step])
            except (NoshuffleError, OSError):
                break
            done += 1
        else:
            pytest.fail("the disk did not fill up")
    with suppress(NoshuffleError, OSError):
        killed(run)
    again = running_sum(path, steps=40)
    assert done <= again.step <= done + 1  # the row may be there; its noise was not used
    again.save()
    assert verify(path).is_verified
    assert sum(row["kind"] == "step" for row in read(path / "log.jsonl")) == again.step


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises((NoshuffleError, OSError)) as told:
        running_sum(tmp_path / "shut" / "run")
    assert getattr(told.value, "errno", errno.EACCES) == errno.EACCES
