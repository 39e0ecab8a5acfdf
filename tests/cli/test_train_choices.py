"""What `train` may vary beside its plan: order, restarts, sets, regularizers, averages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from noshuffle import datasets
from noshuffle.cli import main
from noshuffle.cli.train_choices import composite_of, constraint_of, rows_in_order
from noshuffle.cli.train_parts import loaded, make_plan, row_order
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.errors import InvalidInput
from noshuffle.features import prior
from noshuffle.optim.composite import ElasticNet, GroupLasso
from noshuffle.optim.constraints import L1Ball, L2Ball
from noshuffle.participation import Restarted

ONCE = lru_cache(prior.leaves)
LINEAR = "train --data digits --model linear --epochs 4 --noise-multiplier 3"


def backwards(data: datasets.DataSet) -> np.ndarray:
    return np.arange(len(data))[::-1]


def of_an_epoch(data: datasets.DataSet, epoch: int) -> np.ndarray:
    return backwards(data)


def nothing(data: datasets.DataSet) -> None:
    """Forgot to return the rows."""


def generated(data: datasets.DataSet) -> Iterator[int]:
    return iter(range(len(data)))


def test_an_order_that_takes_or_gives_something_else_is_one_line() -> None:
    data = datasets.load("digits")
    with pytest.raises(InvalidInput, match="must be a function of the data set: missing"):
        rows_in_order(data, f"{__name__}:of_an_epoch", batch=100)
    with pytest.raises(InvalidInput, match="must return every row of the data once"):
        rows_in_order(data, f"{__name__}:nothing", batch=100)
    assert rows_in_order(data, f"{__name__}:generated", batch=100)[0][-1] == 99


def test_orders_hold_every_row_once() -> None:
    data = datasets.load("digits")
    whole = len(data) // 100 * 100
    assert np.array_equal(np.concatenate(rows_in_order(data, "file", batch=100)), np.arange(whole))
    by_label = np.concatenate(rows_in_order(data, "sorted", batch=100))
    assert (np.diff(data.y_train[by_label].numpy()) >= 0).all()
    own = np.concatenate(rows_in_order(data, f"{__name__}:backwards", batch=100))
    assert own[0] == len(data) - 1
    two = np.concatenate(rows_in_order(data, "random-per-restart", batch=100, blocks=2, seed=3))
    for part in (two[:whole], two[whole:]):
        assert len(set(part.tolist())) == whole
    assert not np.array_equal(two[:whole], two[whole:])


def test_an_order_changes_at_restarts_only() -> None:
    data = datasets.load("digits")
    settings = TrainSettings.of(
        {"mechanism": "tree", "restart_every": 22, "order": "random-per-restart", "epochs": 4}
    )
    rows = [
        batch.tolist() for batch in row_order(settings, data)
    ]  # 11 steps a pass, two passes a tree
    assert len(rows) == 44
    assert rows[:11] == rows[11:22] != rows[22:33] == rows[33:]
    plan = make_plan(settings, data)
    assert isinstance(plan.participation, Restarted)
    assert plan.strategy.to_dict()["restart_every"] == 22
    with pytest.raises(InvalidInput, match="whole passes of 11"):
        make_plan(TrainSettings.of({**settings.to_dict(), "restart_every": 20}), data)


def test_sets_and_regularizers_from_words() -> None:
    assert constraint_of("l2:3") == L2Ball(3.0)
    assert constraint_of("l1:0.5") == L1Ball(0.5)
    assert composite_of("elastic:0.1,0.2") == ElasticNet(0.1, 0.2)
    assert composite_of("group:1") == GroupLasso(1.0)
    for bad in ("l2", "l2:a", "box:1", "ball:3", "l2:1,2"):
        with pytest.raises(InvalidInput, match="N a number"):
            constraint_of(bad)


def test_a_run_with_all_of_them_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    line = (
        f"{LINEAR} --mechanism tree --restart-every 22 --completion --order random-per-restart "
        f"--average 0.9 --augment 2 --constraint l2:0.5 --composite l1:0.0001 --out {out} --json"
    )
    assert not main(line.split())
    capsys.readouterr()
    lines = (out / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    assert 0.0 <= json.loads(lines[-1])["test_accuracy_of_average"] <= 1.0
    assert not main(["verify", str(out)])
    assert "VERIFIED: 44 of 44 planned steps" in capsys.readouterr().out
    told = (out / "statement.json").read_text(encoding="utf8")
    assert "the order may change after every 22 steps" in told


def test_sums_released_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        f"{LINEAR} --epochs 1 --mechanism release_sums --order sorted --out {tmp_path / 'r'} --json"
    )
    assert not main(line.replace("--epochs 4 ", "").split())
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options",
    [
        "--restart-every 5",
        "--completion",
        "--order random-per-restart --mechanism tree",
        "--order upside-down",
        "--order no_module:f",
        "--order sorted --sampling poisson",
        "--constraint l2:1 --optimizer adam",
        "--constraint sphere",
        "--average 1",
    ],
)
def test_bad_input_is_one_line(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{LINEAR} {options} --out {tmp_path / 'r'}".split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def leaves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of features is dead leaves; that a seed repeats them, tests/features say."""
    monkeypatch.setattr(prior, "leaves", ONCE)


@pytest.mark.usefixtures("leaves_once")
def test_features_of_images_under_a_linear_model(tmp_path: Path, capsys) -> None:
    """A run on fixed features is made, stops at nothing, resumes to itself and verifies."""
    out = tmp_path / "run"
    how = "train --data digits --epochs 2 --noise-multiplier 3 --features patches:8 --json"
    assert main(f"{how} --out {out}".split()) == 0
    kept = json.loads((out / "config.json").read_text())
    assert (kept["features"], kept["model"]) == ("patches:8", "softmax")
    assert main(["train", "--resume", str(out)]) == 0
    assert main(["verify", str(out)]) == 0
    settings = TrainSettings.of({"features": "patches:8"})
    data, again = loaded(settings), loaded(settings)
    assert data.shape == (2 * 8 * 4,)
    assert torch.equal(data.x_train, again.x_train)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"features": "wavelets"}, "scattering, mirrored, patches"),
        ({"features": "prior"}, "scattering, mirrored, patches"),
        ({"features": "patches:0"}, "patches:512"),
        ({"features": "patches", "data": "shakespeare"}, "needs square images"),
    ],
)
def test_features_that_cannot_be_are_one_line(given, said: str, monkeypatch) -> None:
    if "data" in given:
        text = replace(datasets.load("digits"), kind="text", name="text")
        monkeypatch.setattr(datasets, "load", lambda name: text)
    with pytest.raises(InvalidInput, match=said):
        loaded(TrainSettings.of(given))


def test_features_are_fixed() -> None:
    with pytest.raises(InvalidInput, match="--augment"):
        TrainSettings.of({"features": "patches", "augment": 2})


@pytest.mark.parametrize("features", ["", "patches:8", "mirrored"])
def test_data_without_held_out_examples_are_refused_before_the_first_step(
    features: str, monkeypatch
) -> None:
    data = datasets.load("digits")
    bare = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])
    monkeypatch.setattr(datasets, "load", lambda name: bare)
    with pytest.raises(InvalidInput, match="no held-out examples"):
        loaded(TrainSettings.of({"features": features}))
