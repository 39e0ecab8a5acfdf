"""The unit table against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.training import units as module
from noshuffle.training.units import UnitTable, as_ids, name_to_id


@pytest.mark.parametrize("merge_at", [1, 7, 65536])
def test_table_equals_a_dictionary(monkeypatch, merge_at):
    monkeypatch.setattr(module, "_MERGE_AT", merge_at)
    rng = np.random.default_rng(0)
    table, slow = UnitTable(), {}
    names = rng.integers(-(2**62), 2**62, 300)
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


def test_ids_of_many_kinds():
    want = [3, 1, 2]
    for given in ([3, 1, 2], (3, 1, 2), np.array([3, 1, 2], np.uint8), torch.tensor([3, 1, 2])):
        assert as_ids(given).tolist() == want
    assert as_ids(["ann", "bob"]).tolist() == [name_to_id("ann"), name_to_id("bob")]
    assert as_ids(np.array(["ann"])).tolist() == [name_to_id("ann")]
    assert as_ids([]).dtype == np.int64
    for bad in ([1.5, 2.5], torch.zeros(2, 2, dtype=torch.long), np.array([2**63], np.uint64)):
        with pytest.raises(InvalidInput, match="ids must"):
            as_ids(bad)
