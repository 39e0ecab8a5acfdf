"""`noshuffle verify`, `seal` and `report`: three verdicts, each with an exit code; signatures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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


def key_pair(folder: Path, name: str = "key") -> tuple[Path, Path, str]:
    """A private key, its public half, and that in hex."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = form.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, form.PublicFormat.SubjectPublicKeyInfo))
    raw = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
    return private, public, raw.hex()


def test_each_verdict_has_an_exit_code(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = summed(table, tmp_path / "verified")
    seeded = summed(table, tmp_path / "seeded", "--test-seed", "x")
    refuted = shutil.copytree(verified, tmp_path / "refuted")
    log = refuted / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"step":3', b'"step":4', 1))
    capsys.readouterr()
    for run, answer, status in (
        (verified, "VERIFIED", 0),
        (seeded, "NOT PRIVATE", 4),
        (refuted, "REFUTED", 1),
    ):
        assert main(["verify", str(run)]) == status, run
        assert capsys.readouterr().out.startswith(f"{answer}: ")
        assert main(["verify", str(run), "--json"]) == status
        told = json.loads(capsys.readouterr().out)
        assert (told["answer"], told["participation_checked"]) == (answer, True)
    assert main(["verify", str(tmp_path / "nowhere")]) == 2


def test_an_old_copy_is_verified_with_its_own_steps(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summed(table, tmp_path / "run", "--steps", "9")
    copy = shutil.copytree(run, tmp_path / "copy")
    table.write_text(table.read_text() + "1\n")
    assert main(["sum", str(table), "--resume", str(run), "--json"]) == 0
    capsys.readouterr()
    for folder, steps in ((run, 9), (copy, 8)):
        assert main(["verify", str(folder)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"VERIFIED: {steps} of 9 planned steps")
        assert "not checked: that these are all steps: an older copy" in said


def test_an_unfinished_run_can_be_ended_for_good(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = summed(table, tmp_path / "run", "--steps", "20")
    assert list(run.rglob("secret.*"))
    capsys.readouterr()
    assert main(["seal", str(run)]) == 0
    assert "its secret is removed" in capsys.readouterr().out
    assert not list(run.rglob("secret.*"))
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()
    assert main(["sum", str(table), "--resume", str(run)]) == 2
    assert "begin a new run that adds up with it (--fork)" in capsys.readouterr().err
    assert main(["seal", str(tmp_path / "nowhere")]) == 2


def test_a_fork_adds_up_with_the_run_that_it_ends(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = summed(table, tmp_path / "old", "--steps", "20")
    new = summed(table, tmp_path / "new", "--fork", str(old))
    told = {}
    capsys.readouterr()
    for run in (old, new):
        assert main(["verify", str(run), "--json"]) == 0
        told[run] = json.loads(capsys.readouterr().out)["epsilon"]
    assert told[new] > 1.3 * told[old] > 1.1
    assert not list(old.rglob("secret.*"))
    both = ["sum", str(table), "--resume", str(new), "--fork", str(old)]
    assert main(both) == 2
    assert "give one" in capsys.readouterr().err
    line = LINE.format(table=table, out=tmp_path / "x")
    assert main([*line.split(), "--fork", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "x").exists()


OWN = """
from dataclasses import dataclass

from noshuffle.strategies import register
from noshuffle.strategies.toeplitz import SqrtToeplitz


@register
@dataclass(frozen=True)
class Roots(SqrtToeplitz):
    name = "evidence_test_roots"
"""


def test_a_mechanism_that_is_not_known_refutes_nothing(table: Path, tmp_path: Path) -> None:
    """In a process of its own: this one knows the mechanism since it was registered."""
    (tmp_path / "own_evidence.py").write_text(OWN)

    def called(*line: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "noshuffle", *line]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    named = ("--mechanism", "own_evidence:evidence_test_roots")
    assert called(*LINE.format(table=table, out="run").split(), *named).returncode == 0
    said = called("verify", "run")
    assert (said.returncode, said.stdout) == (2, "")
    assert "the mechanism 'evidence_test_roots' is not known here" in said.stderr
    assert "--import MODULE" in said.stderr
    said = called("verify", "run", "--import", "json", "--import", "own_evidence")
    assert (said.returncode, said.stderr) == (0, "")
    said = called("verify", "run", "--import", "no_such_module")
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1


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
    assert main(["verify", str(run)]) == 0
    assert "--public-key" in capsys.readouterr().out  # in the words of the command line
    assert main(["verify", str(run), "--public-key", str(other)]) == 1
    assert main(["seal", str(run), "--sign", str(public)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_train_signs_when_asked(tmp_path: Path) -> None:
    private, public, _ = key_pair(tmp_path)
    signed = tmp_path / "signed"
    assert main([*TRAIN.split(), "--out", str(signed), "--sign", str(private)]) == 0
    assert main(["verify", str(signed), "--public-key", str(public)]) == 0
    gone = ["--out", str(tmp_path / "x"), "--sign", str(tmp_path / "no.pem")]
    assert main([*TRAIN.split(), *gone]) == 2  # before the work
    assert not (tmp_path / "x").exists()


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


def test_a_page_can_be_drawn_again(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = summed(table, tmp_path / "run")
    before = (run / "report.html").read_bytes()
    (run / "report.html").write_text("another page")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "run"]) == 0  # from another folder: the same bytes
    assert (run / "report.html").read_bytes() == before


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
    (photos := tmp_path / "photos").mkdir()
    (photos / "one.png").write_bytes(b"")
    (run / "plan.json").rename(tmp_path / "plan.json")
    capsys.readouterr()
    for folder in (photos, run, run / "checkpoints"):
        for command in ("verify", "report", "seal"):
            assert main([command, str(folder)]) == 2, (command, folder)
            heard = capsys.readouterr()
            assert "is not a run folder" in heard.err
            assert "REFUTED" not in heard.out
    (tmp_path / "plan.json").rename(run / "plan.json")
    assert main(["verify", str(runs)]) == 2
    assert f"holds runs: name one of {run}" in capsys.readouterr().err
