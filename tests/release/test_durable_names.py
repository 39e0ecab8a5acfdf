"""A power cut takes whatever was not flushed: the name of a new folder stands in the one above."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.budget import Budget


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
