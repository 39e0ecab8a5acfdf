"""Two continuations of one run folder have independent noise: at worst a second release.

A clone, a snapshot, a backup that is put back, a lost -wal file: they used to put the same noise on
different sums, whose difference was then free of noise. Here the difference of the two releases is
measured against the difference of the two sums: what is left must be noise of √2 times the scale of
one release, and nothing less.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.release import folders

from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused
from noshuffle.noise import Source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.release.ledger_tables import SCHEMA
from noshuffle.release.release import Release
from noshuffle.strategies import banded_inverse, blt, dense, identity, tree
from noshuffle.strategies.base import Strategy
from noshuffle.training import verify

STEPS, BEFORE, WIDE = 8, 3, 4096
SCALE = 2.0
#: A sample deviation over 4,096 coordinates strays by 1/√(2·4096) = 1.1 %; 6 of these are safe.
NEAR = 6 / math.sqrt(2 * WIDE)


def strategies() -> dict[str, Strategy]:
    rng = np.random.default_rng(0)
    rows = np.tril(rng.normal(size=(STEPS, STEPS)) * 0.2) + np.eye(STEPS)
    rows /= np.linalg.norm(rows, axis=0).max()
    return {
        "identity": identity(),
        "tree": tree(),
        "full tree": tree("full"),
        "restarted tree": tree(restart_every=4),
        "blt": blt(decays=(0.9, 0.5), scales=(0.1, 0.2)),
        "banded inverse": banded_inverse(3),
        "dense": dense(rows),
    }


def opened(path: Path, strategy: Strategy, source: Source | None = None) -> Release:
    plan = Plan(participation=SinglePass(STEPS), strategy=strategy, noise_multiplier=SCALE)
    release = Release.begin(plan, {"w": (WIDE,)}, clip=1.0, run=path, source=source)
    if (state := release.saved()) is not None:
        release.load_state_dict(state)
    return release


def give(release: Release, value: torch.Tensor) -> torch.Tensor:
    step = release.step
    total = {"w": value.clone()}
    release.close(release.admit(step, np.array([step])), total)
    return total["w"]


def left(release: Release) -> None:
    """As a killed process leaves it."""
    release.ledger.let_go()
    release._lock = None


def begun(path: Path, strategy: Strategy) -> None:
    release = opened(path, strategy)
    for step in range(BEFORE):
        give(release, torch.full((WIDE,), float(step)))
    release.save({**release.state_dict(), "model": {}})
    left(release)


def independent(
    one: torch.Tensor,
    other: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    rows: np.ndarray,
    step: int = BEFORE,
) -> None:
    """The noise between two releases: right deviation, and no trace of the other's noise."""
    first, second = (one - sums[0]).double().numpy(), (other - sums[1]).double().numpy()
    is_used = (rows[:BEFORE] != 0).any(axis=0)  # draws of released steps are those of both
    fresh = SCALE * float(np.linalg.norm(rows[step][~is_used]))
    gap = first - second
    assert gap.std() == pytest.approx(math.sqrt(2) * fresh, rel=2 * NEAR)
    # Without the difference of the sums nothing stands out: the releases do not tell it exactly.
    direction = (sums[0] - sums[1]).double().numpy()
    direction /= np.linalg.norm(direction)
    seen = float((one - other).double().numpy() @ direction)
    true = float((sums[0] - sums[1]).double().numpy() @ direction)
    assert abs(seen - true) < 7 * math.sqrt(2) * fresh
    assert abs(gap).min() > 0 or (gap == 0).mean() < 0.01


