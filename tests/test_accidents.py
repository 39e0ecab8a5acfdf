"""Accidents, over every driver: kills, copies, backups, two processes, a full disk.

Never one noise under two sums, never an ε below what left by this log, no healthy folder refused,
and every run comes to its end or to one line that says what to do.
"""

from __future__ import annotations

import resource
import shutil
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.drivers import DRIVERS, Child, Release, evidence, kill_at, plan_of

from noshuffle import verify
from noshuffle.release import log as log_module
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.open_run import seal

pytestmark = pytest.mark.parametrize("name", DRIVERS)
MECHANISMS = ("blt", "tree", "identity")
KILLS = (8, pytest.param(60, marks=pytest.mark.slow))
MECHANISMS_ASKED = ("blt", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tree", "identity")))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """A forked process has none of the threads of its parent, and need not import anew what the
    first step of an optimizer imports."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight]).step()
    yield
    torch.set_num_threads(before)


def check_fresh(releases: list[Release]) -> None:
    """Sums are zero (or the same in every step), so two equal increments are one noise twice."""
    values = [value for _, value in releases]
    assert all(np.isfinite(value).all() for value in values)
    for one, other in combinations(values, 2):
        assert (one != other).mean() > 0.9


def check_evidence(name: str, folder: Path, releases: list[Release]) -> None:
    run = evidence(name, folder)
    verdict = verify(run)
    assert verdict.answer == "VERIFIED", verdict.words()
    steps = {step for step, _ in releases}
    assert verdict.released >= len(steps)
    assert verdict.epsilon is not None
    assert verdict.epsilon >= History.read(RunFolder(run)).plan.epsilon_after(len(steps))


def finished(name: str, folder: Path, plan) -> list[Release]:
    """Go on to the end in this folder."""
    releases, error, status = Child(DRIVERS[name], folder, plan).ended()
    assert (error, status) == ("", 0)
    return releases


@pytest.mark.parametrize("kills", KILLS)
def test_kills_at_random_instants(name: str, tmp_path: Path, kills: int) -> None:
    draws = np.random.default_rng()
    for number in range(kills // 4):
        plan, folder = plan_of(MECHANISMS[number % 3]), tmp_path / f"run {number}"
        releases: list[Release] = []
        for _ in range(4):
            if releases and has_ended(name, folder):
                break
            releases += kill_at(DRIVERS[name], folder, plan, draws.exponential(0.01))
        releases += finished(name, folder, plan) if not has_ended(name, folder) else []
        steps = [step for step, _ in releases]
        assert steps == sorted(set(steps))  # each at most once, in order
        check_fresh(releases)
        check_evidence(name, folder, releases)
        run = seal(evidence(name, folder)).path  # a kill behind the last row may leave the secret
        assert not [p for p in run.rglob("*") if "secret" in p.name]


def has_ended(name: str, folder: Path) -> bool:
    return History.read(RunFolder(evidence(name, folder))).has_ended


@pytest.mark.parametrize("mechanism", MECHANISMS_ASKED)
def test_copies_that_are_continued_and_a_backup_that_is_put_back(
    name: str, tmp_path: Path, mechanism: str
) -> None:
    plan, folder = plan_of(mechanism), tmp_path / "run"
    common = kill_at(DRIVERS[name], folder, plan, 0.01)
    if has_ended(name, folder):
        pytest.skip("the machine was too fast: nothing is left to continue")
    shutil.copytree(folder, tmp_path / "copy")
    shutil.copytree(folder, tmp_path / "backup")
    branches = defaultdict(list)
    for branch in ("run", "copy"):
        branches[branch] = finished(name, tmp_path / branch, plan)
        check_evidence(name, tmp_path / branch, [*common, *branches[branch]])
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    branches["backup"] = finished(name, folder, plan)
    check_evidence(name, folder, [*common, *branches["backup"]])
    check_fresh([*common, *branches["run"], *branches["copy"], *branches["backup"]])


def test_a_folder_that_is_copied_while_it_runs(name: str, tmp_path: Path) -> None:
    plan, folder = plan_of(), tmp_path / "run"
    child = Child(DRIVERS[name], folder, plan)
    child.wait_for_release()
    copies = []
    for number in range(3):
        try:
            shutil.copytree(folder, tmp_path / str(number))
            copies.append(tmp_path / str(number))
        except (shutil.Error, OSError):  # a checkpoint was renamed meanwhile
            shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    releases, error, status = child.ended()
    assert (error, status) == ("", 0)
    for copy in copies:
        more, error, _ = Child(DRIVERS[name], copy, plan).ended()
        # A copy that was not of one moment is refused in one line; another goes on freshly.
        assert not error or "\n" not in error
        releases += more
    check_fresh(releases)
    check_evidence(name, folder, releases[: plan.steps])


def test_two_processes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_WAIT", 0.05)
    plan, folder = plan_of(), tmp_path / "run"
    slow = DRIVERS[name]

    def waiting(own: Path, planned) -> object:
        import time

        for release in slow(own, planned):
            yield release
            time.sleep(0.05)

    child = Child(waiting, folder, plan)
    child.wait_for_release()
    shutil.copytree(folder, tmp_path / "backup")  # reading every file does not drop the lock
    _, error, status = Child(DRIVERS[name], folder, plan).ended()
    assert status == 3
    assert "another process writes" in error
    child.kill()
    releases, _, _ = child.ended()
    releases += finished(name, folder, plan)
    assert [step for step, _ in releases] == sorted({step for step, _ in releases})
    check_evidence(name, folder, releases)


def test_a_full_disk(name: str, tmp_path: Path) -> None:
    plan, folder = plan_of(), tmp_path / "run"
    releases = kill_at(DRIVERS[name], folder, plan, 0.005)
    if has_ended(name, folder):
        pytest.skip("the machine was too fast: nothing is left to write")
    size = (evidence(name, folder) / "log.jsonl").stat().st_size

    def fill() -> None:  # a write that passes this size is short, the next one fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 400, size + 400))

    more, error, status = Child(DRIVERS[name], folder, plan, before=fill).ended()
    assert status == 3
    assert error
    releases += more
    releases += finished(name, folder, plan)
    assert [step for step, _ in releases] == sorted({step for step, _ in releases})
    check_fresh(releases)
    check_evidence(name, folder, releases)
