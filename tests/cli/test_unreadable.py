"""Evidence that cannot be read: nothing is said of the guarantee, and nothing is refuted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noshuffle.cli import main
from noshuffle.errors import InvalidInput
from noshuffle.release import checkpoint, verify
from noshuffle.release.files import file_digest


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that still has its keys and a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    table = folder / "numbers.csv"
    table.write_text("a\n" + "\n".join(str(i / 40) for i in range(40)) + "\n")
    out = folder / "run"
    line = ["sum", str(table), "--clip", "1", "--batch", "5", "--steps", "9", "--out", str(out)]
    assert main([*line, "--json"]) == 0  # one of the planned steps is left: it is not sealed
    assert checkpoint.saved(out / "checkpoints")
    return out


def unreadable(name: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No file of this name can be read; root may read what others may not."""

    def refusing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *given: Any, **more: Any) -> Any:
            if os.path.basename(os.fspath(path)) == name:
                raise OSError(number, os.strerror(number), os.fspath(path))
            return usual(path, *given, **more)

        return call

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(shutil, "copyfile", refusing(shutil.copyfile))
    monkeypatch.setattr("torch.load", refusing(__import__("torch").load))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["plan.json", "statement.json", "ancestors.json"])
def test_what_a_verdict_needs(
    kept: Path,
    tmp_path: Path,
    name: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    (run / "ancestors.json").write_text("[]")
    unreadable(name, monkeypatch, number)
    assert main(["verify", str(run)]) == 2
    told = capsys.readouterr()
    assert "REFUTED" not in told.out
    assert told.err == f"noshuffle: {run / name}: {os.strerror(number)}\n"


@pytest.mark.parametrize("name", ["SQLITE_CANTOPEN", "SQLITE_IOERR_READ", "SQLITE_BUSY"])
@pytest.mark.parametrize("where", ["_open", "broken_link"])
def test_the_ledger(
    kept: Path,
    name: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When it is opened, and while it is read."""

    def fails(*given: object) -> None:
        error = sqlite3.OperationalError("so it is")
        error.sqlite_errorname = name
        raise error

    monkeypatch.setattr(f"noshuffle.release.ledger_tables.{where}", fails)
    monkeypatch.setattr(shutil, "copyfile", lambda *given: None)
    assert main(["verify", str(kept)]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("noshuffle: the ledger (ledger.sqlite)")
    assert told.err.count("\n") == 1


def test_a_ledger_that_is_no_database_is_refuted_still(kept: Path, tmp_path: Path) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    (run / "ledger.sqlite").write_bytes(b"no database" * 100)
    assert main(["verify", str(run)]) == 1
    (run / "ledger.sqlite").unlink()
    assert main(["verify", str(run)]) == 1


@pytest.mark.parametrize("name", ["key.json", "state.pt", "model.safetensors", "config.json"])
def test_what_its_owner_alone_may_read_is_named_as_not_checked(
    kept: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and keys have mode 0600: somebody else verifies the rest."""
    usual = verify.verify(kept)
    assert usual.is_verified
    if name == "config.json":  # it is also read for what it says

        def digest(path: Path) -> str:
            if path.name == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return file_digest(path)

        monkeypatch.setattr("noshuffle.release.file_checks.file_digest", digest)
    else:
        unreadable(name, monkeypatch, errno.EACCES)
    verdict = verify.verify(kept)
    assert verdict.answer == "CONSISTENT"
    (line,) = set(verdict.unchecked) - set(usual.unchecked)
    assert "could not be read (Permission denied)" in line
    places = {"key.json": "what needs the keys", "config.json": "config.json"}
    assert line.startswith(places.get(name, "checkpoints/step-"))


def test_a_slip_in_the_name_of_a_public_key_refutes_nothing(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (str(tmp_path / "no.pem"), "g" * 64):
        assert main(["verify", str(kept), "--public-key", given]) == 2
        told = capsys.readouterr()
        assert not told.out
        assert "--public-key must be a PEM file or 64 hex digits" in told.err


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable("state.pt", monkeypatch, errno.EACCES)
    with pytest.raises(InvalidInput, match=r"could not be read \(Permission denied\)") as caught:
        checkpoint.load(checkpoint.saved(kept / "checkpoints")[-1])
    assert "damaged" not in str(caught.value)


def test_a_score_that_is_no_number_stops_nothing(tmp_path: Path) -> None:
    from noshuffle.release.folder import RunFolder

    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "norm": float("nan"), "more": [float("inf"), 2.0]})
    assert list(folder.metrics()) == [{"step": 1, "norm": None, "more": [None, 2.0]}]
    assert "NaN" not in folder.metrics_file.read_text()
    assert json.loads(folder.metrics_file.read_text())["step"] == 1
