"""What every driver promises when nothing goes wrong: noise, statement, units, end."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from tests import drivers
from tests.drivers import DRIVERS, SIZE, UNITS, evidence, plan_of
from tests.strategies.slow_recipes import materialize

from noshuffle import verify
from noshuffle.errors import ParticipationViolation
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History

pytestmark = pytest.mark.parametrize("name", DRIVERS)


@pytest.mark.parametrize("mechanism", ["blt", "tree", "identity"])
def test_what_leaves_has_the_noise_of_the_plan(name: str, tmp_path: Path, mechanism: str) -> None:
    """32 coordinates in 12 steps: the root mean square is within a fifth, and not at 2/3 or 3/2.

    Sums have norm 4 at most, which 64 clip norms of noise hide.
    """
    plan = plan_of(mechanism, noise_multiplier=64.0)
    releases = [value for _, value in DRIVERS[name](tmp_path / "run", plan)]
    own = History.read(RunFolder(evidence(name, tmp_path / "run"))).plan
    rows = np.square(materialize(own.strategy.recipe(own.steps), own.steps)).sum(1)
    found = np.array([np.square(value).mean() for value in releases]) / rows
    ratio = math.sqrt(found.mean()) / own.noise_multiplier
    assert 0.8 < ratio < 1.2
    assert len(releases) == own.steps
    assert all(len(value) == SIZE for value in releases)


def test_the_statement_is_the_plans_and_the_end_leaves_no_secret(name: str, tmp_path: Path) -> None:
    releases = [*DRIVERS[name](tmp_path / "run", plan_of())]
    run = evidence(name, tmp_path / "run")
    history = History.read(RunFolder(run))
    told = json.loads((run / "statement.json").read_text())
    assert told["epsilon"] == history.plan.epsilon() == history.statement().epsilon
    assert told["released_steps"] == len(releases) == history.plan.steps
    assert told["participation_checked"] is True
    assert history.has_ended
    assert verify(run).answer == "VERIFIED"
    assert not [p for p in run.rglob("*") if "secret" in p.name]


def test_a_unit_that_comes_again_too_soon_takes_part_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds wait for others; whoever names a batch is refused, before anything is written."""
    monkeypatch.setattr(drivers, "units", lambda step: list(range(UNITS)))
    error = AssertionError if name == "rounds" else ParticipationViolation
    with pytest.raises(error):
        [*DRIVERS[name](tmp_path / "run", plan_of())]
    seen: list[np.ndarray] = []
    run = RunFolder(evidence(name, tmp_path / "run"))
    History.read(run, on_step=lambda _, units: seen.append(units))
    assert [units.tolist() for units in seen] == [list(range(UNITS))]


def test_a_row_is_on_the_disk_before_what_came_of_it_leaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is returned, a cohort is asked. Of training, users store and send by `save` alone."""
    if name not in ("sum", "loader", "rounds"):
        pytest.skip("nothing of a step leaves by our hands before a save")
    synced: list[int] = []
    flush = os.fdatasync

    def recorded(file: int) -> None:
        size = os.fstat(file).st_size
        flush(file)
        synced.append(size)

    monkeypatch.setattr(os, "fdatasync", recorded)
    for _ in DRIVERS[name](tmp_path / "run", plan_of()):
        assert synced[-1] == (tmp_path / "run" / "log.jsonl").stat().st_size
        break
