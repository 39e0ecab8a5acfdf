"""Evidence that cannot be read: nothing is said of the guarantee, and nothing is refuted."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noshuffle.cli import main
from noshuffle.errors import InvalidInput
from noshuffle.release import verify
from noshuffle.release.folder import RunFolder, load


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has a step left, a secret and a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    table = folder / "numbers.csv"
    table.write_text("a\n" + "\n".join(str(i / 40) for i in range(40)) + "\n")
    out = folder / "run"
    line = ["sum", str(table), "--clip", "1", "--batch", "5", "--steps", "9", "--out", str(out)]
    assert main([*line, "--json"]) == 0
    assert RunFolder(out).saved()
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
    monkeypatch.setattr(Path, "read_bytes", refusing(Path.read_bytes))
    monkeypatch.setattr(Path, "read_text", refusing(Path.read_text))
    monkeypatch.setattr("torch.load", refusing(__import__("torch").load))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", ["plan.json", "statement.json", "log.jsonl", "state.pt"])
def test_what_a_verdict_needs(
    kept: Path,
    name: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unreadable(name, monkeypatch, number)
    assert main(["verify", str(kept)]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith(f"noshuffle: {kept}")
    assert told.err.endswith(f"{name}: {os.strerror(number)}\n")


def test_the_secret_of_a_run_is_not_needed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("secret.json", "secret.pt"):
        unreadable(name, monkeypatch, errno.EACCES)
    assert verify.verify(kept).is_verified


def test_a_log_that_is_none_is_refuted_still(kept: Path, tmp_path: Path) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    (run / "log.jsonl").write_bytes(b"no log\n" * 100)
    assert main(["verify", str(run)]) == 1
    (run / "log.jsonl").unlink()
    assert main(["verify", str(run)]) == 1


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
        load(RunFolder(kept).saved()[-1])
    assert "damaged" not in str(caught.value)


def test_a_score_that_is_no_number_stops_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "norm": float("nan"), "more": [float("inf"), 2.0]})
    assert list(folder.metrics()) == [{"step": 1, "norm": None, "more": [None, 2.0]}]
    assert "NaN" not in folder.metrics_file.read_text()
    assert json.loads(folder.metrics_file.read_text())["step"] == 1
