"""`noshuffle train --task`: float targets, a loss of one's own, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from noshuffle.cli import main
from noshuffle.cli.train_task import task_of
from noshuffle.datasets import load
from noshuffle.errors import InvalidInput

MODULE = """
import numpy as np
import torch
from noshuffle.datasets import DataSet
from noshuffle.federated.tasks import FederatedTask

def houses():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(420, 3, generator=g)
    y = 2 * x[:, 0] - x[:, 1] + 0.05 * torch.randn(420, generator=g)
    return DataSet("houses", "table", x[:400], y[:400], x[400:], y[400:], 1)

def households():
    g, users = torch.Generator().manual_seed(0), 60
    x = torch.rand(4 * users, 3, generator=g)
    y = (2 * x[:, 0] - x[:, 1])[:, None]
    starts = np.arange(0, 4 * users + 1, 4)
    return FederatedTask("households", "image", tuple(range(users)), starts, x, y, x, y, 1)

def absolute(out, y):
    return (out[:, 0] - y).abs().mean()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "own_houses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_houses", None)


def train(tmp_path, *words):
    options = ["--epochs", "4", "--batch-size", "40", "--lr", "0.5", "--noise-multiplier", "0.3"]
    command = ["train", "--data", "own_houses:houses", *options, "--mechanism", "tree"]
    return main([*command, "--out", str(tmp_path / "run"), "--json", *words])


@pytest.mark.parametrize(
    "task", ["auto", pytest.param("own_houses:absolute", marks=pytest.mark.slow)]
)
def test_numbers_are_learned(tmp_path, task, capsys):
    assert train(tmp_path, "--task", task, "--test-seed", "1", "--baseline") == 0
    record = json.loads(capsys.readouterr().out)
    spread = load("own_houses:houses").y_test
    dull = float(spread.var() if task == "auto" else spread.abs().mean())
    assert 0 < record["test_error"] < 0.5 * dull
    assert 0 < record["baseline_error"] < 0.5 * dull
    assert "test_accuracy" not in record
    page = (tmp_path / "run" / "report.html").read_text()
    assert "error on held-out data" in page
    assert "accuracy" not in page.lower()
    assert main(["train", "--resume", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_error"] == record["test_error"]


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    for task, words in (
        ("classification", "use --task regression"),
        ("own_houses:none", "could not be imported"),
        ("cubism", "task must be auto"),
    ):
        assert train(tmp_path, "--task", task) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    made = load("own_houses:houses")
    bad = replace(made, y_train=made.y_train * torch.inf)
    with pytest.raises(InvalidInput, match="must be finite"):
        task_of("regression", bad)
    wide = replace(made, y_train=made.x_train, y_test=made.x_test)
    assert task_of("auto", wide)[1].classes == 3  # three numbers a row


def test_users_with_numbers_on_the_command_line(tmp_path, capsys):
    command = "federated --task own_houses:households --model linear --rounds 20 --server-lr 1"
    command += " --server-optimizer sgd --clients-per-round 20 --noise-multiplier 0.05"
    command += " --mechanism tree --test-seed 1 --json"
    assert main([*command.split(), "--out", str(tmp_path / "run")]) == 0
    record = json.loads(capsys.readouterr().out)
    x = torch.rand(10_000, 2)
    assert 0 < record["test_error"] < 0.5 * float((2 * x[:, 0] - x[:, 1]).square().mean())
    assert "test_accuracy" not in record
