"""Roles as text and compact: one task from either file."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle.datasets.text import ENGLISH, GERMAN, read_roles
from noshuffle.errors import InvalidInput
from noshuffle.federated.tasks import german_drama

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def drama(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the benchmarks on these roles read and write."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("drama_data")


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "roles.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf8") as file:
        for i in range(25):
            words = ["Grüße " * int(rng.integers(0, 9)), "漢!" if i % 3 else "ja"]
            role = {"user": f"play{i // 5}/Röle {i}", "year": 1800 + i, "speeches": words}
            file.write(json.dumps(role, ensure_ascii=False) + "\n")
    return path


def test_compact_roles_are_the_same_task(roles: Path, tmp_path: Path, drama: Any) -> None:
    small = tmp_path / "roles.npz"
    drama.compact(roles, small, longest=33)
    for length, most in ((10, 3), (5, 2)):
        a, b = (drama.load(f, length=length, most_windows=most) for f in (roles, small))
        assert a.users == b.users
        assert len(a) == 23
        assert a.years is not None
        assert np.array_equal(a.years, b.years)
        assert np.array_equal(a.starts, b.starts)
        for name in ("x", "y", "x_test", "y_test"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_compact_roles_of_another_kind_are_refused(roles: Path, tmp_path: Path, drama: Any) -> None:
    small = tmp_path / "roles.npz"
    drama.compact(roles, small, longest=20)
    with pytest.raises(InvalidInput, match="cut to 20 characters where 33"):
        drama.load(small, length=10, most_windows=3)
    drama.compact(roles, small, alphabet=ENGLISH, longest=33)
    with pytest.raises(InvalidInput, match="another alphabet"):
        drama.load(small, length=10, most_windows=3)
    with pytest.raises(InvalidInput, match="255"):
        drama.compact(roles, small, alphabet="".join(map(chr, range(300, 600))))
    assert [len(s) for _, _, s in read_roles(roles, alphabet=ENGLISH, longest=2)] == [2] * 25
    assert set(GERMAN) > set(ENGLISH)


def test_a_drifting_population(roles: Path, drama: Any) -> None:
    task = german_drama(length=5, most_windows=1, file=roles)
    order = drama.drifting(task, rounds=10, present=6, seed=1)
    assert order(3) == order(3) != order(4)
    places = [sorted(task.place(user) for user in order(t)) for t in range(12)]
    assert places[0] == list(range(6))
    assert places[9] == places[11] == list(range(17, 23))
    assert all(np.ptp(there) == 5 for there in places)
    assert {p for there in places for p in there} == set(range(23))
    with pytest.raises(InvalidInput, match="present"):
        drama.drifting(task, rounds=10, present=24)
