"""The beginning of a run: one process in a folder, and nothing in the way of the next try."""

from __future__ import annotations

import json
import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from noshuffle.cli import main
from noshuffle.cli.job_view import JobWords, run_and_tell
from noshuffle.cli.run_home import begun, check_new_folder, dated
from noshuffle.cli.settings import RunOptions
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.errors import InvalidInput
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.release.folder import RunFolder
from noshuffle.release.private_sum import PrivateSum


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs another process")
def test_two_that_begin_in_one_folder_do_not_mix(tmp_path: Path, held_elsewhere: Any) -> None:
    """Before, the second wrote its keys, plan and settings over those of the first."""
    first = partial(begun, RunFolder(tmp_path), {"a": 1}, draws_on_budget=False)
    with (
        held_elsewhere(first),
        pytest.raises(InvalidInput, match="begun meanwhile"),
        begun(RunFolder(tmp_path), {"a": 1}, draws_on_budget=False),
    ):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_settings_of_a_run_that_was_refused_are_taken_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(KeyError), begun(folder, {"a": (1,)}, draws_on_budget=False):
        raise KeyError(folder.config_file.read_text())
    assert not folder.config_file.exists()
    folder.write_config({"a": [1]})
    with begun(folder, {"a": (1,)}, draws_on_budget=False):  # killed before it began, and resumed
        pass
    with (
        pytest.raises(InvalidInput, match="holds another run"),
        begun(folder, {"a": (2,)}, draws_on_budget=False),
    ):
        pass
    assert json.loads(folder.config_file.read_text()) == {"a": [1]}


def test_the_secret_of_a_run_that_was_stopped_before_its_plan_are_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed: --out found the folder not empty, and --resume found no run."""
    folder = RunFolder(tmp_path / "r")
    plan = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("noshuffle.release.release.write_bytes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), begun(folder, {"a": 1}, draws_on_budget=False):
            PrivateSum(plan, clip=1.0, shape=(), run=folder)
    assert not folder.path.exists()
    folder.path.mkdir()
    (folder.path / "own.txt").touch()
    with pytest.raises(InvalidInput, match=r"is not empty; use another --out$"):
        check_new_folder(folder.path)
    folder.write_config({})
    with pytest.raises(InvalidInput, match=r"is not empty; go on with --resume .*, or use another"):
        check_new_folder(folder.path)


def test_a_folder_that_was_begun_during_the_imports(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    job = Mock()
    settings = TrainSettings.of({})
    with pytest.raises(InvalidInput, match="is not empty"):
        run_and_tell("train", job, settings, tmp_path, RunOptions(), JobWords())
    job.assert_not_called()


def test_a_sum_goes_on_with_the_same_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("a,b\n1,2\n")
    line = "sum t.csv --mechanism tree --steps 3 --out r --clip 1"
    assert main(line.split()) == 0
    Path("t.csv").write_text("b,a\n1,2\n3,4\n")
    capsys.readouterr()
    assert main(["sum", "t.csv", "--resume", "r"]) == 2
    assert "has the columns b, a, the run sums a, b" in capsys.readouterr().err


def test_two_runs_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr("noshuffle.cli.run_home.datetime", Mock(now=lambda: now))
    for name in ("x-20260102-030405", "x-20260102-030405-2", "x-20260102-030405-3"):
        assert dated("x") == Path("runs", name)
        Path("runs", name).mkdir(parents=True)


def test_what_a_fit_keeps_is_not_resumed(tmp_path: Path, capsys: Any) -> None:
    """The refusal named a command that there is not: noshuffle fit --resume."""
    (tmp_path / "config.json").write_text(json.dumps({"kind": "fit"}))
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "made by noshuffle fit, which is not resumed" in capsys.readouterr().err
