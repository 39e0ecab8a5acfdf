"""Secret draws: intervals that hold the accountant's ε, and false claims that are refuted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from noshuffle import Epochs, Plan
from noshuffle.accounting import fourier
from noshuffle.auditing.answers import HOLDS, REFUTED, UNDECIDED
from noshuffle.auditing.capped import Opposed
from noshuffle.auditing.draws import audit_draws
from noshuffle.auditing.positions import epsilon_of_positions
from noshuffle.auditing.prefixes import audit_plan, whitening
from noshuffle.auditing.sampled import epsilon_of_draws
from noshuffle.auditing.turns import Turn, epsilon_of_turns, plain
from noshuffle.cli import main
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.release.sampler_kinds import make_sampler

FEW = 100_000  # random numbers: intervals of some per cent


@pytest.mark.parametrize("kind", ["remove", "add", "replace"])
def test_the_interval_holds_what_the_accountant_says(kind: str) -> None:
    for rate, noise, steps in ((0.05, 0.8, 40), (1.0, 3.0, 9)):
        turns = [plain(Turn(kind, rate, 1 / noise))] * steps
        found = epsilon_of_turns(turns, delta=1e-5, numbers=FEW)
        stated = fourier.epsilon(
            noise_multiplier=noise, rate=rate, steps=steps, delta=1e-5, direction=kind
        )
        assert found.low <= stated * (1 + 1e-3)
        assert found.high >= stated * (1 - 1e-3)
        assert found.high - found.low < 0.1 * stated


def test_one_position_is_a_gaussian_and_two_that_are_far_apart_are_a_poisson_step() -> None:
    known = epsilon_of_positions([np.array([[1.0]])], delta=1e-5, numbers=FEW)
    assert known.low <= 4.3772 <= known.high
    apart = epsilon_of_positions([4 * np.eye(2)], delta=1e-3, numbers=FEW)  # ≥ one turn at ½
    single = epsilon_of_turns([plain(Turn("remove", 0.5, 2.0))], delta=1e-3, numbers=FEW)
    assert apart.high >= single.low
    assert apart.low > 0.9 * single.high
    twice = epsilon_of_positions([np.array([[0.5]])] * 2, delta=1e-5, numbers=FEW)
    assert twice.low <= 4.3772 <= twice.high


def test_a_cap_that_is_always_reached_makes_a_unit_weigh_twice() -> None:
    """Then nothing masks the sum of the others; ε of one is not that of Poisson batches."""
    chance = 0.1 * sum(
        math.comb(99, k) * 0.1**k * 0.9 ** (99 - k) * min(1, 3 / (k + 1)) for k in range(100)
    )
    for kind in ("remove", "add"):
        found, twice, once = (
            epsilon_of_turns([plain(turn)] * 4, delta=1e-4, numbers=FEW)
            for turn in (
                Opposed(kind, 0.1, 3, 99, 0.5), Turn(kind, chance, 1.0), Turn(kind, chance, 0.5))
        )  # fmt: skip
        assert found.low <= twice.high
        assert twice.low <= found.high * 1.01  # a batch is not full once in a hundred
        assert once.high < 0.65 * found.low
    cut = TruncatedPoisson(4, 0.1, 3, 100)
    shared = whitening(np.array([[1.0, 0.5], [0.5, 1.0]]))
    assert epsilon_of_draws(cut, shared, neighbours="add-remove", delta=1e-5) is None


PLANS: list[tuple[Participation, str, str]] = [
    (Poisson(24, 0.1), "identity", ""),
    (Poisson(24, 0.1), "identity", "replace-one"),
    (FixedSize(24, 10, 100), "identity", ""),
    (FixedSize(24, 10, 100), "identity", "add-remove"),
    (FixedSize(24, 10, 100), "identity", "zero-out"),
    (CyclicPoisson(24, 4, 0.2), "best", ""),
    (BallsInBins(3, 8), "blt", ""),
    (TruncatedPoisson(4, 0.1, 4, 100), "identity", ""),
]


@pytest.mark.parametrize(("part", "mechanism", "neighbours"), PLANS, ids=lambda v: str(v)[:24])
def test_a_plan_is_covered_and_one_that_claims_half_is_not(
    part: Participation, mechanism: str, neighbours: str
) -> None:
    plan = Plan.fit(part, mechanism=mechanism, noise_multiplier=1.5, neighbours=neighbours)
    found = audit_plan(plan, numbers=FEW // 4)
    assert found.answer in (HOLDS, UNDECIDED)
    last = found.stops[-1]
    assert 0.5 * last.stated < last.low <= last.stated
    refuted = replace(found, stops=(replace(last, stated=0.5 * last.low),))
    assert refuted.answer == REFUTED
    assert "drawn in secret" in refuted.words()


def test_half_the_rate_is_refuted_and_so_is_poisson_for_a_fixed_order() -> None:
    plan, half = (
        Plan.fit(Poisson(24, rate), mechanism="identity", noise_multiplier=1.0)
        for rate in (0.1, 0.05)
    )
    assert audit_plan(plan, stated={24: half.epsilon()}, numbers=FEW // 4).answer == REFUTED
    order = Plan.fit(Epochs(3, 8), mechanism="identity", noise_multiplier=1.0)
    poisson = Plan.fit(Poisson(24, 1 / 8), mechanism="identity", noise_multiplier=1.0)
    assert audit_plan(order, stated={24: poisson.epsilon()}).answer == REFUTED


def test_noise_that_turns_share_is_not_taken_for_independent() -> None:
    part, twice = Poisson(2, 0.5), whitening(np.ones((2, 2)))
    found = epsilon_of_draws(part, twice, neighbours="zero-out", delta=1e-5)
    assert found is not None
    assert math.isinf(found.low)
    shared = whitening(np.array([[1.0, 0.5], [0.5, 1.0]]))
    assert epsilon_of_draws(part, shared, neighbours="zero-out", delta=1e-5) is None


def test_draws_that_are_not_the_planned_ones() -> None:
    def drawn_from(other: Participation, part: Participation) -> str:
        sampler = make_sampler(other, population=2000, key=bytes(32))
        return audit_draws(part, sampler=sampler).answer

    part = Poisson(32, 0.1)
    assert drawn_from(part, part) == HOLDS
    assert drawn_from(Poisson(32, 0.12), part) == REFUTED
    assert drawn_from(CyclicPoisson(32, 4, 0.4), part) == REFUTED
    assert drawn_from(part, CyclicPoisson(32, 4, 0.1)) == REFUTED
    assert drawn_from(BallsInBins(4, 10), part) == REFUTED  # the same rate, everybody in turn
    assert drawn_from(part, BallsInBins(4, 10)) == REFUTED
    cut = TruncatedPoisson(32, 0.1, 205, 2000)
    assert drawn_from(cut, cut) == HOLDS
    assert drawn_from(Poisson(32, 0.1), cut) == REFUTED  # some are above the cap
    assert drawn_from(TruncatedPoisson(32, 0.1, 150, 2000), cut) == REFUTED
    again = make_sampler(part, population=2000, key=bytes(32))
    once = again.draw(0)
    again.draw = lambda step: once  # type: ignore[method-assign]
    assert audit_draws(part, sampler=again).tests["steps"][-1] < 1e-6
    fixed = FixedSize(32, 200, 2000)
    assert audit_draws(fixed, sampler=again).answer == REFUTED
    assert audit_draws(fixed).answer == HOLDS


USUAL = [*PLANS, (TruncatedPoisson.of(steps=24, batch=10, population=100), "identity", "")]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "mechanism", "neighbours"), USUAL, ids=lambda v: str(v)[:24])
def test_the_command_decides(
    part: Participation,
    mechanism: str,
    neighbours: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Plan.fit(part, mechanism=mechanism, epsilon=4.0, neighbours=neighbours)
    (tmp_path / "plan.json").write_text(plan.to_json())
    page = tmp_path / "audit.html"
    assert main(["audit", str(tmp_path / "plan.json"), "--json", "--page", str(page)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in record["parts"]] == ["plan", "draws"]
    assert "secret draws" in page.read_text()
