"""Finished runs with secret positions or turns that go on: fresh draws, one guarantee."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import noshuffle as ns
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.participation import BallsInBins, CyclicPoisson, Participation, SeparatedBins
from noshuffle.release.extension import extend
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_tables import Evidence, Row
from noshuffle.release.seal import by_keys, sealed_at
from noshuffle.release.verify import verify
from noshuffle.training.first_step import first_rows

ROWS = 12
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))


def start(plan: ns.Plan, folder: Path, **how: object):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=3, run=folder, **how)


def train(private, upto: int) -> list[list[int]]:
    drawn = []
    sampler = private.sampler(ROWS)
    for step in range(private.steps_done, upto):
        ids = sampler.draw(step)
        drawn.append(ids.tolist())
        private.step(lambda out: out.square().sum(), X[ids], ids=ids)
    private.save()
    return drawn


CASES = [
    (BallsInBins(2, 4), "blt", {"epochs": 1}),
    (SeparatedBins(2, 4, 2), "best", {"epochs": 1}),
    (CyclicPoisson(8, 2, 0.5), "best", {"steps": 4, "mechanism": "best"}),
]


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize(("part", "mechanism", "more"), CASES, ids=lambda v: str(v)[:16])
def test_a_finished_run_goes_on_with_draws_of_its_own(
    tmp_path: Path, part: Participation, mechanism: str, more: dict[str, int], keep_keys: bool
) -> None:
    plan = ns.Plan.fit(part, mechanism=mechanism, noise_multiplier=3.0)
    private = start(plan, tmp_path)
    before = train(private, plan.steps)
    private.close(keep_keys=keep_keys)
    longer = plan.extended(**more)
    extend(tmp_path, longer)
    assert verify(tmp_path).answer == "PROVED", verify(tmp_path)
    private = start(longer, tmp_path)
    assert private.resume() == 8
    with pytest.raises(NoshuffleError):  # what our sampler did not draw
        private.step(lambda out: out.square().sum(), X, ids=np.arange(ROWS))
    train(private, 10)
    del private  # killed in the middle of the stage
    private = start(longer, tmp_path)
    assert private.resume() == 10
    train(private, 12)
    statement = private.statement()
    private.close()
    found = verify(tmp_path)
    assert found.answer == "PROVED", found
    assert found.epsilon == pytest.approx(longer.epsilon(), rel=1e-12)
    assert statement.epsilon == pytest.approx(longer.epsilon(), rel=1e-12)
    assert longer.epsilon() > plan.epsilon() * 1.05
    assert len(before) == 8
    assert not found.unchecked, found.unchecked
    with closing(Evidence(RunFolder.of(tmp_path).ledger_file)) as evidence:
        assert all(row.is_removed for row in evidence.rows()), "who was drawn goes with the keys"


def test_every_draw_whose_key_is_there_is_held_against_it(tmp_path: Path) -> None:
    plan = ns.Plan.fit(BallsInBins(2, 4), mechanism="blt", noise_multiplier=3.0)
    private = start(plan, tmp_path)
    train(private, 8)
    private.close()
    wrong = ns.Plan.fit(BallsInBins(1, 8), mechanism=plan.strategy, noise_multiplier=3.0)
    with pytest.raises(InvalidInput, match="what a unit may do was"):
        extend(tmp_path, wrong.extended(epochs=1))
    longer = plan.extended(epochs=1)
    extend(tmp_path, longer)
    private = start(longer, tmp_path)
    private.resume()
    train(private, 12)
    private.close(keep_keys=True)
    folder = RunFolder.of(tmp_path)
    with closing(Evidence(folder.ledger_file)) as evidence:
        rows, facts = list(evidence.rows()), evidence.bound()
        lives, ends = evidence.notes("life"), sealed_at(evidence.notes("extended"))
    assert ends == [8]
    assert all(row.is_removed == (row.step < 8) for row in rows)

    def failures(rows: list[Row], since: int) -> list[str]:
        return by_keys(folder.ring(), longer, rows, facts, lives, since=since)[0]

    since = ends[0]
    assert not failures(rows, since)
    exchanged = [*rows[:-1], replace(rows[-1], units=np.arange(ROWS))]
    assert any("step 11 holds other units" in line for line in failures(exchanged, since))
    early = [replace(rows[0], units=np.arange(ROWS), is_removed=False), *rows[1:]]
    assert any("holds other units" in line for line in failures(early, 0)), "its key is gone"
    assert not failures(early, since)


def test_a_budget_pays_for_all_stages(tmp_path: Path) -> None:
    plan = ns.Plan.fit(CyclicPoisson(8, 2, 0.5), mechanism="best", noise_multiplier=3.0)
    longer = plan.extended(steps=4, mechanism="best")
    budget = ns.Budget(tmp_path / "budget", epsilon=longer.epsilon() * 1.5, delta=1e-5)
    private = start(plan, tmp_path / "run", budget=budget)
    train(private, 8)
    private.close()
    first = budget.total().epsilon(1e-5)
    extend(tmp_path / "run", longer)
    private = start(longer, tmp_path / "run", budget=budget)
    private.resume()
    train(private, 12)
    private.close()
    assert budget.total().epsilon(1e-5) > 0.999 * longer.epsilon()  # two grids, both from above
    assert budget.total().epsilon(1e-5) > 1.02 * first
    assert verify(tmp_path / "run").answer == "PROVED"


def test_an_empty_draw_has_no_rows_to_compare() -> None:
    assert first_rows((X[:0],)) is None
    assert first_rows((torch.randn(2, 64),)) is not None
