"""Every kind of secret draws in federated rounds and in a PrivateSum: drawn, guarded, attacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.federated.blobs import killed

from noshuffle import Plan, PrivateSum
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.federated import ServerOptimizer
from noshuffle.federated.rounds import Rounds
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    TruncatedPoisson,
)

PEOPLE = 40
KINDS = [
    FixedSize(6, 8, PEOPLE),
    CyclicPoisson(6, 2, 0.5),
    BallsInBins(2, 3),
    TruncatedPoisson(6, 0.4, 18, PEOPLE),
]


def plan_of(part: Participation, unit: str = "user") -> Plan:
    return Plan.fit(part, mechanism="identity", noise_multiplier=1.0, unit=unit)


def rounds_in(folder: Path, part: Participation) -> Rounds:
    return Rounds(
        ServerOptimizer(
            {"w": torch.zeros(2)}, plan_of(part), clip=1.0, cohort_size=8, run=folder,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
        )
    )  # fmt: skip


@pytest.mark.parametrize("part", KINDS, ids=lambda part: part.kind)
def test_cohorts_are_the_secret_draw_and_nothing_else(part: Participation, tmp_path: Path) -> None:
    rounds, everybody = rounds_in(tmp_path / "run", part), np.arange(PEOPLE)
    server = rounds.server
    with pytest.raises(ParticipationViolation, match=r"sampler\(population\)"):
        rounds.begin(everybody)
    sampler = server.sampler(PEOPLE)
    for step in range(part.steps):
        drawn = sampler.draw(step)
        stranger = np.setdiff1d(everybody, drawn)[:1]
        if len(drawn):  # one who stays away, one put in the place of another, one left out
            with pytest.raises(InvalidInput, match="have not checked in"):
                rounds.begin(np.setdiff1d(everybody, drawn[:1]))
            for cohort in (np.append(drawn[1:], stranger), drawn[1:]):
                with pytest.raises(ParticipationViolation, match="secret sampler"):
                    server.open(cohort.tolist())
        with pytest.raises(ParticipationViolation, match="secret sampler"):
            server.open(np.append(drawn, stranger).tolist())
        work = rounds.begin(everybody)
        assert work is not None
        assert list(work.users) == drawn.tolist()
        rounds.finish()
    assert server.statement().epsilon == server.plan.epsilon()
    rounds.close()


@pytest.mark.parametrize("part", KINDS[1:3] + KINDS[4:], ids=lambda part: part.kind)
def test_a_killed_server_draws_no_round_anew(part: Participation, tmp_path: Path) -> None:
    """Positions stay; the rest is drawn afresh; then no secret is left."""
    folder, everybody = tmp_path / "run", np.arange(PEOPLE)

    def first() -> None:
        rounds = rounds_in(folder, part)
        sampler = rounds.server.sampler(PEOPLE)
        np.save(tmp_path / "drawn.npy", [_mask(sampler.draw(step)) for step in range(part.steps)])
        for is_last in (False, False, True):
            assert rounds.begin(everybody) is not None
            if not is_last:
                rounds.finish()

    killed(first)
    before = np.load(tmp_path / "drawn.npy")
    rounds = rounds_in(folder, part)
    with pytest.raises(InvalidInput, match="population"):
        rounds.server.sampler(PEOPLE + 1)
    assert rounds.resume() == (2,)  # which was asked, and whose noise is not used again
    sampler = rounds.server.sampler(PEOPLE)
    after = np.array([_mask(sampler.draw(step)) for step in range(part.steps)])
    assert (after[:3] == before[:3]).all()
    is_fresh = isinstance(part, CyclicPoisson)  # coins of steps that nobody has seen
    assert (after[3:] == before[3:]).all() != is_fresh
    if is_fresh:
        with pytest.raises(ParticipationViolation, match="secret sampler"):
            rounds.server.open(np.flatnonzero(before[3]))
    for _ in range(3):
        assert rounds.begin(everybody) is not None
        rounds.finish()
    assert rounds.server.statement().epsilon == rounds.server.plan.epsilon()
    assert (folder / "secret.json").exists()
    rounds.close()
    assert not (folder / "secret.json").exists()


def _mask(drawn: np.ndarray) -> np.ndarray:
    return np.isin(np.arange(PEOPLE), drawn)


@pytest.mark.parametrize("part", KINDS, ids=lambda part: part.kind)
def test_sums_take_the_secret_draw_and_nothing_else(part: Participation) -> None:
    rows = np.ones((PEOPLE, 2))
    private = PrivateSum(plan_of(part, "example"), clip=1.0, shape=(2,))
    sampler = private.sampler(PEOPLE)
    for step in range(part.steps):
        drawn = sampler.draw(step)
        foreign = np.setdiff1d(np.arange(PEOPLE), drawn)
        with pytest.raises(ParticipationViolation, match="secret sampler"):
            private.add(rows[foreign], ids=foreign)
        private.add(rows[drawn], ids=drawn)
    assert private.epsilon == pytest.approx(plan_of(part).epsilon())
    private.close()
