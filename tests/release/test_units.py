"""The unit table against a dictionary."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.release import unit_index
from noshuffle.release import units as module
from noshuffle.release.unit_ids import as_ids, kind_of_ids, name_to_id
from noshuffle.release.unit_index import UnitIndex, in_order, new_index
from noshuffle.release.units import Seen, UnitTable

#: Ids that lie far apart, close together from zero on, and of both kinds.
KINDS = {
    "names": lambda rng: rng.integers(-(2**62), 2**62, 300),
    "rows": lambda rng: rng.permutation(400)[:300],
    "both": lambda rng: rng.permutation(np.arange(-150, 150)) * 997,
}


def without_c(monkeypatch):
    for place in (unit_index, module):
        monkeypatch.setattr(place, "library", lambda: None)


@pytest.fixture(params=["C", "dictionary"])
def twin(monkeypatch, request):
    """The loops in C, if they can be built here, and the same without them."""
    if request.param == "dictionary":
        without_c(monkeypatch)


@pytest.fixture(params=[(1, 0, 2), (100, 1, 64), (2**24, 16, 1024), None], ids=str)
def sizes(monkeypatch, request):
    """The array and the table of an index in C, small enough to fill up, and one without C."""
    if request.param is None:
        return without_c(monkeypatch)
    for name, value in zip(("_PLACES", "_PLACES_EACH", "_SLOTS"), request.param):
        monkeypatch.setattr(unit_index, name, value)


def test_ids_of_another_width_are_no_party_of_the_same_bytes():
    table = UnitTable()
    table.update(np.array([5, 7]), step=0)
    for asked in ([5, 0], [5, 0, 7, 0]):
        assert table.shared(np.array(asked, dtype=np.int32)) is None
    assert table.shared(np.array([5, 7], dtype=np.int32)) == (0, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("sizes")
def test_table_equals_a_dictionary(kind):
    rng = np.random.default_rng(0)
    table, slow = UnitTable(), {}
    names = KINDS[kind](rng)
    for step in range(60):
        ids = rng.choice(names, size=int(rng.integers(0, 40)), replace=False)
        anew = rng.random(len(ids)) < 0.2
        table.update(ids, step=step, first=anew)
        for i, again in zip(ids.tolist(), anew):
            first, _, count = slow.get(i, (step, step, 0))
            slow[i] = (step if again else first, step, count + 1)
        asked = rng.choice(names, size=50)
        seen = table.look_up(asked)
        got = list(zip(seen.first.tolist(), seen.last.tolist(), seen.count.tolist()))
        assert got == [slow.get(i, (-1, -1, 0)) for i in asked.tolist()]
    ids, seen = table.all()
    assert len(table) == len(slow)
    assert ids.tolist() == sorted(slow)
    copy = UnitTable()
    copy.restore(ids[::-1], module.Seen(seen.first[::-1], seen.last[::-1], seen.count[::-1]))
    assert [a.tolist() for a in vars(copy.all()[1]).values()] == [
        a.tolist() for a in vars(seen).values()
    ]


@pytest.mark.parametrize("limit", [0, 30, 2**21])
@pytest.mark.usefixtures("sizes")
def test_batches_that_come_together_equal_a_dictionary(monkeypatch, limit):
    """The same batches again and again, now and then one that cuts across them."""
    monkeypatch.setattr(module, "_IN_GROUPS", limit)
    monkeypatch.setattr(module, "_EACH", 8)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        table, slow, shared = UnitTable(), {}, 0
        names = rng.permutation(np.unique(rng.integers(-(2**62), 2**62, 100)))
        batches = np.split(names, [10, 11, 30, 30, 55])
        for step in range(120):
            ids = batches[int(rng.integers(len(batches)))]
            odd = rng.random()
            if odd < 0.05:
                ids = rng.choice(names, size=int(rng.integers(0, 40)), replace=False)
            elif odd < 0.1:
                ids = ids[::-1].copy()
            anew = [None, np.full(len(ids), rng.random() < 0.5), rng.random(len(ids)) < 0.5]
            first = anew[int(rng.choice(3, p=[0.6, 0.3, 0.1]))]
            for _ in range(1 + (rng.random() < 0.2)):  # done again, it counts once
                table.update(ids, step=step, first=first)
            for i, again in zip(ids.tolist(), [False] * len(ids) if first is None else first):
                began, _, count = slow.get(i, (step, step, 0))
                slow[i] = (step if again else began, step, count + 1)
            for asked in (batches[int(rng.integers(len(batches)))], rng.choice(names, size=20)):
                seen = table.look_up(asked)
                got = list(zip(seen.first.tolist(), seen.last.tolist(), seen.count.tolist()))
                wanted = [slow.get(i, (-1, -1, 0)) for i in asked.tolist()]
                assert got == wanted
                one = table.shared(asked)
                assert one is None or set(wanted) == {one}
                shared += one is not None
                if one is not None:  # those that come first among them have it too
                    assert table.shared(asked[: (len(asked) + 1) // 2]) == one
                    assert table.shared(asked[1:]) is None
            if rng.random() < 0.02:
                copy = UnitTable()
                copy.restore(*table.all())
                table = copy
        ids, seen = table.all()
        rows = zip(seen.first.tolist(), seen.last.tolist(), seen.count.tolist())
        assert dict(zip(ids.tolist(), rows)) == slow
        assert table._grouped == sum(len(p.rows) + 8 for p in table._groups.values()) <= limit
        assert sorted(table._firsts.values()) == sorted(table._groups)
        assert (shared > 0) == (limit > 0)


@pytest.mark.parametrize(
    "place",
    [
        "_found",
        "_append",
        "_move_on",
        "_part",
        "_write",
        "add",
        "_widen",
        "place",
        "_grow",
        "add without C",
        "place without C",
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "behind"])
def test_an_interrupted_update_is_done_again(monkeypatch, place, is_late):
    for name, value in {"_PLACES": 12, "_PLACES_EACH": 0, "_SLOTS": 2}.items():
        monkeypatch.setattr(unit_index, name, value)
    place, _, is_slow = place.partition(" ")
    if is_slow:
        without_c(monkeypatch)
    rng = np.random.default_rng(0)
    table, slow = UnitTable(), {}
    where = UnitTable if hasattr(UnitTable, place) else type(table._index)
    if not hasattr(where, place):
        pytest.skip("no compiler here")
    real, hits, is_armed = getattr(where, place), 0, True

    def interrupted(*args, **options):
        nonlocal hits, is_armed
        found = real(*args, **options) if is_late or not is_armed else None
        if is_armed:
            hits, is_armed = hits + 1, False
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(where, place, interrupted)
    batches = [np.arange(4 * i, 4 * i + 4) for i in range(6)]
    for step in range(200):
        ids = batches[step % 6] if rng.random() < 0.9 else rng.choice(30, size=3, replace=False)
        for i in ids.tolist():
            began, _, count = slow.get(i, (step, step, 0))
            slow[i] = (began, step, count + 1)
        is_armed = bool(rng.random() < 0.7)
        try:
            table.update(ids, step=step)
        except KeyboardInterrupt:
            table.update(ids, step=step)
    is_armed = False
    assert hits > {"_widen": 1}.get(place, 2)
    ids, seen = table.all()
    rows = zip(seen.first.tolist(), seen.last.tolist(), seen.count.tolist())
    assert dict(zip(ids.tolist(), rows)) == slow


def added(index, units):
    """The rows of new units."""
    rows = index.place(np.array(units))
    index.add(np.array(units))
    return rows.tolist()


@pytest.mark.usefixtures("twin")
def test_units_keep_their_rows_when_the_index_widens(monkeypatch):
    """Who came when its number was too large stays where it is; its neighbours come near."""
    monkeypatch.setattr(unit_index, "_PLACES", 16)
    index, units = new_index(), [40, 9, 70, 1000, -1]
    rows = added(index, units)
    assert index.find(np.array([41, 10, 71, 24])).tolist() == [-1] * 4
    for more in ([41, 17, 8], [200, 42], list(range(300, 340))):
        rows += added(index, more)
        units += more
    assert index.likely > 300 or not isinstance(index, UnitIndex)
    assert index.find(np.array(units)).tolist() == rows
    assert index.find(np.array([71, 1001, -2, 299, 2**62, 340])).tolist() == [-1] * 6
    assert len(set(rows)) == len(units) == len(index)
    assert max(rows) < index.rows
    assert index.units.tolist() == sorted(units)


def test_large_batches_move_on_as_their_twin_does(monkeypatch):
    """Records, spreads and rows of both, for rows and names, new, old, mixed and out of order."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        tables = [UnitTable()]
        with monkeypatch.context() as patch:
            without_c(patch)
            tables.append(UnitTable())
        names = rng.permutation(9000)
        if seed % 2:
            names = names * 0x9E3779B97F4A7C1 - 2**61
        for step in range(12):
            ids = np.sort(rng.choice(names, size=int(rng.integers(1, 5000)), replace=False))
            told = []
            for table, is_slow in zip(tables, (False, True)):
                with monkeypatch.context() as patch:
                    if is_slow:
                        without_c(patch)
                    seen, spread = table.look_up(ids), table.spread(ids)
                    own = np.stack([seen.first, seen.last, seen.count])[:, seen.count > 0]
                    assert spread.known == own.shape[1]
                    if spread.known:
                        assert spread.low[:3] == tuple(own.min(axis=1))
                        assert spread.high[:3] == tuple(own.max(axis=1))
                    table.update(ids, step=step)
                    units, all_seen = table.all()
                    told.append([units, all_seen.first, all_seen.last, all_seen.count])
            for a, b in zip(*told):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 5000])
