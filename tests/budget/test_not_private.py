"""A run that turned out NOT PRIVATE is that in its budget, too: at once, durable, in every view."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import noshuffle as ns
from noshuffle import noise
from noshuffle.budget import Budget, tune
from noshuffle.cli import main
from noshuffle.clipping.looks import Look
from noshuffle.release import account

ROWS, STEPS, DELTA = 4, 4, 1e-5
LOSS = nn.CrossEntropyLoss()
WHY = "the loss of an example changes with the other examples of its batch"


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path / "people", epsilon=4.0, delta=DELTA)


def plan() -> ns.Plan:
    return ns.Plan.fit(ns.SinglePass(steps=STEPS), mechanism="tree", epsilon=1.0, delta=DELTA)


def begin(budget: Any, run: Path | None = None) -> ns.Private:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {"clip_norm": 1.0, "batch_size": ROWS, "run": run, "budget": budget}
    return ns.privatize(model, optimizer, plan(), **more)


def walk(private: ns.Private, until: int) -> None:
    for step in range(private.steps_done, until):
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randn(ROWS, 3, generator=rng), torch.randint(2, (ROWS,), generator=rng)
        private.step(LOSS, x, y, ids=np.arange(ROWS) + ROWS * step)


def find_mixing(private: ns.Private) -> None:
    """What a look does that finds examples mixed where they were apart."""
    parts = private._parts
    (kind, *_) = [note["kind"] for note in private.ledger.notes("look")]
    parts.heard(parts.model, Look(kind, WHY))


def assert_said(budget: Budget, *, runs: int = 1, what: str = "run") -> None:
    """By this object, and by one of another process."""
    for own in (budget, Budget(budget.folder)):
        (line,) = own.not_private_runs()
        assert line.startswith(f"{what}: ")
        assert WHY in line
        assert "NOT PRIVATE" not in line
        first = own.words().splitlines()[0]
        assert first.startswith(f"NOT PRIVATE: no ε holds for 1 of {runs} run")
        assert "exact" not in first
        assert not own.total().is_exact
        assert f"NOT PRIVATE, its charge stays: {line}" in own.words()


def test_it_is_in_the_books_as_soon_as_it_is_found(budget: Budget, tmp_path: Path) -> None:
    private = begin(budget)
    walk(private, 2)
    reserved = budget.total()
    assert budget.not_private_runs() == []
    assert reserved.is_exact
    assert budget.words().startswith("1 run on this data cost ε = 1 at")
    find_mixing(private)
    assert_said(budget)
    assert budget.total().mu == reserved.mu  # nothing is given back
    private.close()
    assert_said(budget)
    other = begin(budget, tmp_path / "b")
    walk(other, STEPS)
    assert_said(budget, runs=2)
    said = other.statement()
    other.close()
    assert not said.not_private  # that run is as private as it was
    assert any(
        "No ε holds for run, whose charge is in that sum" in line for line in said.assumptions
    )
    assert ns.verify(tmp_path / "b").answer == "PROVED"


def test_it_is_said_once(budget: Budget) -> None:
    private = begin(budget)
    walk(private, 2)
    find_mixing(private)
    private.close()
    with budget._books.reading() as events:
        assert [kind for kind, *_ in events].count("not_private") == 1


@pytest.mark.parametrize("how", ["swept", "resumed"])
def test_a_process_that_ended_between_its_ledger_and_the_books(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In another process it is found by the command, or when the run goes on."""
    if (child := os.fork()) == 0:
        private = begin(budget, tmp_path / "a")
        walk(private, 2)
        private.save()
        account.expose = lambda *_: os._exit(7)
        find_mixing(private)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert budget.not_private_runs() == []
    if how == "swept":
        assert budget.sweep() == ["run a"]
    else:
        again = begin(budget, tmp_path / "a")
        again.resume()
        assert_said(budget, what="run a")
        walk(again, STEPS)
        again.close()
    assert_said(budget, what="run a")
    assert ns.verify(tmp_path / "a").answer == "NOT PRIVATE"


def test_the_command_says_so(
    budget: Budget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = begin(budget, tmp_path / "a")
    walk(private, 2)
    find_mixing(private)
    private.close()
    assert main(["budget", str(budget.folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert WHY in record["runs"][0]["not_private"]
    assert not record["exact"]
    assert len(record["not_private"]) == 1
    assert main(["budget", str(budget.folder)]) == 0
    told = capsys.readouterr().out
    assert told.count("NOT PRIVATE") >= 3
    assert "no ε holds for 1 of 1 run " in told
    assert "red: NOT PRIVATE" in (budget.folder / "budget.svg").read_text()


def test_a_test_seed(budget: Budget) -> None:
    sums = ns.PrivateSum(
        plan(), clip=1.0, shape=(), budget=budget, source=noise.test_source(seed=1)
    )
    sums.close()
    assert not budget.not_private_runs()  # nothing was released
    sums = ns.PrivateSum(
        plan(), clip=1.0, shape=(), budget=budget, source=noise.test_source(seed=1)
    )
    sums.add(torch.ones(1), ids=[0])
    sums.close()
    assert "test seed" in budget.not_private_runs()[-1]


def test_a_search_among_runs_that_were_not_private(tmp_path: Path) -> None:
    own = Budget(tmp_path / "people", epsilon=8.0, delta=1e-4, pure=4.0)

    def run(setting: int, trial: Any) -> tuple[int, float]:
        fitted = ns.Plan.fit(
            ns.SinglePass(2), mechanism="tree", epsilon=trial.epsilon, delta=trial.delta
        )
        sums = ns.PrivateSum(fitted, clip=1.0, shape=(), budget=trial)
        sums.add(torch.ones(1), ids=[0])
        if not setting:  # the one that is not chosen
            trial.mark_not_private(WHY)
        return setting, float(setting)

    found = tune(run, [0, 1], epsilon=2.0, law="all", score_share=0.0, budget=own)
    assert found.result == 1
    assert found.statement.headline().startswith("NOT PRIVATE")
    assert WHY in own.not_private_runs()[0]
