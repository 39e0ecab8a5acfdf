"""A sealed run: keys and noise states gone, nothing added any more; signatures over all of it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.release import folders
from tests.release.folders import cut, edit_json, key_pair, newest, relink, restate, set_fact, sql

from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused
from noshuffle.noise import test_source as make_source
from noshuffle.participation import SinglePass
from noshuffle.release import ledger_tables as tables
from noshuffle.release.ledger import Ledger
from noshuffle.release.opening import fork
from noshuffle.release.seal import note_files, seal
from noshuffle.training import verify


def finished(path: Path, **options: object) -> Path:
    private = folders.train(folders.open_run(path, **options))  # type: ignore[arg-type]
    private.close()
    return path


def everything(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file())


def test_a_process_that_changes_its_folder_keeps_its_run_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statement and checkpoints went elsewhere, and keys that a seal says are gone stayed."""
    monkeypatch.chdir(tmp_path)
    private = folders.open_run(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    folders.train(private)
    private.close()
    assert not (tmp_path / "run/checkpoints/key.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert verify(tmp_path / "run").answer == "PROVED"


def test_a_finished_run_keeps_nothing_that_takes_its_noise_off(tmp_path: Path) -> None:
    """Who had the key and the model had the clipped sum."""
    private = folders.open_run(tmp_path / "run")
    ring = private._parts.release._ring
    folders.train(private)
    states = list((tmp_path / "run/checkpoints").glob("step-*/state.pt"))
    assert all(torch.load(s, weights_only=True)["noise"] is not None for s in states)
    before = private.statement()
    private.close()
    path = tmp_path / "run"
    assert not (path / "checkpoints/key.json").exists()
    assert all(torch.load(s, weights_only=True)["noise"] is None for s in states)
    held = everything(path)
    for life in ring.lives:
        for secret in (life.noise, life.sampling, ring.secret):
            assert secret not in held
            assert secret.hex().encode() not in held
    assert private.statement() == before
    verdict = verify(path)
    assert verdict.answer == "PROVED", verdict.words()
    assert verdict.epsilon == before.epsilon
    assert any("before the keys were destroyed" in line for line in verdict.checked)
    with pytest.raises(InvalidInput, match="was the run sealed"):
        folders.open_run(path)
    seal(path)  # once more changes nothing
    assert verify(path).answer == "PROVED"


def test_what_a_kill_left_half_written_goes_too(tmp_path: Path) -> None:
    """Keys and noise states that a process was writing to a temporary name when it was killed."""
    path = tmp_path / "run"
    private = folders.train(folders.open_run(path))
    private.close(keep_keys=True)
    checkpoints = path / "checkpoints"
    key, state = checkpoints / "key.json", newest(path)
    shutil.copyfile(key, checkpoints / ".key.json.77.tmp")
    shutil.copytree(state, checkpoints / ".step-00000020.77.tmp")
    shutil.copytree(state, checkpoints / ".old-step-00000016.77")
    secret = json.loads(key.read_text())["secret"].encode()
    assert secret in everything(path)
    seal(path)
    assert secret not in everything(path)
    assert sorted(file.name[:5] for file in checkpoints.iterdir()) == ["step-", "step-"]
    assert verify(path).answer == "PROVED", verify(path).words()


def test_keys_stay_if_asked_for_by_name(tmp_path: Path) -> None:
    private = folders.train(folders.open_run(tmp_path / "run"))
    private.close(keep_keys=True)
    assert (tmp_path / "run/checkpoints/key.json").exists()
    assert verify(tmp_path / "run").answer == "PROVED"
    assert folders.open_run(tmp_path / "run").resume() == 20


def test_an_unfinished_run_that_is_sealed_takes_no_step_any_more(tmp_path: Path) -> None:
    path = tmp_path / "run"
    private = folders.train(folders.open_run(path), stop=7)
    private.close()
    assert (path / "checkpoints/key.json").exists()  # it may go on
    assert seal(path) == ("every key is of a process on record",)
    assert verify(path).answer == "PROVED"
    assert verify(path).released == 7
    with pytest.raises(InvalidInput, match="was the run sealed"):
        folders.open_run(path)
    child = fork(path, tmp_path / "child")
    assert child.ancestors()[0].released == 7
    assert verify(path).answer in ("PROVED", "CONSISTENT")


def test_a_run_that_is_sealed_under_its_feet_refuses_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "run"
    private = folders.open_run(path, rule=SinglePass(steps=4))
    x, y = folders.data()
    private.step(folders.LOSS, x[:6], y[:6], ids=range(6))
    private.ledger.flush()
    seal(path)
    before = folders.flat(private.model.parameters())
    with pytest.raises(ReplayRefused, match="sealed after 1 steps"):
        private.step(folders.LOSS, x[6:12], y[6:12], ids=range(6, 12))
    assert (folders.flat(private.model.parameters()) == before).all()


def append(path: Path, kind: str, body: dict[str, object]) -> None:
    """A row more at the end, with its right link."""
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    seq, link = tables.last_link(db)
    data = json.dumps(body, sort_keys=True).encode()
    new = tables.event_link(link, kind, 1.0, data)
    db.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", (seq + 1, kind, 1.0, data, new))
    db.close()


def other_model(path: Path) -> None:
    """Another model, noted in the ledger as the run itself would have done."""
    from noshuffle.release.checkpoint import digests, step_of

    folders.flip(newest(path) / "model.safetensors")
    append(path, "checkpoint", {"step": step_of(newest(path)), "files": digests(newest(path))})
    restate(path)


#: All of it made anew, so that only a signature shows it.
WHOLESALE = {
    "a step cut": lambda p: (cut(p, 4), shutil.rmtree(newest(p)), restate(p)),
    "another clip and noise scale": lambda p: (
        set_fact(p, "clip", "Flat(norm=0.5)", in_chain=True),
        set_fact(p, "noise_scale", "1.0", in_chain=True),
        restate(p),
    ),
    "another date": lambda p: (
        sql(p, ("UPDATE steps SET time = time - 864000",)),
        relink(p),
        restate(p),
    ),
    "another model": other_model,
    "another report": lambda p: (
        (p / "report.html").write_text("ε = 0.01"),
        sql(p, ("DELETE FROM log WHERE kind = 'files'",)),
        relink(p),
        restate(p),
    ),
    "another digest": lambda p: (
        sql(p, ("UPDATE steps SET digest = x'00112233445566778899aabbccddeeff' WHERE step = 3",)),
        relink(p),
        restate(p),
    ),
    "a signature of somebody else": lambda p: (
        (p / "signature.json").unlink(),
        seal(p, sign=key_pair(p.parent, "other")[0]),
    ),
    "no signature": lambda p: (p / "signature.json").unlink(),
    "a field of the signature": lambda p: edit_json(
        p / "signature.json", lambda r: r.update(signature="00" * 64)
    ),
}


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("signed")
    private, public, _ = key_pair(folder)
    path = finished(folder / "run")
    (path / "report.html").write_text("a report")
    note_files(path)  # as commands do that add something
    seal(path, sign=private)
    return path, public


def test_a_signature_is_checked_with_the_public_key(
    signed: tuple[Path, Path], tmp_path: Path
) -> None:
    path, public = signed
    verdict = verify(path, public_key=public)
    assert verdict.answer == "PROVED", verdict.words()
    assert verdict.is_signed
    in_hex = json.loads((path / "signature.json").read_text())["public_key"]
    assert verify(path, public_key=in_hex).answer == "PROVED"
    verdict = verify(path)
    assert verdict.answer == "CONSISTENT"  # whose signature it is, nobody said
    assert "whose signature" in verdict.unchecked[0]
    verdict = verify(path, public_key=key_pair(tmp_path)[1])
    assert verdict.answer == "REFUTED"
    assert "another key" in verdict.refuted[0]
    with pytest.raises(InvalidInput, match="PEM file with an Ed25519"):
        seal(path, sign=public)


@pytest.mark.parametrize("name", WHOLESALE)
def test_what_was_made_anew_as_a_whole_is_shown_by_the_signature(
    signed: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    path, public = signed
    copy = shutil.copytree(path, tmp_path / "copy")
    WHOLESALE[name](copy)
    verdict = verify(copy, public_key=public)
    assert verdict.answer == "REFUTED", verdict.words()
    assert not verdict.is_signed


def test_what_only_a_signature_could_show_is_said(tmp_path: Path) -> None:
    path = finished(tmp_path / "run")
    assert "only a signature could show" in verify(path).words()
    test = finished(tmp_path / "test", source=make_source(seed=1))
    assert verify(test).answer == "NOT PRIVATE"
    assert not (test / "checkpoints/key.json").exists()


def test_a_seal_that_was_interrupted_is_brought_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    private = folders.train(folders.open_run(path))
    private.close(keep_keys=True)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    for place in (
        "noshuffle.release.seal._drop_noise_states",
        "noshuffle.release.checkpoint.digests",
        "noshuffle.release.folder.RunFolder.destroy_keys",
        "noshuffle.release.seal.write_statement",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, dies)
            with pytest.raises((KeyboardInterrupt, NoshuffleError)):
                seal(path)
    seal(path)
    assert not (path / "checkpoints/key.json").exists()
    assert verify(path).answer == "PROVED", verify(path).words()


def test_a_full_disk_is_said_and_the_seal_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was SQLite's "database or disk is full", without a word of what to do."""

    class Full(Ledger):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            pages = self.db.execute("PRAGMA page_count").fetchone()[0]
            self.db.execute(f"PRAGMA max_page_count={pages}")

    path = tmp_path / "r"
    folders.train(folders.open_run(path)).close(keep_keys=True)
    with monkeypatch.context() as patch:
        patch.setattr("noshuffle.release.seal.Ledger", Full)
        with pytest.raises(sqlite3.OperationalError, match="space on the disk") as told:
            seal(path)
        assert told.value.sqlite_errorname == "SQLITE_FULL"
    seal(path)
    assert verify(path).answer == "PROVED"


def test_a_step_that_a_full_disk_stopped_is_released_later(tmp_path: Path) -> None:
    private = folders.open_run(tmp_path / "r")
    folders.train(private, stop=2)
    db = private.ledger.db
    db.execute(f"PRAGMA max_page_count={db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(sqlite3.OperationalError, match="space on the disk"):
        folders.train(private)
    released = private.steps_released
    assert 2 <= released < 20
    db.execute("PRAGMA max_page_count=1000000")
    again = folders.open_run(tmp_path / "r")
    assert again.steps_released == released
    folders.train(again).close()
    assert verify(tmp_path / "r").answer == "PROVED"
