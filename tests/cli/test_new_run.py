"""The beginning of a run: one process in a folder, and nothing in the way of the next try."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from noshuffle.budget import Tuned
from noshuffle.cli import main, tune
from noshuffle.cli.job_view import JobWords, run_and_tell
from noshuffle.cli.run_home import begun, check_new_folder, dated
from noshuffle.cli.settings import RunOptions
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.release import files
from noshuffle.release.folder import RunFolder
from noshuffle.release.keys import KeyRing
from noshuffle.release.private_sum import PrivateSum


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs another process")
def test_two_that_begin_in_one_folder_do_not_mix(tmp_path: Path, held_elsewhere: Any) -> None:
    """Before, the second wrote its keys, plan and settings over those of the first."""
    with held_elsewhere(tmp_path):
        plan = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=1.0)
        with pytest.raises(ReplayRefused, match="a run goes on"):
            PrivateSum(plan, clip=1.0, shape=(1,), run=tmp_path)
        with (
            pytest.raises(ReplayRefused, match="a run goes on"),
            begun(RunFolder(tmp_path), {}, draws_on_budget=False),
        ):
            pass
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]


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


def test_keys_of_a_run_that_was_stopped_before_its_plan_are_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed: --out found the folder not empty, and --resume found no run."""
    folder = RunFolder(tmp_path / "r")
    plan = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("noshuffle.release.folder.write_bytes", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), begun(folder, {"a": 1}, draws_on_budget=False):
            folder.begin(plan, KeyRing.new())
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


def test_what_cannot_be_kept_is_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(tune, "_search", search)
    (tmp_path / "file").write_text("")
    line = ["tune", "--learning-rates", "0.1", "--out"]
    assert main([*line, str(tmp_path / "file" / "x")]) == 2
    search.assert_not_called()
    assert main([*line, str(tmp_path / "x")]) == 130
    assert not (tmp_path / "x").exists()


class Disk:
    """Files below some folders are written as on a full disk, for so many attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *full: Path, names: str = "model") -> None:
        self.full, self.names, self.tried = full, names, 0
        self.room, self.write = 10**9, files.write_bytes
        monkeypatch.setattr(files, "write_bytes", self.write_bytes)

    def write_bytes(self, path: Path, data: bytes, **more: int) -> None:
        is_full = any(folder in path.parents for folder in self.full)
        if is_full and self.names in path.name and self.tried < self.room:
            self.tried += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.write(path, data, **more)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """A search that was paid for; the other folders are below tmp_path, too."""
    plan = Plan.fit(SinglePass(2), mechanism="tree", epsilon=1.0, delta=1e-5)
    found = Tuned(TrainSettings(epsilon=1.0), {"weight": torch.arange(3.0)}, 0.5, plan.statement())
    search = Mock(return_value=found)
    monkeypatch.setattr(tune, "_search", search)
    places = [tmp_path / name for name in ("here", "home", "tmp")]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(tune, "_elsewhere", lambda: places)
    return search


def is_whole(folder: Path) -> bool:
    names = ["config.json", "model.safetensors", "statement.json"]
    assert sorted(file.name for file in folder.iterdir()) == names
    return load_file(folder / names[1])["weight"].tolist() == [0.0, 1.0, 2.0]


LINE = ["tune", "--learning-rates", "0.1", "--out"]


@pytest.mark.parametrize("names", ["model", "config", "statement"])
def test_a_full_disk_does_not_lose_the_model_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, searched: Mock, names: str
) -> None:
    out = tmp_path / "best"
    Disk(monkeypatch, out, tmp_path / "here", names=names)
    assert main([*LINE, str(out), "--json"]) == 0
    told = capsys.readouterr()
    (folder,) = (tmp_path / "home").iterdir()
    assert json.loads(told.out)["run"] == str(folder)
    assert is_whole(folder)
    assert told.err.count("\n") == 1
    assert f"No space left on device; the model, which is paid for, is in {folder}" in told.err
    assert not out.exists()  # nothing half-written
    assert not list((tmp_path / "here").iterdir())
    assert searched.call_count == 1


def test_where_no_disk_has_room_the_model_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, searched: Mock
) -> None:
    disk, out = Disk(monkeypatch, tmp_path), tmp_path / "best"
    waits = Mock(side_effect=lambda _: setattr(disk, "room", disk.room - 1))
    monkeypatch.setattr(tune.time, "sleep", waits)
    disk.room = 9  # out and three others, twice
    assert main([*LINE, str(out)]) == 0
    assert is_whole(out)
    assert waits.call_count == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "is kept in memory and tried again every 10 s" in told


def test_a_model_that_a_real_limit_refuses(tmp_path: Path, searched: Mock) -> None:
    """Files of a limited size (EFBIG): what was written of the model is not left behind."""
    searched.return_value = replace(searched.return_value, result={"w": torch.zeros(10**5)})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            tune._write(searched.return_value, tmp_path / "best")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "best").exists()


def test_what_a_search_keeps_is_not_resumed(tmp_path: Path, capsys: Any) -> None:
    """The refusal named a command that there is not: noshuffle tune --resume."""
    (tmp_path / "config.json").write_text(json.dumps({"kind": "tune", "lr": 1.0}))
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "made by noshuffle tune, which is not resumed" in capsys.readouterr().err
