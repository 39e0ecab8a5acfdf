"""Units of a stream against a set of all that was seen."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from noshuffle.convex import stream_units
from noshuffle.convex.stream_units import StreamUnits
from noshuffle.errors import ParticipationViolation

NONE = np.empty(0, dtype=np.int64)


@pytest.mark.parametrize("most", [1, 3, 1024])
@pytest.mark.parametrize("may_repeat", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_comes_twice_whatever_the_pieces(
    most: int, may_repeat: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_units, "_MOST_SINGLE", most)
    luck = np.random.default_rng(seed)
    units, seen, pending = StreamUnits(may_repeat=may_repeat), set[int](), list[int]()
    refused = 0
    for _ in range(300):
        ids = luck.integers(500, size=luck.choice([1, 1, 1, 2, 5])).tolist()
        is_new = not seen & set(ids) and (may_repeat or len(set(ids)) == len(ids))
        if is_new:
            units.admit(len(ids), ids, barred=NONE, bind_fn=lambda kind: None)
            seen |= set(ids)
            pending += ids
        else:
            with pytest.raises(ParticipationViolation, match="came twice"):
                units.admit(len(ids), ids, barred=NONE, bind_fn=lambda kind: None)
            refused += 1
        if luck.random() < 0.1:
            count = int(luck.integers(len(pending) + 1))
            assert units.of_batch(0, count, come_again=False).tolist() == pending[:count]
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
        units.admit(len(ids), ids, barred=NONE, bind_fn=lambda kind: None)
    for _ in range(2):
        assert units.of_batch(1, 3, come_again=True).tolist() == [9, 2, 7]
    assert units.of_batch(0, 5, come_again=True).tolist() == list(chain(*own))


def test_a_single_unit_whose_budget_is_used_up() -> None:
    units = StreamUnits(may_repeat=False)
    with pytest.raises(ParticipationViolation, match="used up"):
        units.admit(1, [3], barred=np.array([3]), bind_fn=lambda kind: None)
    units.admit(1, [4], barred=np.array([3]), bind_fn=lambda kind: None)
    assert units.state()["units"].tolist() == [4]
