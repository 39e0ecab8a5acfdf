"""Every way to change a run folder that was thought of: none stays PROVED.

Of 26 such changes 15 were called verified, without a caveat, when only what the statement itself
is made of was looked at. Run with -s to see the table.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.release import folders
from tests.release.folders import cut, edit_json, flip, newest, relink, restate, set_fact, sql

from noshuffle.errors import InvalidInput, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger_tables import encode_units
from noshuffle.release.seal import seal
from noshuffle.training import verify

Hand = Callable[[Path], Any]


def forge_plan(path: Path, *, in_chain: bool) -> None:
    """Four times the noise: a quarter of μ."""
    record = json.loads((path / "plan.json").read_text())
    record["noise_multiplier"] *= 4
    forged = Plan.from_json(json.dumps(record))
    (path / "plan.json").write_text(forged.to_json())
    set_fact(path, "plan", forged.hash, in_chain=in_chain)
    restate(path)


def exchange(path: Path, one: int, other: int) -> None:
    """Two rows of the log change places."""
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    pick = "SELECT kind, time, body FROM log WHERE seq = ?"
    rows = [db.execute(pick, (seq,)).fetchone() for seq in (one, other)]
    for seq, row in zip((other, one), rows):
        db.execute("UPDATE log SET kind = ?, time = ?, body = ? WHERE seq = ?", (*row, seq))
    db.close()


def other_model(path: Path) -> None:
    file = newest(path) / "model.safetensors"
    save_file({n: torch.zeros_like(v) for n, v in load_file(file).items()}, file)


def other_key(path: Path) -> None:
    """Of a sealed run there is none; then one is put there."""
    file = path / "checkpoints/key.json"
    file.write_text(json.dumps(KeyRing.new().to_dict()))


def other_life_key(path: Path) -> None:
    """The ring keeps its name; the key of one life does not."""
    edit_json(path / "checkpoints/key.json", lambda r: r["lives"][0].update(noise="ab" * 32))


def without_late_evidence(path: Path) -> None:
    """All that was noted after the last step."""
    db = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    (last,) = db.execute("SELECT MAX(seq) FROM steps").fetchone()
    db.execute("DELETE FROM log WHERE seq > ?", (last,))
    db.close()
    restate(path)


def change_byte(path: Path, after: bytes, *, at: int, by: int) -> None:
    """One byte of the ledger's file, counted from where these bytes stand."""
    file = path / "ledger.sqlite"
    data = bytearray(file.read_bytes())
    data[data.index(after) + at] ^= by
    file.write_bytes(bytes(data))


