"""A run that turns out NOT PRIVATE: the books say so, and its charge stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import noshuffle as ns
from noshuffle import Budget, noise, tune
from noshuffle.cli import main

DELTA = 1e-5
WHY = "the noise comes from a named test seed"


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path / "people", epsilon=4.0, delta=DELTA)


def plan() -> ns.Plan:
    return ns.Plan.fit(ns.SinglePass(steps=4), mechanism="tree", epsilon=1.0, delta=DELTA)


def begin(budget: Budget, run: Path | None = None, *, is_test: bool = True) -> ns.PrivateSum:
    source = noise.test_source(seed=1) if is_test else None
    return ns.PrivateSum(plan(), clip=1.0, shape=(), run=run, budget=budget, source=source)


def assert_said(budget: Budget) -> None:
    """By this object, and by one of another process."""
    for own in (budget, Budget(budget.folder)):
        (line,) = own.not_private_runs()
        assert WHY in line
        assert "NOT PRIVATE" not in line
        first = own.words().splitlines()[0]
        assert first.startswith("NOT PRIVATE: no ε holds for 1 of 1 run")
        assert "exact" not in first
        assert not own.total().is_exact
        assert f"NOT PRIVATE, its charge stays: {line}" in own.words()


def test_the_books_say_so(budget: Budget, tmp_path: Path) -> None:
    sums = begin(budget)
    sums.close()
    assert budget.not_private_runs() == []  # nothing was released
    sums = begin(budget)
    sums.add(torch.ones(1), ids=[0])
    sums.close()
    assert_said(budget)
    other = begin(budget, tmp_path / "b", is_test=False)
    other.add(torch.ones(1), ids=[1])
    said = other.statement()
    other.close()
    assert not said.not_private  # that run is as private as it was
    assert any("whose charge is in that sum" in line for line in said.assumptions)
    assert ns.verify(tmp_path / "b").answer == "PROVED"


def test_the_command_says_so(
    budget: Budget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = begin(budget, tmp_path / "a")
    sums.add(torch.ones(1), ids=[0])
    sums.close()
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
