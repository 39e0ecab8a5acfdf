"""What somebody new to it tries first: it works, or one line says what was expected instead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle import Budget, Epochs, Plan, Poisson, Private, privatize, verify
from noshuffle.errors import InvalidInput
from noshuffle.training import fit_model

X, Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
LOSS = nn.CrossEntropyLoss()


def plan(**more: Any) -> Plan:
    return Plan.fit(Epochs(2, 2), mechanism="tree", epsilon=8.0, delta=1e-5, **more)


def start(optimizer: Any = torch.optim.SGD, **more: Any) -> Private:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    given = {"clip_norm": 1.0, "batch_size": 8, **more}
    return privatize(model, optimizer(model.parameters(), lr=0.1), plan(), **given)


def steps(private: Private, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        rows = slice(8 * (step % 2), 8 * (step % 2) + 8)
        private.step(LOSS, X[rows], Y[rows], ids=range(rows.start, rows.stop))


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_closed_run_says_so(folder: str | None, tmp_path: Path) -> None:
    private = start(run=None if folder is None else tmp_path / folder)
    steps(private, 2)
    optimizer, criterion = private.optimizer, private.criterion(LOSS)
    private.close()
    with pytest.raises(InvalidInput, match="this run was closed"):
        criterion(private.model(X[:8]), Y[:8])
    with pytest.raises(InvalidInput, match="this run was closed"):
        steps(private, 1, 2)
    with pytest.raises(InvalidInput, match="this run was closed"):
        optimizer.step()
    with pytest.raises(InvalidInput, match="this run was closed"):
        private.save()
    with (
        pytest.raises(InvalidInput, match="this run was closed"),
        private.accumulate() as step,
    ):
        step.add(LOSS, (X[:8], Y[:8]))
    assert private.steps_released == 2


@pytest.mark.parametrize("when", ["before a part", "before the release", "in a loss"])
def test_a_run_that_is_closed_within_a_step_says_so(when: str) -> None:
    private = start()

    def closing(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        private.close()
        return LOSS(out, y)

    def in_parts() -> None:
        with private.accumulate() as step:
            step.add(LOSS, (X[:4], Y[:4]))
            if when == "before a part":
                private.close()
            step.add(closing if when == "in a loss" else LOSS, (X[4:8], Y[4:8]))
            if when == "before the release":
                private.close()

    with pytest.raises(InvalidInput, match="this run was closed"):
        in_parts()
    assert private.steps_released == 1  # its first part was summed: it is charged
    with pytest.raises(InvalidInput, match="this run was closed"):
        steps(private, 1)


def test_a_loss_or_a_batch_that_is_missing_is_named() -> None:
    private = start()
    with pytest.raises(InvalidInput, match="must be a function, got a tensor"):
        private.step(LOSS(private.model(X[:8]), Y[:8]))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="needs a batch beside the loss"):
        private.step(LOSS)
    with pytest.raises(InvalidInput, match="loss_fn must be a function, got 'mse'"):
        private.step("mse", X[:8], Y[:8])  # type: ignore[arg-type]
    assert not private.steps_released


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    for rule in (Epochs(np.int64(2), np.int64(2)), Poisson(np.int64(4), np.float32(0.5))):
        assert all(type(value) in (int, float, str) for value in rule.to_dict().values())
    made = Plan.fit(Epochs(np.int64(2), np.int64(2)), mechanism="tree", epsilon=8.0, delta=1e-5)
    assert Plan.from_json(made.to_json()) == plan()
    private = start(clip_norm=np.float32(1.0), batch_size=np.int64(8), run=tmp_path / "run")
    steps(private, 2)
    private.save()
    private.close()
    again = start(clip_norm=1.0, batch_size=8, run=tmp_path / "run")
    assert again.resume() == 2
    steps(again, 2, 2)
    again.save()
    again.close()
    assert verify(tmp_path / "run").answer == "VERIFIED"
    limit = Budget(tmp_path / "budget", epsilon=np.float32(2.0), delta=np.float64(1e-5)).limit
    assert limit["epsilon"] == 2.0


def test_a_run_goes_on_with_the_optimizer_that_it_had(tmp_path: Path) -> None:
    private = start(run=tmp_path / "run")
    steps(private, 2)
    private.save()
    private.close()
    other = start(torch.optim.Adam, run=tmp_path / "run")
    with pytest.raises(InvalidInput, match="saved with another optimizer: Adam needs betas"):
        other.resume()


@pytest.mark.parametrize("inside", [False, True])
def test_a_scheduler_after_private_step_does_not_warn(inside: bool) -> None:
    private = start()
    optimizer = private._parts.optimizer if inside else private.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(private, 1)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_what_evaluate_returns_is_a_mapping() -> None:
    batches = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    with pytest.raises(InvalidInput, match="what evaluate returns must be a mapping, got float"):
        fit_model(start(), batches, LOSS, evaluate=lambda model: 0.5)  # type: ignore[arg-type]
