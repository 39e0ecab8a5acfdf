"""Limits hold whatever the check-ins are; limits counted afterwards are those that happened."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle import MinSeparation, Plan
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.federated import ServerOptimizer, participation_from_times, read_log
from noshuffle.federated.cohort import (
    account_afterwards,
    draw_cohort,
    observed_participation,
)
from noshuffle.participation import Epochs, Participation, SinglePass
from noshuffle.release.units import Guard


def adversarial(step: int, rng: np.random.Generator, population: int) -> np.ndarray:
    """Check-ins that push: favourites every round, floods of one id, bursts, nobody at all."""
    kind = step % 5
    if kind == 0:
        return np.arange(20)
    if kind == 1:
        return np.repeat(rng.integers(0, population, 5), 40)
    if kind == 2:
        return rng.permutation(population)[:80]
    if kind == 3:
        return np.concatenate([np.arange(10), np.arange(10)[::-1], rng.integers(0, 50, 30)])
    return np.empty(0, dtype=np.int64)


@pytest.mark.parametrize(
    "rule",
    [
        MinSeparation(steps=3_000, separation=37, max_participations=45),
        MinSeparation(steps=2_000, separation=1, max_participations=9),
    ],
)
def test_limits_hold_under_adversarial_check_ins(rule: MinSeparation) -> None:
    rng, guard, cohorts = np.random.default_rng(5), Guard(rule, groups=True), []
    for step in range(rule.steps):
        users = adversarial(step, rng, 2000)
        cohort = users[draw_cohort(guard, users, size=16)]
        guard.take(cohort)
        cohorts.append(cohort)
    assert max(map(len, cohorts)) == 16
    seen = observed_participation(cohorts)
    assert seen.separation >= rule.separation
    assert seen.max_participations <= rule.max_participations
    # The limits bind: somebody stood at each of them.
    assert seen.separation == rule.separation
    assert rule.separation > 1 or seen.max_participations == rule.max_participations
    assert sum(map(len, cohorts)) == int(guard.table.all()[1].count.sum())


@pytest.mark.parametrize(
    "rule", [SinglePass(12), Epochs(epochs=3, steps_per_epoch=4), MinSeparation(12, 3, 2)]
)
def test_cohort_is_the_first_admitted_users(rule: Participation) -> None:
    """Against a slow twin that asks the guard about one user at a time."""
    rng, guard = np.random.default_rng(2), Guard(rule, groups=True)
    for _ in range(12):
        users = rng.integers(0, 15, 20)
        expected: list[int] = []
        for user in users.tolist():
            if user in expected or len(expected) == 4:
                continue
            try:
                copy.deepcopy(guard).take(np.array([user]))
            except ParticipationViolation:
                continue
            expected.append(user)
        places = draw_cohort(guard, users, size=4)
        assert users[places].tolist() == expected
        guard.take(users[places])


@given(st.lists(st.sets(st.integers(0, 6), max_size=5), min_size=1, max_size=25))
@settings(max_examples=80, deadline=None)
def test_observed_participation_against_counting(rounds: list[set[int]]) -> None:
    seen = observed_participation([sorted(users) for users in rounds])
    steps = {u: [t for t, users in enumerate(rounds) if u in users] for u in range(7)}
    gaps = [b - a for when in steps.values() for a, b in itertools.pairwise(when)]
    assert seen.steps == len(rounds)
    assert seen.separation == min(gaps, default=len(rounds))
    assert seen.max_participations == max(1, *(len(when) for when in steps.values()))


def test_observed_refuses_two_contributions_to_one_round() -> None:
    with pytest.raises(ParticipationViolation, match="twice in round 1"):
        observed_participation([[1], [2, 2]])


def test_accounting_afterwards_follows_what_happened() -> None:
    plan = Plan.fit(MinSeparation(60, 20, 3), mechanism="blt", noise_multiplier=3.0, unit="user")
    kept = [[t % 20] for t in range(60)]
    assert account_afterwards(plan, kept).epsilon == pytest.approx(plan.epsilon(), rel=1e-12)
    rare = [[t % 30] for t in range(60)]
    assert account_afterwards(plan, rare).epsilon < plan.epsilon()
    often = [[t % 6] for t in range(60)]
    broken = account_afterwards(plan, often)
    assert broken.epsilon > 2 * plan.epsilon()
    assert any("counted afterwards" in line for line in broken.assumptions)


def test_limits_that_devices_kept_by_themselves() -> None:
    plan = Plan.fit(MinSeparation(60, 20, 3), mechanism="blt", noise_multiplier=3.0, unit="user")
    sent = [60.0 * t for t in range(50)]  # the run ended early
    seen = participation_from_times(sent, seconds=1800, most=2, delay=300)
    assert seen == MinSeparation(50, 25, 2)
    statement = account_afterwards(plan, seen)
    twin = replace(plan, participation=MinSeparation(60, 25, 2))
    assert statement.epsilon == twin.epsilon() < plan.epsilon()
    assert any("timer of its own" in line for line in statement.assumptions)
    for wrong in (MinSeparation(61, 25, 2), SinglePass(60), 25):
        with pytest.raises(InvalidInput, match="MinSeparation"):
            account_afterwards(plan, wrong)  # type: ignore[arg-type]


def test_the_log_of_a_run_folder(tmp_path: Path) -> None:
    plan = Plan.fit(MinSeparation(9, 3, 2), mechanism="blt", noise_multiplier=3.0, unit="user")
    server = ServerOptimizer(
        {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2, run=tmp_path / "run",
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    for users in (["ada", "bob"], ["eve"], [], ["bob"]):
        server.step({"w": torch.zeros(2)}, cohort=users)
    log = read_log(tmp_path / "run")  # while the server is still there
    assert observed_participation(log) == MinSeparation(4, 3, 2)
    assert account_afterwards(plan, log).epsilon <= plan.epsilon()
    with pytest.raises(InvalidInput, match="not a run folder"):
        read_log(tmp_path)


def test_users_have_one_kind_of_name() -> None:
    def server(**more: Any) -> ServerOptimizer:
        plan = Plan.fit(SinglePass(2), mechanism="blt", noise_multiplier=3.0, unit="user")
        return ServerOptimizer(
            {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0), **more,
        )  # fmt: skip

    first = server()
    units = first.units(["ada", "bob", "ada"])
    assert units[0] == units[2] != units[1]
    assert server().units(["ada"])[0] != units[0]
    first.open(["ada", "bob"])
    with pytest.raises(InvalidInput, match="told its units apart by names, and now integers"):
        first.units([5])
    for wrong in ([""], [None], [1.5], [True], [2**70]):
        with pytest.raises(InvalidInput, match=r"user id must|ids must"):
            server().units(wrong)  # type: ignore[arg-type]
    assert server().units(np.array([3, 4], dtype=np.int32)).tolist() == [3, 4]
    with pytest.raises(InvalidInput, match="by integers and by strings"):
        observed_participation([["5"], [5]])
