"""Units: ids, the table, the guard against its slow definition, and lists in few bytes."""

from __future__ import annotations

import json
import uuid
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import HorizonExceeded, InvalidInput, ParticipationViolation
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Restarted,
    SinglePass,
)
from noshuffle.release.units import Guard, UnitLists, UnitTable, as_ids, name_to_id

RULES: list[Participation] = [
    SinglePass(12),
    Epochs(3, 4),
    AnyOrderEpochs(3, 4),
    MinSeparation(12, 3, 2),
    Restarted(SinglePass(12), 6),
    Restarted(Epochs(6, 2), 6),
    Restarted(MinSeparation(12, 3, 3), 6),
]


def is_allowed(rule: Participation, steps: list[int]) -> bool:
    """Whether a unit may take part in exactly these steps: the definition, for one unit."""
    if isinstance(rule, SinglePass):
        return len(steps) <= 1
    if isinstance(rule, Epochs):
        return len({t % rule.steps_per_epoch for t in steps}) <= 1
    if isinstance(rule, AnyOrderEpochs):
        return len({t // rule.steps_per_epoch for t in steps}) == len(steps)
    if isinstance(rule, MinSeparation):
        near = [b - a < rule.separation for a, b in pairwise(steps)]
        return not any(near) and len(steps) <= rule.max_participations
    assert isinstance(rule, Restarted)
    base = rule.participation
    if not isinstance(base, Epochs):
        return is_allowed(base, steps)
    blocks = [[t for t in steps if t // rule.every == block] for block in range(len(rule.blocks))]
    return all(is_allowed(base, own) for own in blocks)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule))
@pytest.mark.parametrize("numbers", ["small", "large", "mixed"])
def test_the_guard_admits_what_the_definition_allows(rule: Participation, numbers: str) -> None:
    rng = np.random.default_rng(7)
    units = {"small": np.arange(9), "large": np.arange(9) - 2**62, "mixed": np.arange(9) * 2**23}
    own, guard = units[numbers].astype(np.int64), Guard(rule)
    taken: dict[int, list[int]] = {int(unit): [] for unit in own}
    for step in range(rule.steps):
        asked = np.sort(rng.choice(own, size=5, replace=False))
        fine = [is_allowed(rule, [*taken[int(u)], step]) for u in asked]
        assert guard.admits(asked).tolist() == fine
        if not all(fine):
            with pytest.raises(ParticipationViolation, match=f"may not take part in step {step}"):
                guard.take(asked)
        units_in, keep = guard.take(asked, drop=True)
        assert units_in.tolist() == asked[fine].tolist()
        assert all(fine) if keep is None else keep.tolist() == fine
        for unit in units_in:
            taken[int(unit)].append(step)
    with pytest.raises(HorizonExceeded, match="beyond the 12 planned steps"):
        guard.take(own[:0])
    ids, seen = guard.table.all()
    assert {int(u): int(c) for u, c in zip(ids, seen.count)} == {
        u: len(t) for u, t in taken.items() if t
    }


def test_a_unit_stands_once_in_a_step_and_in_one_of_its_parts() -> None:
    guard = Guard(AnyOrderEpochs(2, 2))
    with pytest.raises(ParticipationViolation, match="unit 3 appears twice in step 0"):
        guard.take(np.array([3, 1, 3]))
    units, keep = guard.take(np.array([3, 1, 3]), drop=True)
    assert units.tolist() == [1, 3]
    assert keep is not None
    assert keep.tolist() == [True, True, False]
    with pytest.raises(ParticipationViolation, match=r"unit 3 .* another part of this step"):
        guard.take(np.array([3, 4]), is_part=True)
    guard.take(np.array([4]), is_part=True)
    assert guard.steps == 1
    users = Guard(SinglePass(2), groups=True)
    assert users.take(np.array([5, 2, 5])).units.tolist() == [2, 5]
    with pytest.raises(ParticipationViolation, match="another part"):
        users.take(np.array([5]), is_part=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=6), max_size=6))
def test_the_table_is_a_dictionary(batches: list[list[int]]) -> None:
    table, plain = UnitTable(), dict[int, list[int]]()
    for step, batch in enumerate(batches):
        units = np.sort(np.array(batch, dtype=np.int64))
        seen = table.look_up(units)
        known = [plain.get(int(u), [-1, -1, 0]) for u in units]
        assert np.array(seen).T.tolist() == known
        first = np.array([row[2] == 0 for row in known], dtype=bool)
        table.update(units, step=step, first=first)
        for unit, row in zip(units, known):
            plain[int(unit)] = [step if row[2] == 0 else row[0], step, row[2] + 1]
    ids, seen = table.all()
    assert dict(zip(ids.tolist(), np.array(seen).T.tolist())) == plain
    assert len(table) == len(plain)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=5),
            st.lists(st.integers(0, 300), unique=True, max_size=5),
            st.integers(0, 5),
        ),
        max_size=8,
    )
)
def test_lists_come_back_from_json(given_lists: list[Any]) -> None:
    writer, reader, before = UnitLists(), UnitLists(), [np.empty(0, dtype=np.int64)]
    for step, own in enumerate(given_lists):
        units = before[own % len(before)] if isinstance(own, int) else np.sort(np.array(own, "i8"))
        before.append(units)
        text = json.dumps(writer.encode(step, units))
        assert reader.decode(step, json.loads(text)).tolist() == units.tolist()


def test_lists_are_small() -> None:
    lists, rng = UnitLists(), np.random.default_rng(0)
    units = np.sort(rng.choice(60_000, size=256, replace=False))
    assert len(lists.encode(0, units)) < 3 * 256
    assert lists.encode(240, units) == 0  # the same units as in step 0
    assert lists.encode(1, np.arange(256, 512)) == [256, 512]


def test_ids_become_numbers_in_one_way() -> None:
    for ids in ([7, 3], np.array([7, 3], dtype=np.uint8), torch.tensor([7, 3]), (7, 3)):
        assert as_ids(ids).tolist() == [7, 3]
    for names in (["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], dtype=object)):
        assert as_ids(names).tolist() == [name_to_id("a"), name_to_id("b")]
    assert name_to_id("a", b"x" * 32) != name_to_id("a", b"y" * 32)
    for wrong, match in [
        ([5, "5"], "both in one batch"),
        ([1.5], "one integer or name"),
        ([uuid.uuid4()], "make names of them"),
        (np.array([2**63], dtype=np.uint64), "64 signed bits"),
        ([[1], [2]], "one integer or name"),
    ]:
        with pytest.raises(InvalidInput, match=match):
            as_ids(wrong)
