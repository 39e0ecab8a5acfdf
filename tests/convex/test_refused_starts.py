"""A run that is refused before its first step leaves no folder, no key and no charge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noshuffle.budget import Budget
from noshuffle.convex import PrivateLogisticRegression
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.release.private_sum import PrivateSum
from noshuffle.release.verify import verify
from noshuffle.strategies import identity

ROWS = 60
IDS = [f"person {i}" for i in range(ROWS)]


def table() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    x = np.random.default_rng(0).uniform(-1, 1, (ROWS, 2))
    return x, (x[:, 0] > 0).astype(np.int64)


def model(**more: Any) -> PrivateLogisticRegression:
    how = {"classes": [0, 1], "bounds": (-1.0, 1.0), "delta": 1e-5, **more}
    return PrivateLogisticRegression(**how)


BAD_IDS: list[tuple[Any, str]] = [
    (IDS[:-1], "one id for each of 60 rows, got 59"),
    ([*IDS[:-1], IDS[0]], "'person 0' came twice"),
    ([1.5] * ROWS, "ids"),
    ([*IDS[:-1], 7], "ids"),
    (7, "ids must be a list"),
]


@pytest.mark.parametrize("solver", ["gd", "ftrl"])
@pytest.mark.parametrize(("ids", "why"), BAD_IDS, ids=["short", "twice", "floats", "mixed", "one"])
def test_ids_that_are_refused_leave_nothing(
    tmp_path: Path, ids: Any, why: str, solver: str
) -> None:
    (x, y), run = table(), tmp_path / "runs" / "one"
    budget = Budget(tmp_path / "budget", epsilon=2.0, delta=1e-5)
    own = model(solver=solver, budget=budget)
    with pytest.raises(NoshuffleError, match=why):
        own.fit(x, y, ids=ids, run=run)
    assert not run.parent.exists()
    assert [entry.is_open for entry in budget.entries()] == [False]
    assert budget.total().epsilon(1e-5) == pytest.approx(0.0, abs=1e-6)
    own.fit(x, y, ids=IDS, run=run)
    assert verify(run).is_verified


def test_the_first_rows_of_a_stream_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    (x, y), run = table(), tmp_path / "one"
    own = model(solver="ftrl", horizon=ROWS)
    with pytest.raises(InvalidInput, match="got 59"):
        own.partial_fit(x, y, ids=IDS[:-1], run=run)
    assert not run.exists()
    own.partial_fit(x[:30], y[:30], ids=IDS[:30], run=run)
    with pytest.raises(NoshuffleError, match="'person 0' came twice"):  # later ones change nothing
        own.partial_fit(x[30:], y[30:], ids=IDS[:30])
    assert own.partial_fit(x[30:], y[30:], ids=IDS[30:]).n_rows_ == ROWS
    assert verify(run).is_verified


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    x, y = table()
    with pytest.raises(InvalidInput, match="got 59"):
        model().fit(x, y, ids=IDS[:-1], run=tmp_path)
    assert list(tmp_path.iterdir()) == []
    model().fit(x, y, ids=IDS, run=tmp_path)


def test_noise_that_no_float32_holds_leaves_nothing(tmp_path: Path) -> None:
    plan = Plan(participation=SinglePass(steps=3), strategy=identity(), noise_multiplier=1e3)
    budget = Budget(tmp_path / "budget", epsilon=2.0, delta=1e-5)
    with pytest.raises(InvalidInput, match=r"noise of deviation 1e[+]33 .* 1e[+]32 at most"):
        PrivateSum(plan, clip=1e30, shape=(2,), run=tmp_path / "one", budget=budget)
    assert not (tmp_path / "one").exists()
    with pytest.raises(InvalidInput, match="clip_norm must be at most"):
        PrivateSum(plan, clip=1e31, shape=(2,), run=tmp_path / "one", budget=budget)
    assert not budget.entries()


@pytest.mark.parametrize("size", [1e30, 1e-12])
def test_sums_at_the_edges_of_clip_norms_are_numbers(size: float) -> None:
    plan = Plan(participation=SinglePass(steps=3), strategy=identity(), noise_multiplier=100.0)
    sums = PrivateSum(plan, clip=size, shape=(2,))
    for value in (0.0, 3.4e38, -3.4e38):
        sums.add(np.full((4, 2), value, dtype=np.float32))
    assert bool(np.isfinite(np.asarray(sums.total)).all())
    assert 1.0 < float(np.abs(np.asarray(sums.total)).max()) / size < 2000.0
