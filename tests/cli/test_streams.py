"""Standard streams that are closed or of old encodings, and JSON that is one document always."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from noshuffle.cli import main, start
from noshuffle.cli.promise import print_json
from noshuffle.release.files import write_bytes

EPSILON = ["epsilon", "--steps", "8", "--mechanism", "tree", "--noise-multiplier", "2"]


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def written(out: io.TextIOWrapper) -> bytes:
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_output_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    start.steady_streams()
    assert main(EPSILON) == 0
    assert ("ε" if encoding == "utf-8" else r"\u03b5").encode() in written(out)
    out = stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    start.steady_streams()
    print_json({"ε": "é 🙂 \udcff"})
    assert json.loads(written(out)) == {"ε": "é 🙂 \udcff"}


def test_names_that_are_no_text_come_out_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    out = stream("utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    start.steady_streams()
    print("run \udcff")
    assert written(out) == b"run \xff\n"


def test_closed_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    start.steady_streams()
    opened = [sys.stdin, sys.stdout, sys.stderr]
    assert main(EPSILON) == 0
    assert main(["epsilon", "--steps", "-8"]) == 2
    assert main(["sum", "-", "--clip", "1", "--steps", "3", "--out", str(tmp_path / "s")]) == 2
    for own in opened:
        own.close()


@pytest.mark.parametrize(
    "line",
    [
        "epsilon --steps -1",
        "epsilon --no-such-option",
        "verify no-such-folder",
        "train --epochs many",
        "plan --steps 4 --mechanism tree --plot folder.png",  # refused when all is computed
    ],
)
def test_a_refusal_is_one_document_of_json_too(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    assert main([*line.split(), "--json"]) == 2
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["status"] == 2
    assert told.err == f"noshuffle: {found['error']}\n"
    assert main(line.split()) == 2
    assert "{" not in capsys.readouterr().out


def test_stopped_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("noshuffle.cli.application.application", stopped)
    assert main(["epsilon", "--json"]) == 130
    told = capsys.readouterr()
    assert json.loads(told.out) == {"error": "stopped", "status": 130}
    assert told.err == "noshuffle: stopped\n"


def test_a_name_that_is_no_text_is_told_without_what_stands_around_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UnicodeEncodeError("utf-8", "x" * 5000 + "\udcff" + "y" * 5000, 5000, 5001, "surrogate")
    monkeypatch.setattr("typer.main.get_command", Mock(side_effect=error))
    assert main(["epsilon"]) == 2
    said = capsys.readouterr().err
    assert r"\udcff" in said
    assert len(said) < 150


def test_brackets_in_names_are_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column called "price [/kg]" ended the command with a traceback, after all the work."""
    monkeypatch.setenv("COLUMNS", "200")
    table, books = tmp_path / "t.csv", tmp_path / "[b]"
    table.write_text("price [/kg]\n1\n2\n3\n")
    assert main(["budget", str(books), "--epsilon", "2", "--delta", "1e-6"]) == 0
    assert "[b]" in capsys.readouterr().out.partition("picture:")[0]
    line = ["sum", str(table), "--clip", "1", "--batch", "1", "--out", str(tmp_path / "[r]")]
    assert main([*line, "--budget", str(books)]) == 0
    assert "price [/kg]" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "page.html" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match=r"page\.html'$"):
        write_bytes(tmp_path / "page.html", b"text")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
