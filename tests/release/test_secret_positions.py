"""Who was drawn in secret is in no file of a sealed run; what is left of it cannot be changed.

That every driver keeps to it is in the contract suite.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.release import folders, positions
from tests.release.folders import relink, restate, sql
from tests.release.positions import finished, shown

from noshuffle.errors import InvalidInput, NoshuffleError, VerificationFailed
from noshuffle.federated.cohort import read_log
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.release import secret_units
from noshuffle.release.ledger_file import LedgerFile
from noshuffle.release.ledger_tables import Evidence, encode_units
from noshuffle.release.opening import fork
from noshuffle.release.seal import seal
from noshuffle.report import write_report
from noshuffle.strategies import identity
from noshuffle.training import verify

PEOPLE = 40
KINDS = [
    Poisson(6, 0.3),
    FixedSize(6, 8, PEOPLE),
    CyclicPoisson(6, 2, 0.5),
    BallsInBins(2, 3),
    TruncatedPoisson(6, 0.4, 18, PEOPLE),
]


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A finished run that is not sealed yet, and its draws."""
    path = tmp_path_factory.mktemp("open") / "run"
    return path, finished(path, keep_keys=True)


@pytest.fixture
def copy(open_run: tuple[Path, list[np.ndarray]], tmp_path: Path) -> Path:
    return shutil.copytree(open_run[0], tmp_path / "copy")


@pytest.mark.parametrize("rule", KINDS, ids=lambda rule: rule.kind)
def test_neither_who_nor_how_many(rule: Participation, tmp_path: Path) -> None:
    path = tmp_path / "run"
    drawn = finished(path, rule, PEOPLE)
    assert shown(path, drawn) == []
    db = sqlite3.connect(path / "ledger.sqlite")
    left = db.execute("SELECT DISTINCT units, LENGTH(ids) FROM steps").fetchall()
    db.close()
    assert left == [(0, 33)]  # the same for every batch, however large
    assert not list(path.glob("*-wal"))
    verdict = verify(path)
    assert verdict.answer == "PROVED", verdict.words()
    assert verdict.exposed == ()


def test_they_stay_if_asked_for_by_name(
    copy: Path, open_run: tuple[Path, list[np.ndarray]]
) -> None:
    drawn = open_run[1]
    seal(copy, keep_positions=True)
    assert not (copy / "checkpoints/key.json").exists()
    assert any("ledger.sqlite: list of step 0" in line for line in shown(copy, drawn))
    verdict = verify(copy)
    assert verdict.answer == "PROVED"
    assert "noshuffle seal removes them" in verdict.words()
    seal(copy)
    assert shown(copy, drawn) == []
    verdict = verify(copy)
    assert (verdict.answer, verdict.exposed) == ("PROVED", ()), verdict.words()


def test_what_a_sealed_run_is_asked_for_afterwards(tmp_path: Path) -> None:
    """Statement, report, fork, another seal; a resumed run and a log of cohorts are refused."""
    path = tmp_path / "run"
    drawn = finished(path)
    told = json.loads((path / "statement.json").read_text())
    write_report(path)
    seal(path)
    again = json.loads((path / "statement.json").read_text())
    assert again["epsilon"] == told["epsilon"]
    assert verify(path).answer == "PROVED", verify(path).words()
    with pytest.raises(InvalidInput, match="was the run sealed"):
        finished(path)
    with pytest.raises(InvalidInput, match="were secret draws, and were removed"):
        read_log(path)
    assert fork(path, tmp_path / "child").ancestors()[0].released == positions.STEPS
    assert shown(tmp_path, drawn) == []


def test_random_states_go_with_them(tmp_path: Path) -> None:
    """How far a generator went tells how many examples were augmented with it."""

    def states(path: Path) -> list[Any]:
        found = sorted((path / "checkpoints").glob("step-*/state.pt"))
        return [torch.load(file, weights_only=True)["random"] for file in found]

    folders.train(folders.open_run(tmp_path / "in order")).close()
    assert all(states(tmp_path / "in order"))
    private = folders.open_run(
        tmp_path / "run", rule=FixedSize(2, 6, folders.ROWS), strategy=identity()
    )
    sampler, (x, y) = private.sampler(folders.ROWS), folders.data()
    for ids in sampler:
        private.step(folders.LOSS, x[ids], y[ids], ids=ids)
        private.save()
    assert all(states(tmp_path / "run"))
    private.close()
    assert states(tmp_path / "run") == [None, None]
    assert verify(tmp_path / "run").answer == "PROVED"


