"""The main job as a person runs it: train, look, verify, resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle.cli import main, train_parts
from noshuffle.cli.job import run_job
from noshuffle.cli.job_view import Stopped
from noshuffle.cli.train_parts import accuracy_of, make_model, participation_of
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.datasets import DataSet
from noshuffle.errors import InvalidInput
from noshuffle.participation import Epochs, FixedSize, MinSeparation, Poisson
from noshuffle.release.folder import RunFolder, load
from noshuffle.release.log import Log

QUICK = "train --epochs 2 --batch-size 128 --mechanism blt --no-baseline"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    assert main(f"{QUICK} --test-seed here --out {path} --json".split()) == 0
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after three steps."""
    path, seen = tmp_path_factory.mktemp("runs") / "stopped", list[int]()
    asked = {"epochs": 2, "batch_size": 128, "mechanism": "blt", "test_seed": "here"}
    with pytest.raises(Stopped):
        run_job(
            TrainSettings.of(asked),
            path,
            watch=lambda told: seen.append(told.step),
            is_stopped=lambda: len(seen) == 3,
        )
    return path


def test_the_folder_holds_the_evidence(run: Path) -> None:
    for name in ("plan.json", "statement.json", "log.jsonl", "metrics.jsonl", "config.json"):
        assert (run / name).stat().st_size > 0
    statement = json.loads((run / "statement.json").read_text())
    assert statement["epsilon"] <= 8
    assert any("NOT PRIVATE" in sentence for sentence in statement["assumptions"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "test_accuracy" in row][:2] == [11, 22]
    assert not any("loss" in row for row in rows)  # losses of training data are not released
    assert not list(run.rglob("secret*"))  # a finished run has ended


@pytest.mark.usefixtures("pictures")
def test_the_report_is_one_self_contained_page(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 3  # without those of ε: it has a test seed
    assert "NOT PRIVATE" in page
    assert not re.findall(r"(?:src|href)=[\"']https?:", page)
    assert "<script" not in page
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == page


def test_verify_passes_and_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 4
    assert "NOT PRIVATE: 22 of 22 planned steps" in capsys.readouterr().out
    statement = run / "statement.json"
    honest = statement.read_text()
    record = json.loads(honest)
    record["epsilon"] /= 2
    statement.write_text(json.dumps(record))
    assert main(["verify", str(run)]) == 1
    assert "epsilon" in capsys.readouterr().out
    statement.write_text(honest)
    assert main(["verify", str(run), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["answer"] == "NOT PRIVATE"


def test_a_finished_run_resumes_to_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["steps"] == 22
    assert again["statement"]["epsilon"] <= 8
    assert 0 < again["test_accuracy"] <= 1
    assert main(["verify", str(run)]) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs another process")
def test_a_second_process_beside_a_live_one_gets_one_clear_line(
    stopped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    held_elsewhere: Any,
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.setattr("noshuffle.release.log._WAIT", 0.1)
    again = ["train", "--resume", str(run), "--json"]
    with held_elsewhere(partial(Log, run / "log.jsonl")):
        assert main(again) == 2
        assert f"another process writes {run / 'log.jsonl'}" in capsys.readouterr().err
    assert main(again) == 0  # nothing is left to clear away


def test_settings_from_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[train]\nepochs = 1\nbatch_size = 256\nmechanism = 'tree'\nepsilon = 3.0\n")
    line = f"train --config {config} --no-baseline --optimizer adam --lr 0.01 --json"
    assert main([*line.split(), "--out", str(tmp_path / "r")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["statement"]["epsilon"] <= 3.0
    assert told["settings"]["optimizer"] == "adam"
    assert "tree" in told["statement"]["mechanism"]


@pytest.mark.parametrize(
    "sampling",
    [
        *("poisson", "fixed", "truncated"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cyclic", "bins")),
    ],
)
def test_dp_sgd_is_the_same_command(
    sampling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"train --sampling {sampling} --mechanism identity --epochs 1 --batch-size 128 "
    line += f"--optimizer sgd --no-baseline --out {tmp_path / 'r'} --json"
    assert main(line.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["statement"]["epsilon"] <= 8
    assert main(["verify", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.startswith("VERIFIED")


@pytest.mark.parametrize(
    "line",
    [
        "train --data wishes",
        "train --model oak",
        "train --epochs 0",
        "train --batch-size 100000",
        "train --lr -1",
        "train --clip-norm nan",
        "train --optimizer magic",
        "train --epsilon 0",
        "train --epsilon 1 --noise-multiplier 1",
        "train --sampling poisson --mechanism tree",
        "train --config missing.toml",
        "train --resume nowhere",
        "train --resume nowhere --epochs 3",
        "train --unit user",
        "train --device tpu",
        "train --device cuda:99",
        "train --model char_lstm",
        "train --model tanh_cnn",
        "train --config table.toml",
        "train --config bytes.toml",
        "train --out table.toml",
        "train --out table.toml/below",
        "plan --steps 16 --plot nowhere/x.png",
        "reproduce gravity",
        "verify nowhere",
        "report nowhere",
    ],
)
def test_bad_input_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text("train = 3\n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    status = main(line.split())
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.err.count("\n") == 1, captured.err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"[]", "damaged"),
        ("config.json", b"{", "damaged"),
        ("config.json", b'{"kind": "federated"}', "noshuffle federated --resume"),
        ("config.json", b'{"kind": "fit"}', "noshuffle fit"),
        ("log.jsonl", b"nonsense\n", "log.jsonl"),
        ("plan.json", b"\xff\xfe", "not text"),
        ("plan.json", b"{", "document"),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(
    stopped: Path,
    name: str,
    content: bytes,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stopped, copy)
    (copy / name).write_bytes(content)
    assert main(["train", "--resume", str(copy)]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert said in captured


@pytest.mark.parametrize("is_started", [False, True])
def test_ctrl_c_is_one_line_and_says_how_to_go_on(
    is_started: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(settings: object, path: Path, **_: object) -> None:
        if is_started:
            path.mkdir()
            (path / "plan.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("noshuffle.cli.job.run_job", stop)
    assert main(["train", "--out", str(tmp_path / "r")]) == 130
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert ("--resume" in captured) is is_started


def test_stopped_by_a_signal_and_resumed_is_bit_identical(tmp_path: Path) -> None:
    """A real process; SIGTERM behind some step, then --resume, beside a run that was left alone."""
    paths = tmp_path / "stopped", tmp_path / "whole"
    line = [sys.executable, "-m", "noshuffle", *QUICK.split(), "--epochs", "9", "--test-seed", "s"]
    child = subprocess.Popen(
        [*line, "--out", str(paths[0])], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    told, end = paths[0] / "metrics.jsonl", time.monotonic() + 900
    try:
        while not told.exists() or told.read_bytes().count(b"\n") < 2:
            assert child.poll() is None, "the run ended before it could be stopped"
            assert time.monotonic() < end
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=900)[1].decode()
    finally:
        child.kill()
    assert child.returncode == 143
    assert f"noshuffle train --resume {paths[0]}" in said
    assert main(["verify", str(paths[0])]) == 4
    assert main(["train", "--resume", str(paths[0]), "--json"]) == 0
    assert main([*line[3:], "--out", str(paths[1]), "--json"]) == 0
    models = [load(RunFolder(path).saved()[-1])["model"] for path in paths]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    assert [main(["verify", str(path)]) for path in paths] == [4, 4]  # the seed, nothing else


def test_an_out_folder_is_never_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK.split(), "--out", str(run)]) == 2
    assert "--resume" in capsys.readouterr().err


def small(units: list[int] | None = None) -> DataSet:
    x, y = torch.zeros(12, 3), torch.zeros(12, dtype=torch.int64)
    ids = None if units is None else torch.tensor(units)
    return DataSet("small", "table", x, y, x, y, 2, units=ids)


def test_participation_follows_the_settings() -> None:
    base = {"data": "digits", "epochs": 2, "batch_size": 4, "mechanism": "identity"}
    assert participation_of(TrainSettings.of(base), small()) == Epochs(2, 3)
    poisson = TrainSettings.of({**base, "sampling": "poisson"})
    assert participation_of(poisson, small()) == Poisson(6, 1 / 3)
    fixed = TrainSettings.of({**base, "sampling": "fixed"})
    assert participation_of(fixed, small()) == FixedSize(6, 4, 12)
    user = TrainSettings.of({**base, "unit": "user"})
    # user 0 is in steps 0 and 2 of an epoch of 3: once around the end of an epoch is one step
    found = participation_of(user, small([0, 1, 1, 1, 2, 2, 2, 2, 0, 3, 3, 3]))
    assert found == MinSeparation(6, 1, 4)
    with pytest.raises(InvalidInput):
        participation_of(user, small())


def test_accuracy_counts_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = small()
    model = make_model(TrainSettings.of({"model": "linear"}), data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[1].bias[0] = 1.0  # type: ignore[index, union-attr]
    monkeypatch.setattr(train_parts, "CHUNK", 5)
    assert accuracy_of(model, data.x_test, data.y_test) == 1.0