UNITS = encode_units(np.arange(6, 11))
#: What is done, by hand, to any folder.
HANDS: dict[str, Hand] = {
    "model.safetensors replaced": other_model,
    "model.safetensors, one bit": lambda p: flip(newest(p) / "model.safetensors"),
    "state.pt, one bit": lambda p: flip(newest(p) / "state.pt", at=0.5),
    "newest checkpoint deleted": lambda p: shutil.rmtree(newest(p)),
    "all checkpoints deleted": lambda p: [
        shutil.rmtree(c) for c in (p / "checkpoints").glob("step-*")
    ],
    "a file of a checkpoint deleted": lambda p: (newest(p) / "model.safetensors").unlink(),
    "a file added to a checkpoint": lambda p: (newest(p) / "extra").write_text("x"),
    "a checkpoint from nowhere": lambda p: shutil.copytree(
        newest(p), p / "checkpoints/step-00000001"
    ),
    "a file beside checkpoints, named like one": lambda p: (
        p / "checkpoints/step-best.pt"
    ).write_text("x"),
    "a checkpoint twice, with a zero more": lambda p: shutil.copytree(
        newest(p), p / "checkpoints" / newest(p).name.replace("-", "-0")
    ),
    "a hidden file": lambda p: (p / ".report.tmp").write_text("x"),
    "a table more": lambda p: sql(p, ("CREATE TABLE proof (epsilon REAL)",)),
    # The number of a row stands before its lengths: its index has another one then.
    "number of a row in its page": lambda p: change_byte(p, b"test_keyno", at=-4, by=0x40),
    "a letter of a table's form that is none": lambda p: change_byte(
        p, b"CREATE TABLE log", at=8, by=0x80
    ),
    "a trigger": lambda p: sql(
        p, ("CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM units; END",)
    ),
    "clip 1 -> 100": lambda p: set_fact(p, "clip", "Flat(norm=100.0)", in_chain=False),
    "clip 1 -> 100, chain anew": lambda p: set_fact(p, "clip", "Flat(norm=100.0)", in_chain=True),
    "noise scale": lambda p: set_fact(p, "noise_scale", "8.0", in_chain=False),
    "noise scale, chain anew": lambda p: set_fact(p, "noise_scale", "8.0", in_chain=True),
    "noise scale, and no number": lambda p: (
        set_fact(p, "clip", "QuantileClip()", in_chain=True),
        set_fact(p, "noise_scale", "loud", in_chain=True),
    ),
    "batch size": lambda p: set_fact(p, "batch_size", "60", in_chain=False),
    "batch size, chain and statement anew, a checkpoint left": lambda p: (
        set_fact(p, "batch_size", "60", in_chain=True),
        restate(p),
    ),
    "initial weights": lambda p: set_fact(p, "initial", "public data", in_chain=False),
    "kind of ids": lambda p: set_fact(p, "ids", "names", in_chain=False),
    "batch print": lambda p: sql(p, ("UPDATE steps SET batch = x'00' WHERE step = 2",)),
    "digest of a sum": lambda p: sql(p, ("UPDATE steps SET digest = x'00' WHERE step = 2",)),
    "digest of a sum, chain anew": lambda p: (
        sql(p, ("UPDATE steps SET digest = x'00' WHERE step = 2",)),
        relink(p),
    ),
    "late digest": lambda p: sql(p, ("UPDATE steps SET late = x'00' WHERE step = 2",)),
    "time of a step": lambda p: sql(p, ("UPDATE steps SET time = time - 9 WHERE step = 2",)),
    "life of a step": lambda p: sql(p, ("UPDATE steps SET life = 1 WHERE step = 2",)),
    "unit list": lambda p: sql(p, ("UPDATE steps SET ids = ? WHERE step = 2", (UNITS,))),
    "unit list, chain anew": lambda p: (
        sql(p, ("UPDATE steps SET ids = ?, units = 5 WHERE step = 2", (UNITS,))),
        relink(p),
    ),
    "summary of units": lambda p: sql(p, ("UPDATE units SET count = 1 WHERE unit = 4",)),
    "steps of the summary, with a space": lambda p: sql(
        p, ("UPDATE meta SET value = value || ' ' WHERE name = 'summarised'",)
    ),
    "two steps exchanged": lambda p: sql(
        p,
        ("UPDATE steps SET step = -1 WHERE step = 2",),
        ("UPDATE steps SET step = 2 WHERE step = 3",),
        ("UPDATE steps SET step = 3 WHERE step = -1",),
    ),
    "a step cut out": lambda p: sql(p, ("DELETE FROM steps WHERE step = 2",)),
    "ten rows cut, all anew, a later checkpoint left": lambda p: (cut(p, 10), restate(p)),
    "metrics, one line": lambda p: (p / "metrics.jsonl").write_text(
        (p / "metrics.jsonl").read_text().replace('"step": 4', '"step": 5')
    ),
    "metrics, a line more": lambda p: (p / "metrics.jsonl").open("a").write('{"accuracy": 1}\n'),
    "metrics deleted": lambda p: (p / "metrics.jsonl").unlink(),
    "config": lambda p: edit_json(p / "config.json", lambda r: r.update(seed=9)),
    "report.html": lambda p: (p / "report.html").write_text("ε = 0.01"),
    "report.html deleted": lambda p: (p / "report.html").unlink(),
    "a file more": lambda p: (p / "certificate.html").write_text("ε = 0.01"),
    "plan, hash in meta": lambda p: forge_plan(p, in_chain=False),
    "plan, hash in the chain too": lambda p: forge_plan(p, in_chain=True),
    "plan, spaces": lambda p: (p / "plan.json").write_text((p / "plan.json").read_text() + " "),
    "ring of keys replaced": other_key,
    "statement: epsilon": lambda p: edit_json(p / "statement.json", lambda r: r.update(epsilon=1)),
    "statement: delta": lambda p: edit_json(p / "statement.json", lambda r: r.update(delta=1e-9)),
    "statement: unit": lambda p: edit_json(p / "statement.json", lambda r: r.update(unit="user")),
    "statement: assumptions": lambda p: edit_json(
        p / "statement.json", lambda r: r["assumptions"].pop()
    ),
    "statement: rows beyond the ledger, no link": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(ledger_rows=10**6, ledger_link=None)
    ),
    "statement: no rows": lambda p: edit_json(p / "statement.json", lambda r: r.pop("ledger_rows")),
    "statement as a list of pairs": lambda p: (p / "statement.json").write_text(
        json.dumps(list(json.loads((p / "statement.json").read_text()).items()))
    ),
    "statement: rows": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(ledger_rows=r["ledger_rows"] - 1)
    ),
    "statement: link": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(ledger_link="00" * 32)
    ),
    "statement: no rows, empty link": lambda p: edit_json(
        p / "statement.json", lambda r: (r.pop("ledger_rows"), r.update(ledger_link=""))
    ),
    "statement: epsilon twice": lambda p: (p / "statement.json").write_text(
        '{"epsilon": 0.01,' + (p / "statement.json").read_text()[1:]
    ),
    "statement: a name more, of nothing": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(certified=None)
    ),
    "statement: true as 1": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(exact=int(r["exact"]))
    ),
    "statement: a whole number with a point": lambda p: edit_json(
        p / "statement.json", lambda r: r.update(released_steps=float(r["released_steps"]))
    ),
    "statement deleted": lambda p: (p / "statement.json").unlink(),
    "ledger deleted": lambda p: (p / "ledger.sqlite").unlink(),
    "facts deleted": lambda p: sql(p, ("DELETE FROM meta WHERE name = 'clip'",)),
    "facts deleted, chain anew": lambda p: (
        sql(
            p,
            ("DELETE FROM meta WHERE name = 'noise_scale'",),
            ("DELETE FROM log WHERE kind = 'fact' AND body LIKE '%noise_scale%'",),
        ),
        relink(p),
    ),
    "rows of the log reordered": lambda p: exchange(p, 2, 3),
    "lives removed": lambda p: sql(p, ("DELETE FROM log WHERE kind = 'life'",)),
    "lives removed, chain anew": lambda p: (
        sql(p, ("DELETE FROM log WHERE kind = 'life'",)),
        relink(p),
    ),
    "notes of files removed, chain anew": lambda p: (
        sql(p, ("DELETE FROM log WHERE kind = 'files'",)),
        relink(p),
        restate(p),
    ),
    "notes of checkpoints removed, chain anew": lambda p: (
        sql(p, ("DELETE FROM log WHERE kind = 'checkpoint'",)),
        relink(p),
        restate(p),
    ),
    "a test seed hidden": lambda p: set_fact(p, "test_key", "maybe", in_chain=False),
}
#: What can be done to a finished, sealed run only, and to an unfinished one only.
SEALED: dict[str, Hand] = {
    "last step cut out, all anew": lambda p: (cut(p, 1), restate(p)),
    "all notes after the last step removed": without_late_evidence,
    "seal removed": lambda p: sql(p, ("DELETE FROM log WHERE kind = 'seal'",)),
    "seal removed, chain anew": lambda p: (
        sql(p, ("DELETE FROM log WHERE kind = 'seal'",)),
        relink(p),
        restate(p),
    ),
    "sealed fact removed": lambda p: sql(p, ("DELETE FROM meta WHERE name = 'sealed'",)),
    "what the seal checked": lambda p: sql(
        p, ("UPDATE log SET body = '{\"checked\": []}' WHERE kind = 'seal'",)
    ),
}
OPEN: dict[str, Hand] = {
    "keys deleted": lambda p: (p / "checkpoints/key.json").unlink(),
    "keys, one bit": lambda p: flip(p / "checkpoints/key.json", at=0.5),
    "the key of a life replaced": other_life_key,
    "the key of the newest life removed": lambda p: edit_json(
        p / "checkpoints/key.json", lambda r: r["lives"].pop()
    ),
    "a life begins a row later": lambda p: edit_json(
        p / "checkpoints/key.json", lambda r: r["lives"][-1].update(row=r["lives"][-1]["row"] + 1)
    ),
    "twelve rows cut, all anew": lambda p: (cut(p, 12), restate(p)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished and sealed, one closed after 14 of 20 steps; both in two lives."""
    found = {}
    for kind in ("finished", "unfinished"):
        path = tmp_path_factory.mktemp(kind) / "run"
        first = folders.train(folders.open_run(path), stop=6)
        folders.killed(first)
        second = folders.open_run(path)
        second.run.write_config({"seed": 1})
        (path / "report.html").write_text("a report")
        folders.train(second, stop=None if kind == "finished" else 14)
        second.close()
        assert (path / "checkpoints/key.json").exists() == (kind == "unfinished")
        found[kind] = path
    return found


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, str, str]]]:
    lines: list[tuple[str, str, str, str]] = []
    yield lines
    wide = max((len(line[1]) for line in lines), default=0)
    print()
    for run, name, answer, why in sorted(lines):
        print(f"{run:<12}{name:<{wide}}  {answer:<12}{why[:90]}")


@pytest.mark.parametrize("kind", ["finished", "unfinished"])
def test_as_it_was_left_it_is_proved(runs: dict[str, Path], kind: str) -> None:
    verdict = verify(runs[kind])
    assert verdict.answer == "PROVED", verdict.words()
    assert verdict.lives == 2


CASES = [
    *(("finished", name, hand) for name, hand in {**HANDS, **SEALED}.items()),
    *(("unfinished", name, hand) for name, hand in {**HANDS, **OPEN}.items()),
]


@pytest.mark.parametrize(("kind", "name", "hand"), CASES, ids=[f"{k}-{n}" for k, n, _ in CASES])
def test_no_change_stays_proved(
    runs: dict[str, Path], table: list[Any], tmp_path: Path, kind: str, name: str, hand: Hand
) -> None:
    path = shutil.copytree(runs[kind], tmp_path / "copy")
    hand(path)
    verdict = verify(path)
    reasons = (*verdict.refuted, *verdict.not_private, *verdict.unchecked)
    table.append((kind, name, verdict.answer, reasons[0] if reasons else ""))
    assert verdict.answer != "PROVED", verdict.words()
    assert verdict.exit_code != 0
    assert reasons


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("way", ["seal", "go on"])
def test_a_checkpoint_that_was_changed_is_not_made_good(
    runs: dict[str, Path], tmp_path: Path, file: str, way: str
) -> None:
    """Neither by a seal nor by a process that goes on from it: weights from elsewhere know data."""
    path = shutil.copytree(runs["unfinished"], tmp_path / "copy")
    if file == "model.safetensors":
        other_model(path)
    else:
        state = torch.load(newest(path) / file, weights_only=True)
        state["noise"]["step"] = 11
        torch.save(state, newest(path) / file)
    if way == "seal":
        with pytest.raises(VerificationFailed, match=f"{file} is not what was saved"):
            seal(path)
        assert (path / "checkpoints/key.json").exists()
    else:
        private = folders.open_run(path)
        with pytest.raises(InvalidInput, match=f"{file} is not what this run saved"):
            private.resume()
        folders.killed(private)
    assert verify(path).answer == "REFUTED"


@pytest.mark.parametrize("place", ["noted", "there"])
def test_killed_around_the_moment_a_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Noted before it is there: what is there was noted, and a note alone refutes nothing."""
    path = tmp_path / "run"
    private = folders.train(folders.open_run(path), stop=5)

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "noted":
            patch.setattr("noshuffle.release.checkpoint.os.replace", dies)
        else:
            patch.setattr("noshuffle.release.ledger.Ledger.tidy", dies)
        with pytest.raises(KeyboardInterrupt):
            private.save()
    folders.killed(private)
    again = folders.open_run(path)
    assert again.resume() == (4 if place == "noted" else 5)
    folders.train(again)
    again.close()
    assert verify(path).answer == "PROVED", verify(path).words()