@pytest.mark.parametrize("name", strategies())
def test_two_continuations_of_a_snapshot(tmp_path: Path, name: str) -> None:
    strategy = strategies()[name]
    begun(tmp_path / "run", strategy)
    shutil.copytree(tmp_path / "run", tmp_path / "snapshot")
    made = torch.Generator().manual_seed(3)
    releases = [opened(tmp_path / p, strategy) for p in ("run", "snapshot")]
    rows = strategy.noising(STEPS)
    for step in range(BEFORE, STEPS):
        sums = torch.randn(WIDE, generator=made), torch.randn(WIDE, generator=made)
        found = [give(release, value) for release, value in zip(releases, sums)]
        independent(found[0], found[1], sums, rows, step)
    for release, path in zip(releases, ("run", "snapshot")):
        release.close_run()
        verdict = verify(tmp_path / path)
        assert verdict.answer == "PROVED", verdict.words()
        assert verdict.lives == 2
        assert (
            "2 processes went on with this run" in (tmp_path / path / "statement.json").read_text()
        )


@pytest.mark.parametrize("name", strategies())
def test_released_steps_keep_their_noise_in_every_continuation(tmp_path: Path, name: str) -> None:
    """Old draws keep their key: the law over all steps is that of the plan, and replays work."""
    strategy = strategies()[name]
    path, zero, found = tmp_path / "run", torch.zeros(WIDE), []
    release = opened(path, strategy)
    for step in range(STEPS):
        if step in (2, 5):
            release.save({**release.state_dict(), "model": {}})
            left(release)
            release = opened(path, strategy)
        found.append(give(release, zero).double().numpy())
    noise, rows = np.stack(found), strategy.noising(STEPS)
    expected = SCALE**2 * rows @ rows.T
    size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs(noise @ noise.T / WIDE - expected).max() < 7 * math.sqrt(2 / WIDE) * size.max()
    for wrong in (2 / 3, 3 / 2):
        gap = np.abs(np.diag(noise @ noise.T) / WIDE - wrong**2 * np.diag(expected))
        assert (gap > 7 * math.sqrt(2 / WIDE) * wrong**2 * np.diag(expected)).all()


@pytest.mark.parametrize("name", ["tree", "blt", "identity"])
def test_a_backup_that_is_put_back_in_place(tmp_path: Path, name: str) -> None:
    strategy, path = strategies()[name], tmp_path / "run"
    begun(path, strategy)
    shutil.copytree(path, tmp_path / "backup")
    made = torch.Generator().manual_seed(3)
    sums = torch.randn(WIDE, generator=made), torch.randn(WIDE, generator=made)
    release = opened(path, strategy)
    first = give(release, sums[0])
    left(release)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    second = give(opened(path, strategy), sums[1])
    independent(first, second, sums, strategy.noising(STEPS))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_log_that_was_lost_or_not_copied(tmp_path: Path, has_checkpoint: bool) -> None:
    """Rows may lie in ledger.sqlite-wal only; whoever copies the folder without it lost them."""
    strategy = strategies()["tree"]
    begun(tmp_path / "run", strategy)
    release = opened(tmp_path / "run", strategy)
    made = torch.Generator().manual_seed(3)
    sums = torch.randn(WIDE, generator=made), torch.randn(WIDE, generator=made)
    first = give(release, sums[0])
    if has_checkpoint:
        release.save({**release.state_dict(), "model": {}})
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    left(release)
    if has_checkpoint:  # which knows better
        with pytest.raises(NoshuffleError, match=r"older than the checkpoints|does not know of"):
            opened(copy, strategy)
        return
    again = opened(copy, strategy)
    assert again.released == BEFORE
    independent(first, give(again, sums[1]), sums, strategy.noising(STEPS))


@pytest.mark.parametrize("witness", ["statement.json", "checkpoints", "key.json"])
def test_a_ledger_older_than_what_lies_beside_it_is_refused(tmp_path: Path, witness: str) -> None:
    path = tmp_path / "run"
    begun(path, strategies()["tree"])
    early = (path / "ledger.sqlite").read_bytes()
    release = opened(path, strategies()["tree"])
    give(release, torch.zeros(WIDE))
    if witness == "statement.json":
        release.write_statement()
    elif witness == "checkpoints":
        release.save({**release.state_dict(), "model": {}})
        (path / "statement.json").unlink()
    left(release)
    for file in path.glob("ledger.sqlite*"):
        file.unlink()
    (path / "ledger.sqlite").write_bytes(early)
    with pytest.raises(ReplayRefused):
        opened(path, strategies()["tree"])
    verdict = verify(path)
    assert verdict.answer == "REFUTED", verdict.words()


