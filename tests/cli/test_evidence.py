"""`noshuffle verify`, `seal` and `report`: four verdicts, four exit codes; signatures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.release import positions
from tests.release.folders import key_pair

from noshuffle.cli import main

LINE = "sum {table} --clip 1 --batch 5 --out {out} --json"
TRAIN = "train --epochs 1 --batch-size 240 --mechanism identity"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "numbers.csv"
    file.write_text("a\n" + "\n".join(str(i / 40) for i in range(40)) + "\n")
    return file


def summed(table: Path, out: Path, *more: str) -> Path:
    assert main([*LINE.format(table=table, out=out).split(), *more]) == 0
    return out


def test_four_verdicts_have_four_exit_codes(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proved = summed(table, tmp_path / "proved")
    seeded = summed(table, tmp_path / "seeded", "--test-seed", "x")
    consistent = shutil.copytree(proved, tmp_path / "consistent")
    (consistent / "notes.txt").write_text("not known to the ledger")
    refuted = shutil.copytree(proved, tmp_path / "refuted")
    (refuted / "totals.csv").write_text("step,rows,a,standard_deviation\n")
    capsys.readouterr()
    for run, answer, status in (
        (proved, "PROVED", 0),
        (consistent, "CONSISTENT", 3),
        (seeded, "NOT PRIVATE", 4),
        (refuted, "REFUTED", 1),
    ):
        assert main(["verify", str(run)]) == status, run
        assert capsys.readouterr().out.startswith(f"{answer}: ")
        assert main(["verify", str(run), "--json"]) == status
        assert json.loads(capsys.readouterr().out)["answer"] == answer
    assert main(["verify", str(tmp_path / "nowhere")]) == 2


def test_secret_draws_stay_if_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    drawn = positions.finished(run, keep_keys=True)
    assert main(["seal", str(run), "--keep-positions"]) == 0
    assert "is removed" not in capsys.readouterr().out
    assert positions.shown(run, drawn)
    assert main(["verify", str(run)]) == 0
    assert "not to be published: the ledger lists who was drawn" in capsys.readouterr().out
    assert main(["seal", str(run)]) == 0
    assert "who was drawn in which step is removed" in capsys.readouterr().out
    assert positions.shown(run, drawn) == []
    assert main(["verify", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["exposed"] == []


def test_an_unfinished_run_can_be_sealed_for_good(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summed(table, tmp_path / "run", "--steps", "20")
    assert (run / "checkpoints" / "key.json").exists()
    capsys.readouterr()
    assert main(["seal", str(run)]) == 0
    said = capsys.readouterr().out
    assert "are destroyed" in said
    assert "checked before" in said
    assert not (run / "checkpoints" / "key.json").exists()
    assert main(["verify", str(run)]) == 0
    assert main(["sum", str(table), "--resume", str(run)]) == 2
    assert main(["seal", str(tmp_path / "nowhere")]) == 2


def test_a_signature_says_who(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public, digits = key_pair(tmp_path)
    other = key_pair(tmp_path, "other")[1]
    run = summed(table, tmp_path / "run")
    capsys.readouterr()
    assert main(["verify", str(run), "--public-key", str(public)]) == 1  # there is none yet
    assert main(["seal", str(run), "--sign", str(private)]) == 0
    for key in (str(public), digits):
        assert main(["verify", str(run), "--public-key", key]) == 0
    capsys.readouterr()
    assert main(["verify", str(run)]) == 3
    assert "--public-key" in capsys.readouterr().out  # in the words of the command line
    assert main(["verify", str(run), "--public-key", str(other)]) == 1
    assert main(["seal", str(run), "--sign", str(public)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_train_signs_and_keeps_keys_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public, _ = key_pair(tmp_path)
    signed, kept = tmp_path / "signed", tmp_path / "kept"
    assert main([*TRAIN.split(), "--out", str(signed), "--sign", str(private)]) == 0
    assert main(["verify", str(signed), "--public-key", str(public)]) == 0
    assert main([*TRAIN.split(), "--out", str(kept), "--keep-keys"]) == 0
    assert (kept / "checkpoints" / "key.json").stat().st_mode & 0o077 == 0
    assert main(["verify", str(kept)]) == 0
    capsys.readouterr()
    gone = ["--out", str(tmp_path / "x"), "--sign", str(tmp_path / "no.pem")]
    assert main([*TRAIN.split(), *gone]) == 2  # before the work
    assert not (tmp_path / "x").exists()
    both = ["--out", str(tmp_path / "x"), "--sign", str(private), "--keep-keys"]
    assert main([*TRAIN.split(), *both]) == 2


def test_the_table_of_a_seeded_run_says_not_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN.split(), "--out", str(tmp_path / "a"), "--test-seed", "x"]) == 0
    table = capsys.readouterr().out
    assert "NOT PRIVATE" in table
    assert "no guarantee" in table
    assert "exact" not in table
    assert "upper bound" not in table
    assert main([*TRAIN.split(), "--out", str(tmp_path / "b")]) == 0
    assert "NOT PRIVATE" not in capsys.readouterr().out


def test_a_page_that_is_drawn_again_stays_proved(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summed(table, tmp_path / "run")
    before = (run / "report.html").read_bytes()
    (run / "report.html").write_text("another page")
    assert main(["verify", str(run)]) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0  # from another folder: the same bytes
    assert (run / "report.html").read_bytes() == before
    assert main(["verify", str(run)]) == 0
    # A page in another style (another matplotlib) is told to the ledger; other files are not.
    monkeypatch.setattr("noshuffle.report.page_parts._STYLE", "body{color:red}")
    assert main(["report", "run"]) == 0
    assert main(["verify", str(run)]) == 0
    (run / "totals.csv").write_text("forged")
    assert main(["report", "run"]) == 0
    assert main(["verify", str(run)]) == 1
    capsys.readouterr()


def test_a_signed_page_is_left_alone(table: Path, tmp_path: Path) -> None:
    private, public, _ = key_pair(tmp_path)
    run = summed(table, tmp_path / "run")
    assert main(["seal", str(run), "--sign", str(private)]) == 0
    assert main(["report", str(run)]) == 2
    page = tmp_path / "elsewhere.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert page.read_bytes() == (run / "report.html").read_bytes()
    assert main(["verify", str(run), "--public-key", str(public)]) == 0


def test_folders_that_are_no_run_are_named_and_not_refuted(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    run = summed(table, runs / "first")
    assert main(["budget", str(tmp_path / "b"), "--epsilon", "1", "--delta", "1e-5"]) == 0
    (photos := tmp_path / "photos").mkdir()
    (photos / "one.png").write_bytes(b"")
    capsys.readouterr()
    for folder, words in (
        (runs, f"holds runs: name one of {run}"),
        (run / "checkpoints", f"part of one: name {run}"),
        (tmp_path / "b", "it is a budget"),
        (photos, "is not a run folder"),
    ):
        for command in ("verify", "report"):
            assert main([command, str(folder)]) == 2, (command, folder)
            heard = capsys.readouterr()
            assert "is not a run folder" in heard.err
            assert words in heard.err
            assert "REFUTED" not in heard.out


def test_a_run_whose_plan_was_taken_away_is_refuted(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summed(table, tmp_path / "run")
    (run / "plan.json").unlink()
    assert main(["verify", str(run)]) == 1
    assert "plan.json cannot be read" in capsys.readouterr().out
