"""PrivateSum: what goes in is clipped, what comes out is noisy, and the totals add up."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler, TensorDataset

from noshuffle import Budget, Epochs, Plan, PrivateSum, SinglePass, verify
from noshuffle.errors import InvalidInput, NoshuffleError, ParticipationViolation
from noshuffle.noise import test_source
from noshuffle.noise.grid import grid_step
from noshuffle.participation import AnyOrderEpochs
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.private_sum import clipped_rows
from noshuffle.strategies import identity

MECHANISMS = ("identity", "tree", "blt", "banded_inverse", "banded")


def plan_of(steps: int, mechanism: str = "tree", **options: Any) -> Plan:
    options.setdefault("noise_multiplier", 0.0)
    return Plan.fit(SinglePass(steps=steps), mechanism=mechanism, **options)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-300, 1e-20, 1.0, 1e20, 1e150, 1e300]))
def test_one_row_moves_the_sum_by_at_most_the_clip_norm(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(6, 4)) * size)
    rows[1, 2], rows[3, 0] = torch.nan, torch.inf
    found = clipped_rows(rows, 0.7)
    norms = found.norm(dim=1)
    assert bool((norms <= 0.7).all())
    assert not found[[1, 3]].any()
    if size == 1.0:
        long = rows[0].norm() > 0.7
        assert float(norms[0]) == pytest.approx(0.7 if long else float(rows[0].norm()), rel=1e-9)


@pytest.mark.parametrize("kind", ["numbers", "array", "tensor", "named"])
def test_what_comes_back_has_the_form_of_what_came(kind: str) -> None:
    sums = PrivateSum(plan_of(2), clip=10.0)
    given: Any = {
        "numbers": [1.0, 2.0],
        "array": np.array([[1.0, 2.0], [0.5, 0.5]]),
        "tensor": torch.tensor([[1.0, 2.0], [0.5, 0.5]]),
        "named": {"a": np.ones((2, 3)), "b": np.zeros((2, 1))},
    }[kind]
    sums.add(given, ids=[1, 2])
    out = sums.add(given, ids=[3, 4])
    if kind == "numbers":
        assert (out, sums.total) == (3.0, 6.0)
    elif kind == "named":
        assert out["a"].tolist() == [2.0, 2.0, 2.0]
        assert sums.total["a"].tolist() == [4.0, 4.0, 4.0]
    else:
        assert type(out) is (np.ndarray if kind == "array" else torch.Tensor)
        assert out.tolist() == [1.5, 2.5]
        assert sums.total.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_deviation_of_totals_is_the_stated_one(mechanism: str) -> None:
    """4,000 coordinates: the tail of the mean square at ±12 % is below 10⁻⁷."""
    steps, width = 12, 4000
    plan = plan_of(steps, mechanism, noise_multiplier=1.7)
    sums = PrivateSum(plan, clip=2.0, source=test_source(seed=mechanism))
    for step in range(steps):
        sums.add(np.zeros((1, width)), ids=[step])
        spread = float(np.sqrt(np.mean(sums.total**2)))
        assert spread == pytest.approx(sums.deviation, rel=0.12)
        assert spread != pytest.approx(sums.deviation * 1.5, rel=0.12)
        assert spread != pytest.approx(sums.deviation / 1.5, rel=0.12)


def test_a_number_is_one_contribution() -> None:
    sums = PrivateSum(plan_of(3), clip=10.0)
    assert (sums.add(3.0), sums.add(np.float64(1.5)), sums.add(torch.tensor(1.0)).item()) == (
        3.0,
        1.5,
        1.0,
    )


def test_the_clip_norm_of_a_stream_stays() -> None:
    """Set later, it let a person add 100 clip norms under the noise of one."""
    sums = PrivateSum(plan_of(3), clip=1.0)
    with pytest.raises(AttributeError):
        sums.clip = 100.0  # type: ignore[misc]
    assert sums.clip == 1.0


def test_a_set_is_in_no_order() -> None:
    """Whose row is whose? Rows that are dropped would be those of others."""
    with pytest.raises(InvalidInput, match="a set has none"):
        PrivateSum(plan_of(3), clip=1.0).add(np.ones(2), ids={"ann", "bob"})


def test_increments_lie_on_the_grid() -> None:
    sums = PrivateSum(plan_of(3, "identity", noise_multiplier=1.0), clip=1.0)
    for step in range(3):
        out = sums.add(np.full((1, 50), 1 / 3), ids=[step])
        assert not np.mod(out, grid_step(1.0)).any()


def test_rows_of_a_user_are_added_up_before_they_are_clipped() -> None:
    plan = Plan.fit(SinglePass(steps=2), mechanism="tree", noise_multiplier=0.0, unit="user")
    sums = PrivateSum(plan, clip=1.0)
    assert sums.add([0.8, 0.8, 0.5], ids=["ada", "ada", "bob"]) == pytest.approx(1.5)
    with pytest.raises(InvalidInput, match="whose each row is"):
        sums.add([1.0])


def test_participation_is_checked_before_anything_is_added() -> None:
    sums = PrivateSum(plan_of(3), clip=1.0)
    sums.add([1.0], ids=[5])
    with pytest.raises(ParticipationViolation):
        sums.add([1.0, 1.0], ids=[6, 5])
    assert (sums.step, sums.total) == (1, pytest.approx(1.0))
    dropping = PrivateSum(plan_of(3), clip=1.0, on_violation="drop")
    dropping.add([1.0], ids=[5])
    assert dropping.add([1.0, 0.5], ids=[5, 6]) == 0.5


WRONG: list[Any] = [[1j], ["a"], [[1.0], [1.0, 2.0]], {}, None, {1: [1.0], "1": [2.0]}]
WRONG += [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.cfloat)]


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_contributions_are_one_line(wrong: Any) -> None:
    sums = PrivateSum(plan_of(2), clip=1.0)
    with pytest.raises(NoshuffleError) as caught:
        sums.add(wrong)
    assert "\n" not in str(caught.value)


def test_epochs_and_statement() -> None:
    plan = Plan.fit(Epochs(epochs=2, steps_per_epoch=2), mechanism="blt", epsilon=3.0)
    sums = PrivateSum(plan, clip=1.0)
    for step in range(4):
        sums.add([1.0], ids=[step % 2])
    assert sums.epsilon == pytest.approx(3.0, rel=1e-9)
    assert sums.statement().epsilon == sums.epsilon


def test_the_statement_stays_when_the_stream_is_closed(tmp_path: Path) -> None:
    plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)
    sums = PrivateSum(plan, clip=1.0, run=tmp_path / "r")
    sums.add([0.5], ids=[1])
    before = sums.statement()
    sums.close()
    sums.close()
    assert sums.statement() == before
    assert before.epsilon == plan.epsilon_after(1)
    with pytest.raises(InvalidInput, match="was closed"):
        sums.add([0.5], ids=[2])


def test_the_statement_of_a_closed_stream_says_what_was_charged(tmp_path: Path) -> None:
    """A stream that ended early costs less than was reserved for it, here as in its folder."""
    plan = Plan.fit(SinglePass(steps=8), mechanism="tree", noise_multiplier=2.0)
    budget = Budget(tmp_path / "books", epsilon=9.0, delta=1e-5)
    sums = PrivateSum(plan, clip=1.0, run=tmp_path / "r", budget=budget)
    sums.add([0.5], ids=[1])
    reserved = sums.statement().assumptions
    sums.close()
    told = json.loads((tmp_path / "r" / "statement.json").read_text())
    assert list(sums.statement().assumptions) == told["assumptions"]
    assert sums.statement().assumptions != reserved


def test_threads_take_turns():
    """A unit that four threads bring at once takes part once; every answer has its row."""
    plan = Plan(participation=SinglePass(200), strategy=identity(), noise_multiplier=1.0)
    total = PrivateSum(plan, clip=1.0, shape=())
    answers, refused = [], []

    def bring(_: int) -> None:
        for unit in range(30):
            try:
                answers.append(total.add([1.0], ids=[unit]))
            except ParticipationViolation:
                refused.append(unit)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(bring, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(answers) == total.step == 30
    assert len(refused) == 90


def test_a_total_before_anything_was_added_is_one_line() -> None:
    plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match=r"nothing was added yet.*give shape="):
        PrivateSum(plan, clip=1.0).total  # noqa: B018


def test_arrays_that_may_not_be_written_to_are_taken_without_a_warning() -> None:
    plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
    row = np.ones(3)
    row.flags.writeable = False  # as columns of pandas 3 are
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivateSum(plan, clip=1.0).add(row)


# -- rows of a loader ------------------------------------------------------------------------------

ROWS = TensorDataset(torch.arange(22.0))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=5, shuffle=True, **options)


def add_all(sums: PrivateSum, batches: Any, *, until: int = 100) -> list[list[int]]:
    """Add a pass, to this step; the rows that came."""
    seen = []
    for (x,) in batches:
        sums.add(x)
        seen.append([int(row) for row in x])
        if sums.step >= until:
            break
    return seen


def test_a_shuffled_loader_of_two_passes_is_refused_at_the_first_repeated_row() -> None:
    """Without names, ε of a second pass under a plan of one was half of what it should be."""
    sums = PrivateSum(plan_of(10), clip=1.0, shape=())
    batches = sums.batches(shuffled())
    assert len(add_all(sums, batches)) == 5
    with pytest.raises(ParticipationViolation, match="may not take part in step 5"):
        add_all(sums, batches)
    assert sums.step == 5
    assert sums.statement().participation_checked
    unnamed = PrivateSum(plan_of(10), clip=1.0, shape=())
    for _ in range(2):
        add_all(unnamed, shuffled())
    assert not unnamed.statement().participation_checked


@pytest.mark.parametrize("workers", [0, 2])
def test_sums_of_a_loader_go_on_at_the_next_step_of_the_log(tmp_path: Path, workers: int) -> None:
    """Killed in the middle of both passes: every pass has the same order, and each row once."""
    plan = Plan.fit(Epochs(2, 5), mechanism="tree", noise_multiplier=1.0)
    seen: list[list[int]] = []
    for stop in (2, 7, 10):
        sums = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run")
        while sums.step < stop:
            seen += add_all(sums, sums.batches(shuffled(num_workers=workers)), until=stop)
        sums.release.log.close()  # what is left of a killed process: its folder
    assert seen[:5] == seen[5:]
    first_pass = list(chain(*seen[:5]))
    assert sorted(first_pass) == list(range(22)) != first_pass
    named: list[list[int]] = []
    run = RunFolder(tmp_path / "run")
    History.read(run, on_step=lambda _, units: named.append(units.tolist()))
    assert named == [sorted(batch) for batch in seen]


def test_names_travel_with_the_batch_that_is_added() -> None:
    sums = PrivateSum(plan_of(10), clip=1.0, shape=())
    batches = iter(sums.batches(shuffled()))
    with pytest.raises(InvalidInput, match="came without a batch"):
        sums.add([1.0])
    (x,) = next(batches)
    with pytest.raises(InvalidInput, match="would be a second way"):
        sums.add(x, ids=range(5))
    with pytest.raises(InvalidInput, match="5 rows were read and 4 came"):
        sums.add(x[:4])
    sums.add(x)
    with pytest.raises(InvalidInput, match="came without a batch"):
        sums.add(x)
    next(batches)
    with pytest.raises(InvalidInput, match="a second batch came before step 1"):
        next(batches)
    with pytest.raises(InvalidInput, match="give shape="):
        PrivateSum(plan_of(10), clip=1.0).batches(shuffled())


def test_an_order_that_is_lost_gives_up_the_rest_of_its_epoch(tmp_path: Path) -> None:
    """A sampler of the caller's that draws anew after a kill: one refusal, and a way on."""
    plan = Plan(participation=AnyOrderEpochs(2, 5), strategy=identity(), noise_multiplier=1.0)
    seeds = iter(range(9))

    class Drawn(Sampler[int]):
        def __len__(self) -> int:
            return 22

        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(next(seeds)).permutation(22).tolist())

    def opened() -> tuple[PrivateSum, Any]:
        sums = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run")
        return sums, sums.batches(DataLoader(ROWS, batch_size=5, sampler=Drawn()))

    sums, batches = opened()
    add_all(sums, batches, until=2)
    sums.release.log.close()
    sums, batches = opened()
    with pytest.raises(InvalidInput, match=r"order of this run is lost: pass_over\(to='epoch'\)"):
        next(iter(batches))
    assert sums.pass_over(to="epoch") == 3
    assert len(add_all(sums, batches)) == 5
    sums.close()
    assert verify(tmp_path / "run").released == 10
