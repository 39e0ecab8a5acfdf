"""A power cut takes whatever was not flushed: the name of a new folder stands in the one above."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.budget import Budget
from noshuffle.release import opening
from noshuffle.release.opening import fork


def test_folders_of_a_run_and_of_its_budget_are_durable_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, flushed = os.fsync, set()

    def fsync(handle: int) -> None:
        real(handle)
        flushed.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    plan = Plan.fit(SinglePass(steps=2), mechanism="tree", epsilon=1.0, delta=1e-5)
    budget = Budget(tmp_path / "books" / "own", epsilon=2.0, delta=1e-5)
    PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "runs" / "own", budget=budget)
    for folder in (tmp_path, tmp_path / "books", tmp_path / "runs", tmp_path / "runs" / "own"):
        assert folder.stat().st_ino in flushed


@pytest.mark.parametrize("is_there", [False, True])
def test_a_fork_that_was_killed_is_no_run_without_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Whoever finds its folder there goes on in it: a run of its own would state ε of itself."""
    plan = Plan.fit(SinglePass(steps=2), mechanism="tree", epsilon=1.0, delta=1e-5)
    sums = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "parent")
    sums.add([0.5], ids=[1])
    sums.save()
    child = tmp_path / "runs" / "child"
    if is_there:
        child.mkdir(parents=True)
    monkeypatch.setattr(opening, "write_json", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        fork(tmp_path / "parent", child)
    monkeypatch.undo()
    assert child.exists() == is_there
    made = fork(tmp_path / "parent", child)
    assert made.path == child
    assert [one.released for one in made.ancestors()] == [1]
    later = PrivateSum(plan, clip=1.0, shape=(), run=made)
    later.add([0.5], ids=[1])
    assert later.statement().epsilon > plan.epsilon_after(1)