def test_one_source_for_two_runs(tmp_path: Path) -> None:
    """A key serves one ledger: the difference of two releases used to be free of noise."""
    source = Source(bytes(range(32)))
    rows = identity().noising(STEPS)
    sums = torch.zeros(WIDE), torch.ones(WIDE)
    found = [
        give(opened(tmp_path / f"run{i}", identity(), source), value)
        for i, value in enumerate(sums)
    ]
    gap = (found[0] - found[1] + 1.0).double().numpy()
    assert gap.std() == pytest.approx(math.sqrt(2) * SCALE * rows[0, 0], rel=2 * NEAR)
    correlation = np.corrcoef(found[0].numpy(), found[1].numpy())[0, 1]
    assert abs(correlation) < 7 / math.sqrt(WIDE)


def test_training_runs_too(tmp_path: Path) -> None:
    """Through privatize: a snapshot after five steps, both halves finished and proved."""
    path, copy = tmp_path / "run", tmp_path / "copy"
    folders.killed(folders.train(folders.open_run(path, lr=0.0), stop=5))
    shutil.copytree(path, copy)
    found = []
    for where in (path, copy):
        private = folders.open_run(where, lr=0.0)
        folders.train(private)
        found.append(folders.gradients(private) * folders.SIZE)
        private.close()
        verdict = verify(where)
        assert (verdict.answer, verdict.lives) == ("PROVED", 2), verdict.words()
    # The same model and batch at the last step: what differs is noise, of both continuations.
    # Ten values on a grid: two of them may meet, and all but a few do not (chance: 10⁻¹⁰).
    gap = np.abs(found[0] - found[1])
    assert len(gap) == 10
    assert np.count_nonzero(gap > 1e-4) > 6
    assert np.sqrt(np.mean(gap**2)) > 0.2  # its deviation is 3
    names = [json.loads((p / "statement.json").read_text())["ledger_link"] for p in (path, copy)]
    assert names[0] != names[1]


def test_an_older_key_file_would_repeat_steps_with_other_noise(tmp_path: Path) -> None:
    begun(tmp_path, identity())
    keys = tmp_path / "checkpoints/key.json"
    old = keys.read_bytes()
    release = opened(tmp_path, identity())
    give(release, torch.ones(WIDE))
    left(release)
    new = keys.read_bytes()
    keys.write_bytes(old)
    with pytest.raises(ReplayRefused, match="older than the last steps"):
        opened(tmp_path, identity())
    keys.write_bytes(new)
    assert opened(tmp_path, identity()).released == BEFORE + 1


def test_keys_that_no_step_has_used_may_be_missing(tmp_path: Path) -> None:
    """As a process leaves it that was killed between the row of its life and its key file."""
    begun(tmp_path, identity())
    keys = tmp_path / "checkpoints/key.json"
    old = keys.read_bytes()
    left(opened(tmp_path, identity()))
    keys.write_bytes(old)
    give(opened(tmp_path, identity()), torch.ones(WIDE))


@pytest.mark.parametrize("tables", [0, 1, 2, 3])
def test_a_run_that_was_killed_while_its_ledger_was_made_begins(
    tmp_path: Path, tables: int
) -> None:
    """Twice, since the second life finds what the first left."""
    strategy = strategies()["tree"]
    release = opened(tmp_path / "run", strategy)
    left(release)
    for name in ("", "-wal", "-shm"):
        (tmp_path / f"run/ledger.sqlite{name}").unlink(missing_ok=True)
    with closing(sqlite3.connect(tmp_path / "run/ledger.sqlite")) as db:
        for statement in SCHEMA.split(";")[:tables]:
            db.execute(statement)
    with pytest.raises(InvalidInput, match="no run has begun"):  # and nothing is refuted
        verify(tmp_path / "run")
    left(opened(tmp_path / "run", strategy))
    again = opened(tmp_path / "run", strategy)
    give(again, torch.zeros(WIDE))
    assert again.released == 1
