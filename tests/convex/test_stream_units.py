"""Units of a stream against a set of all that was seen."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from noshuffle.convex import stream_units
from noshuffle.convex.stream_units import StreamUnits
from noshuffle.errors import InvalidInput, ParticipationViolation


def admit(units: StreamUnits, ids: Any) -> None:
    units.take(units.check(len(ids), ids))


def leave(units: StreamUnits, count: int) -> list[int]:
    found = units.first(count).tolist()
    units.drop(count)
    return found


@pytest.mark.parametrize("most", [1, 3, 1024])
@pytest.mark.parametrize("may_repeat", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_comes_twice_whatever_the_pieces(
    most: int, may_repeat: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_units, "_MOST_GONE", most)
    monkeypatch.setattr(stream_units, "_MOST_SINGLE", most)
    luck = np.random.default_rng(seed)
    units, seen, pending = StreamUnits(may_repeat=may_repeat), set[int](), list[int]()
    refused = 0
    for _ in range(300):
        ids = luck.integers(500, size=luck.choice([1, 1, 1, 2, 5])).tolist()
        is_new = not seen & set(ids) and (may_repeat or len(set(ids)) == len(ids))
        if is_new:
            admit(units, ids)
            seen |= set(ids)
            pending += ids
        else:
            with pytest.raises(ParticipationViolation, match="came twice"):
                admit(units, ids)
            refused += 1
        if luck.random() < 0.1:
            count = int(luck.integers(len(pending) + 1))
            assert leave(units, count) == pending[:count]
            pending = pending[count:]
        if luck.random() < 0.05:
            state, units = units.state(), StreamUnits(may_repeat=may_repeat)
            units.load(state)
    assert sorted(units.state()["units"].tolist()) == sorted(seen)
    assert units.state()["pending"].tolist() == pending
    assert 20 < refused < 280


def test_a_pass_comes_again_in_its_order() -> None:
    units, own = StreamUnits(may_repeat=False), [[4], [9], [2, 7], [1]]
    for ids in own:
        admit(units, ids)
    for _ in range(2):
        assert units.first(3, after=1).tolist() == [9, 2, 7]
    assert units.first(5).tolist() == list(chain(*own))


@pytest.mark.parametrize("first", [[7], ["7"]])
def test_single_ids_are_those_of_many(first: list[Any]) -> None:
    """Plain ones take a path of their own; it gives the same units, kinds and refusals."""
    kind = type(first[0])
    one, many = StreamUnits(may_repeat=False), StreamUnits(may_repeat=False)
    many.secret = one.secret
    for units in (one, many):
        admit(units, first)
    own = [kind(v) for v in range(10, 20)]
    for unit in own:
        admit(one, [unit])
    admit(many, own)
    assert one.first(11).tolist() == many.first(11).tolist()
    assert sorted(one.state()["units"].tolist()) == sorted(many.state()["units"].tolist())
    for units in (one, many):
        with pytest.raises(ParticipationViolation, match="came twice"):
            admit(units, [kind(15)])
        for wrong in ([2**70], [True], [1.0], [None], ["7"] if kind is int else [7], [b"7", 7]):
            with pytest.raises((InvalidInput, OverflowError)):
                admit(units, wrong)
        assert len(units.state()["units"]) == 11
    admit(one, np.array([30]) if kind is int else np.array(["30"]))
    with pytest.raises(ParticipationViolation, match="came twice"):
        admit(one, [kind(30)])
