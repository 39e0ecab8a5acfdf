"""`noshuffle budget`, and --budget of the commands that release something."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from noshuffle import Budget
from noshuffle.accounting import gaussian
from noshuffle.cli import main

DELTA = "1e-5"
UNITS = {"federated": "user"}


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "people")
    assert main(["budget", path, "--epsilon", "2", "--delta", DELTA, "--json"]) == 0
    assert said(capsys)["left_epsilon"] == pytest.approx(2.0, rel=1e-6)
    return path


@pytest.fixture
def table(tmp_path: Path) -> str:
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "".join(f"{i / 40},{i % 2}\n" for i in range(40)))
    return str(file)


@pytest.mark.parametrize("command", ["sum", "train"])
def test_a_run_that_was_killed_before_its_log_named_the_budget_goes_on_with_one(
    command: str, folder: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {
        "sum": ["sum", table, "--clip", "1", "--columns", "a"],
        "train": ["train", "--epochs", "1", "--batch-size", "500", "--model", "linear"],
    }
    more = ["--epsilon", "1", "--delta", DELTA, "--mechanism", "tree", "--json"]
    assert main([*lines[command], *more, "--budget", folder, "--out", str(tmp_path / "a")]) == 0
    cut = tmp_path / "b"
    cut.mkdir()
    shutil.copy(tmp_path / "a/config.json", cut)  # what there is before there is a plan
    again = [command, *lines[command][1:2][: command == "sum"], "--resume", str(cut), "--json"]
    capsys.readouterr()
    assert main(again) == 2
    assert "was begun with a budget; give --budget FOLDER again" in capsys.readouterr().err
    assert main([*again, "--budget", folder]) == 0
    assert "This is run 2 of 2 on this data" in str(said(capsys))


@pytest.mark.parametrize("command", ["sum", "train", "federated"])
def test_a_command_that_its_budget_refused_starts_with_a_larger_one(
    command: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out` said "is not empty; go on with --resume", which the budget refused again."""
    lines = {
        "sum": ["sum", table, "--clip", "1", "--columns", "a"],
        "train": ["train", "--epochs", "1", "--batch-size", "500", "--model", "linear"],
        "federated": ["federated", "--rounds", "2", "--clients-per-round", "5"],
    }
    for name, epsilon in [("small", 0.5), ("large", 4.0)]:
        Budget(tmp_path / name, epsilon=epsilon, delta=1e-5, unit=UNITS.get(command))
    out = tmp_path / "new" / "run"
    line = [*lines[command], "--epsilon", "1", "--delta", DELTA, "--mechanism", "tree", "--json"]
    line += ["--out", str(out), "--budget"]
    assert main([*line, str(tmp_path / "small")]) == 2
    assert "and the limit is 0.5" in capsys.readouterr().err
    assert not out.parent.exists()
    assert main([*line, str(tmp_path / "large")]) == 0
    assert len(Budget(tmp_path / "large").entries()) == 1


def test_commands_draw_on_a_budget(
    folder: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--delta", DELTA, "--epsilon", "1", "--budget", folder, "--mechanism", "tree"]
    total = ["sum", table, "--clip", "1", "--columns", "a", "--json"]
    assert main([*total, *common, "--out", str(tmp_path / "s")]) == 0
    assert "This is run 1 of 1 on this data" in str(said(capsys)["statement"])
    fit = ["fit", table, "--target", "y", "--bounds", "0,1", "--classes", "0,1", "--json"]
    assert main([*fit, *common, "--out", str(tmp_path / "f")]) == 0
    assert "This is run 2 of 2 on this data" in str(said(capsys)["statement"])
    assert main(["verify", str(tmp_path / "f")]) == 0
    assert main(["verify", str(tmp_path / "s")]) == 0
    capsys.readouterr()
    picture = tmp_path / "b.png"
    assert main(["budget", folder, "--json", "--output", str(picture)]) == 0
    record = said(capsys)
    mu = gaussian.mu(epsilon=1.0, delta=1e-5)
    wanted = gaussian.epsilon(mu=mu * 2**0.5, delta=1e-5)
    assert record["spent_epsilon"] == pytest.approx(wanted, rel=1e-6)
    assert [run["what"] for run in record["runs"]] == ["run s", "run f"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main([*fit, *common, "--out", str(tmp_path / "g"), "--epsilon", "1.9"]) == 2
    assert "the limit is 2" in capsys.readouterr().err
    assert main(["budget", folder]) == 0
    out = capsys.readouterr().out
    assert "2 runs on this data" in out
    assert (tmp_path / "people" / "budget.svg").read_text().startswith("<svg")


def test_refusals(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in [
        (["budget", str(tmp_path / "none")], "holds no budget; give --epsilon and --delta"),
        (["train", "--budget", str(tmp_path / "none")], "begin one first: noshuffle budget "),
        (["budget", folder, "--epsilon", "3"], "fixed before the first run"),
        (["budget", folder, "--output", "b.txt"], "must end with"),
        (["train", "--budget", folder, "--baseline"], "--unprotected baseline"),
    ]:
        assert main(line) == 2, line
        assert words in capsys.readouterr().err
    assert main(["budget", folder, "--unprotected", "baseline", "--json"]) == 0
    assert Budget(folder).declared() == ["baseline"]
