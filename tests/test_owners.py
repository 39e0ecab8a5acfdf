"""Every owner of an example stays within the participation, and moves a sum by one clip norm."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import noshuffle as ns
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.owners import for_owners, in_turns
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass

RULES: list[Participation] = [
    SinglePass(steps=6),
    MinSeparation(steps=12, separation=3, max_participations=2),
    Epochs(epochs=2, steps_per_epoch=5),
]


def drawn(examples: int, people: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [
        draw.choice(people, draw.integers(0, 4), replace=False).tolist() for _ in range(examples)
    ]


def steps_of(batches: list[np.ndarray], owners: list[list[int]], person: int) -> list[int]:
    return [t for t, rows in enumerate(batches) for i in rows if person in owners[i]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_owner_stays_within_the_rule(rule: Participation) -> None:
    owners = drawn(60, 20)
    batches = in_turns(owners, batch_size=4, participation=rule)
    assert len(batches) == rule.steps
    assert sum(map(len, batches)) > 12
    assert max(map(len, batches)) == 4
    for person in range(20):
        steps = steps_of(batches, owners, person)
        if isinstance(rule, MinSeparation):
            assert len(steps) <= 2
            assert all(b - a >= 3 for a, b in pairwise(steps))
        elif isinstance(rule, Epochs):
            assert [s - 5 for s in steps if s >= 5] == [s for s in steps if s < 5]
            assert len(steps) <= 2
        else:
            assert len(steps) <= 1


def test_one_owner_moves_every_sum_by_at_most_the_clip_norm() -> None:
    rule = MinSeparation(steps=8, separation=2, max_participations=3)
    owners = drawn(40, 10)
    batches = in_turns(owners, batch_size=5, participation=rule)
    values = np.random.default_rng(1).normal(size=(40, 3)) * 5
    plan = ns.Plan.fit(rule, mechanism="tree", noise_multiplier=0.0)
    person = max(range(10), key=lambda p: len(steps_of(batches, owners, p)))
    moved = []
    for is_there in (True, False):
        sums = ns.PrivateSum(plan, clip=1.0, shape=(3,))
        kept = [is_there or person not in own for own in owners]
        out = [sums.add(values[r] * np.array(kept)[r, None], ids=r) for r in batches]
        moved.append(np.array([np.asarray(o) for o in out]))
    gaps = np.linalg.norm(moved[0] - moved[1], axis=1)
    there = steps_of(batches, owners, person)
    assert len(there) == 3
    assert np.flatnonzero(gaps > 1e-6).tolist() == there
    assert gaps.max() <= 1.0 + 1e-5


def test_the_statement_is_said_of_an_owner() -> None:
    plan = ns.Plan.fit(SinglePass(steps=4), mechanism="tree", epsilon=1.0)
    said = for_owners(plan.statement())
    assert (said.unit, said.epsilon) == ("owner", plan.statement().epsilon)
    assert any("in_turns" in sentence for sentence in said.assumptions)
    assert any("differ in one owner" in sentence for sentence in said.assumptions)


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="collection of ids"):
        in_turns(["ann"], batch_size=1, participation=SinglePass(steps=1))
    mixed = (
        [[torch.tensor(1)], [torch.tensor(1)]],
        [torch.tensor([1])],
        [[1], ["1"]],
        [[math.nan]],
    )
    for owners in mixed:  # the same owner would count as two
        with pytest.raises(InvalidInput, match="count as two"):
            in_turns(owners, batch_size=1, participation=SinglePass(steps=2))
    with pytest.raises(Unsupported, match="not under"):
        in_turns([["ann"]], batch_size=1, participation=ns.Poisson(steps=3, rate=0.5))
    user = ns.Plan.fit(SinglePass(steps=4), mechanism="tree", epsilon=1.0, unit="user")
    with pytest.raises(InvalidInput, match="per user"):
        for_owners(user.statement())
    rule = ns.Poisson(steps=3, rate=0.5)
    drawn = ns.Plan.fit(rule, mechanism="identity", noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match="secret draw"):
        for_owners(drawn.statement())