def test_a_folder_of_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are linked by the lists themselves: they verify, and what they tell is said."""
    path, add = tmp_path / "run", LedgerFile.add_step

    def in_the_open(self: LedgerFile, step: int, **fields: Any) -> None:
        add(self, step, **{**fields, "is_secret": False})

    monkeypatch.setattr(LedgerFile, "add_step", in_the_open)
    drawn = finished(path)
    assert "ledger.sqlite: list of step 0" in shown(path, drawn)
    for _ in range(2):
        verdict = verify(path)
        assert verdict.answer == "PROVED", verdict.words()
        assert "an earlier version wrote them" in verdict.exposed[0]
        seal(path)


def test_keys_that_were_lost_before_they_were_compared(copy: Path) -> None:
    (copy / "checkpoints/key.json").unlink()
    seal(copy)
    verdict = verify(copy)
    assert verdict.answer == "CONSISTENT"
    assert "not compared with keys that are gone" in verdict.words()


# -- changes by hand -------------------------------------------------------------------------------


def ids_of(path: Path, step: int) -> bytes:
    with closing(sqlite3.connect(path / "ledger.sqlite")) as db:
        (found,) = db.execute("SELECT ids FROM steps WHERE step = ?", (step,)).fetchone()
    return bytes(found)


def put(path: Path, step: int, ids: bytes, units: int = 0) -> None:
    sql(path, ("UPDATE steps SET ids = ?, units = ? WHERE step = ?", (ids, units, step)))


#: Of a sealed run.
SEALED: dict[str, Callable[[Path], Any]] = {
    "a bit of a commitment": lambda p: put(p, 2, ids_of(p, 2)[:-1] + bytes([ids_of(p, 2)[-1] ^ 1])),
    "commitments of two steps exchanged": lambda p: [
        put(p, step, ids) for step, ids in ((2, ids_of(p, 3)), (3, ids_of(p, 2)))
    ],
    "a number of units": lambda p: put(p, 2, ids_of(p, 2), 4),
    "a number of units, chain and statement anew": lambda p: (
        put(p, 2, ids_of(p, 2), 4),
        relink(p),
        restate(p),
    ),
    "a list in its place": lambda p: put(p, 2, encode_units(np.arange(4)), 4),
    "a hidden list in its place, chain and statement anew": lambda p: (
        put(p, 2, secret_units.hidden(encode_units(np.arange(4)))),
        relink(p),
        restate(p),
    ),
    "that they were removed, cut out; chain and statement anew": lambda p: (
        sql(p, ("DELETE FROM log WHERE kind = 'positions'",)),
        relink(p),
        restate(p),
    ),
    "a step cut out": lambda p: sql(p, ("DELETE FROM steps WHERE step = 2",)),
}
#: Of a run that is not sealed.
OPEN: dict[str, Callable[[Path], Any]] = {
    "a list removed": lambda p: put(p, 2, secret_units.removed(ids_of(p, 2))),
    "another salt": lambda p: put(p, 2, secret_units.hidden(ids_of(p, 2)[33:])),
    "another list under the salt": lambda p: put(
        p, 2, ids_of(p, 2)[:33] + encode_units(np.arange(4))
    ),
    "a list that is not hidden": lambda p: put(p, 2, secret_units.listed(ids_of(p, 2)), 4),
}


@pytest.mark.parametrize("name", SEALED)
def test_changes_of_a_sealed_run(copy: Path, name: str) -> None:
    seal(copy)
    SEALED[name](copy)
    verdict = verify(copy)
    assert verdict.answer == "REFUTED", verdict.words()


@pytest.mark.parametrize("name", OPEN)
def test_changes_of_a_run_that_is_not_sealed(copy: Path, name: str) -> None:
    """They are seen, and a seal neither mends them nor destroys anything."""
    OPEN[name](copy)
    assert verify(copy).answer == "REFUTED", verify(copy).words()
    if name != "a list removed":
        with pytest.raises(VerificationFailed, match="step 2"):
            seal(copy)
        assert (copy / "checkpoints/key.json").exists()
    else:  # the chain holds; that one list is gone before the others stays to be seen
        seal(copy)
    assert verify(copy).answer in ("REFUTED", "CONSISTENT")


def test_lists_that_were_brought_back(copy: Path, open_run: tuple[Path, list[np.ndarray]]) -> None:
    seal(copy)
    for step in range(positions.STEPS):
        put(copy, step, ids_of(open_run[0], step))
    verdict = verify(copy)
    assert verdict.answer == "REFUTED"
    assert "are there again" in verdict.words()


def test_the_links_are_those_of_the_run_as_it_was(
    copy: Path, open_run: tuple[Path, list[np.ndarray]]
) -> None:
    """A statement from before the seal still names a row of the chain."""
    told = json.loads((copy / "statement.json").read_text())
    seal(copy)
    query = "SELECT link FROM log WHERE seq = ?"
    with closing(Evidence(copy / "ledger.sqlite")) as evidence:
        (link,) = evidence.db.execute(query, (told["ledger_rows"],)).fetchone()
    assert bytes(link).hex() == told["ledger_link"]


# -- interruptions ---------------------------------------------------------------------------------


def dies(*_: object) -> None:
    raise KeyboardInterrupt


def dies_at_end(db: sqlite3.Connection, how: str) -> None:
    if how == "TRUNCATE":
        raise KeyboardInterrupt
    _fold(db, how)


_fold = secret_units._fold
INTERRUPTED: dict[str, tuple[str, Callable[..., None], str]] = {
    "before lists are removed": ("ledger_file.LedgerFile.remove_units", dies, "PROVED"),
    "while they are": ("secret_units.commitments", dies, "PROVED"),
    "before pages are written anew": ("secret_units.scrub", dies, "CONSISTENT"),
    "before the log is overwritten": ("secret_units._overwrite", dies, "CONSISTENT"),
    "before the log is cut": ("secret_units._fold", dies_at_end, "CONSISTENT"),
    "before the statement": ("seal.write_statement", dies, "PROVED"),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_removal(
    copy: Path,
    open_run: tuple[Path, list[np.ndarray]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it is done `verify` says so; the next seal brings it to its end."""
    place, how, answer = INTERRUPTED[name]
    with monkeypatch.context() as patch:
        patch.setattr(f"noshuffle.release.{place}", how)
        with pytest.raises(KeyboardInterrupt):
            seal(copy)
    verdict = verify(copy)
    assert verdict.answer == answer, verdict.words()
    assert ("did not come to its end" in verdict.words()) == (answer == "CONSISTENT")
    seal(copy)
    assert shown(copy, open_run[1]) == []
    assert verify(copy).answer == "PROVED", verify(copy).words()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_while_it_is_sealed(tmp_path: Path, count: int) -> None:
    """SIGKILL at instants from the first call of a seal to its last."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.release.kill_seal", str(tmp_path), str(count)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count
    for one in found:
        assert str(one["said"]).startswith("killed"), one
        assert (one["answer"], one["shown"]) == ("PROVED", []), one
        assert one["failures"] == [], one


# -- the file itself -------------------------------------------------------------------------------


def test_nothing_stays_in_pages_and_log(tmp_path: Path) -> None:
    """Rows of all sizes in any order, so that pages were split, freed and used again."""
    chance, file = random.Random(3), tmp_path / "file"
    db = sqlite3.connect(file, isolation_level=None, timeout=0)
    for how in ("page_size=1024", "journal_mode=WAL", "wal_autocheckpoint=16"):
        db.execute(f"PRAGMA {how}")
    db.execute("CREATE TABLE rows (name INTEGER PRIMARY KEY, value BLOB)")
    secrets = [chance.randbytes(16) for _ in range(200)]
    for name, secret in chance.sample(list(enumerate(secrets)), k=200):
        value = secret * chance.randrange(1, 200)
        db.execute("INSERT INTO rows VALUES (?, ?)", (name * 7919 % 1009, value))

    def left() -> int:
        held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return sum(secret[:8] in held for secret in secrets)

    assert left() == 200
    db.execute("UPDATE rows SET value = x'00'")
    assert left()
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM rows").fetchone()
        with pytest.raises(NoshuffleError, match="being read by somebody else"):
            secret_units.scrub(db, tmp_path / "file-wal")
    secret_units.scrub(db, tmp_path / "file-wal")
    assert left() == 0
    assert db.execute("SELECT COUNT(*) FROM rows WHERE value = x'00'").fetchone() == (200,)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_log_that_was_overwritten_and_not_cut(tmp_path: Path, is_killed: bool) -> None:
    """What is in the database stays, for the process itself and for one that finds it like that."""
    file, log = tmp_path / "file", tmp_path / "file-wal"
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE rows (name INTEGER PRIMARY KEY)")
    db.executemany("INSERT INTO rows VALUES (?)", [(i,) for i in range(100)])
    secret_units._fold(db, "RESTART")
    secret_units._overwrite(db, log)
    assert set(log.read_bytes()) == {0}
    if is_killed:  # as its files are at this instant
        (tmp_path / "copy").mkdir()
        shutil.copyfile(log, tmp_path / "copy/file-wal")
        shutil.copyfile(file, tmp_path / "copy/file")
        db.close()
        db = sqlite3.connect(tmp_path / "copy/file", isolation_level=None)
    db.execute("INSERT INTO rows VALUES (100)")
    assert db.execute("SELECT COUNT(*) FROM rows").fetchone() == (101,)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_commitments_hide_and_bind() -> None:
    row = secret_units.hidden(b"units")
    assert secret_units.removed(row) != secret_units.removed(secret_units.hidden(b"units"))
    for i in range(1, len(row)):  # salt and list
        other = row[:i] + bytes([row[i] ^ 1]) + row[i + 1 :]
        assert secret_units.linked(other) != secret_units.linked(row)
    assert secret_units.linked(encode_units(np.arange(5))) == encode_units(np.arange(5))
