"""Every kind of secret draws in federated rounds and in a PrivateSum: drawn, guarded, attacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from noshuffle import Plan, PrivateSum
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.federated import ServerOptimizer
from noshuffle.federated.rounds import Rounds
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Participation,
    SeparatedBins,
    TruncatedPoisson,
)

PEOPLE = 40
KINDS = [
    FixedSize(6, 8, PEOPLE),
    CyclicPoisson(6, 2, 0.5),
    BallsInBins(2, 3),
    TruncatedPoisson(6, 0.4, 18, PEOPLE),
    SeparatedBins(2, 3, 2),
]


def plan_of(part: Participation, unit: str = "user") -> Plan:
    return Plan.fit(part, mechanism="identity", noise_multiplier=1.0, unit=unit)


@pytest.mark.parametrize("part", KINDS, ids=lambda part: part.kind)
def test_cohorts_are_the_secret_draw_and_nothing_else(part: Participation, tmp_path: Path) -> None:
    server = ServerOptimizer(
        {"w": torch.zeros(2)}, plan_of(part), clip=1.0, cohort_size=8, run=tmp_path / "run",
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    rounds, everybody = Rounds(server), np.arange(PEOPLE)
    with pytest.raises(InvalidInput, match=r"server.sampler"):
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