def test_sorting_equals_numpy(size):
    rng = np.random.default_rng(size)
    ends = np.array([-(2**63), 2**63 - 1, 0, -1])
    for units in (rng.integers(-(2**63), 2**63 - 1, size), rng.integers(-9, 9, size)):
        units[: min(4, size)] = ends[: min(4, size)]
        kept = units.copy()
        assert in_order(units).tolist() == np.sort(kept).tolist()
        assert units.tolist() == kept.tolist()


def test_what_a_table_tells_is_not_the_table():
    table = UnitTable()
    table.restore(np.array([3, 5]), Seen(*np.array([[0, 1], [0, 1], [1, 1]])))
    for _ in range(2):
        for ids, seen in (table.all(), (np.array([3, 5]), table.look_up(np.array([3, 5])))):
            assert ids.tolist() == [3, 5]
            assert seen.count.tolist() == [1, 1]
            seen.count[:], seen.last[:], ids[:] = 0, -1, 9
    told = table.all()[1]
    table.update(np.array([3, 5]), step=4)
    assert told.last.tolist() == [0, 1]


def test_ids_of_many_kinds():
    want = [3, 1, 2]
    for given in ([3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.uint8), torch.tensor([3, 1, 2])):
        assert as_ids(given).tolist() == want
    assert as_ids(["ann", "bob"]).tolist() == [name_to_id("ann"), name_to_id("bob")]
    assert as_ids(np.array(["ann"])).tolist() == [name_to_id("ann")]
    assert len({*as_ids(["\ud800", "\udfff", "?"]).tolist()}) == 3  # half a pair, as JSON may hold
    assert as_ids([]).dtype == np.int64
    for bad in (
        [1.5, 2.5],
        [5, "ann"],
        torch.zeros(2, 2, dtype=torch.long),
        np.array([2**63], np.uint64),
    ):
        with pytest.raises(InvalidInput, match="ids must"):
            as_ids(bad)


def test_ids_of_pandas_are_those_of_a_list() -> None:
    names = ["ann", "bob", "7"]
    for array in (np.array(names, dtype=object), np.array(names, dtype=np.dtypes.StringDType())):
        assert as_ids(array).tolist() == as_ids(names).tolist()
        assert kind_of_ids(array) == "names"
    assert as_ids(np.array([3, 5], dtype=object)).tolist() == [3, 5]
    assert kind_of_ids(np.array([3, 5], dtype=object)) == "integers"


@pytest.mark.parametrize("one", [("a", 1), (1, 2), uuid.UUID(int=3), None])
def test_what_is_no_id_is_named(one: object) -> None:
    with pytest.raises(InvalidInput, match=rf"got one of type {type(one).__name__}; make names"):
        as_ids([one, one])
