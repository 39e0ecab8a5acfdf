"""A table of units: when each was first and last seen, and how often, without Python loops.

Units are 64-bit integers. The table keeps them in two sorted runs, a large one and a small one of
recent arrivals that is merged in when it has grown, so a step with m units costs O(m log N) and
not O(N). Other names (strings, bytes) become integers through 64 bits of BLAKE2b; if two names
ever collided they would count as one unit, which is the strict side.

>>> table = UnitTable()
>>> table.update(np.array([7, 3]), step=0)
>>> table.update(np.array([3, 9]), step=4)
>>> seen = table.look_up(np.array([3, 5]))
>>> seen.first.tolist(), seen.last.tolist(), seen.count.tolist()
([0, -1], [4, -1], [2, 0])
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput

Ids = NDArray[np.int64]
_FIELDS = 3  # first, last, count
_MERGE_AT = 65536
_REMEMBERED = 2**18


@dataclass(frozen=True)
class Seen:
    """What is known of each unit asked for; −1, −1, 0 where it was never seen."""

    first: Ids
    last: Ids
    count: Ids


def name_to_id(name: str | bytes, *, secret: bytes = b"") -> int:
    """64 bits of BLAKE2b of a unit's name, as a signed integer.

    With a secret, nobody who reads the ledger can try out names.
    """
    data = name.encode() if isinstance(name, str) else name
    digest = hashlib.blake2b(data, digest_size=8, key=secret).digest()
    return int.from_bytes(digest, "little", signed=True)


def as_ids(ids: Any, *, secret: bytes = b"") -> Ids:
    """Unit ids from a tensor, an array, or a list of integers or names."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray):
        items = list(ids) if isinstance(ids, Iterable) else [ids]
        if items and all(isinstance(i, str | bytes) for i in items):
            return np.array([name_to_id(i, secret=secret) for i in items], dtype=np.int64)
        ids = np.array(items, dtype=np.int64) if not items else np.asarray(items)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise InvalidInput(
            "ids must be one integer or name per example, got an array of shape "
            f"{ids.shape} and type {ids.dtype}"
        )
    if ids.dtype.kind in "US":
        names = ids.tolist()
        return np.array([name_to_id(i, secret=secret) for i in names], dtype=np.int64)
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
        raise InvalidInput("ids must fit into 64 signed bits, got a larger one; give names instead")
    return np.asarray(ids, dtype=np.int64)


class UnitTable:
    """first, last, count per unit, looked up and updated a batch at a time."""

    def __init__(self) -> None:
        self._runs = [_empty_run(), _empty_run()]
        # Where units lie that were asked for, by their bytes, for as long as no unit is added: a
        # step looks the same ones up several times, and an epoch brings back those of the last.
        self._asked: dict[bytes, list[_Place]] = {}

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self._runs)

    def look_up(self, ids: Ids) -> Seen:
        """The records of these units (distinct or not)."""
        found = list(zip(self._runs, self._places(ids)))
        for (_, data), (slots, _) in found:
            if len(slots) == len(ids):
                first, last, count = data[:, slots]
                return Seen(first=first, last=last, count=count)
        out = np.empty((_FIELDS, len(ids)), dtype=np.int64)
        out[:2], out[2] = -1, 0
        for (_, data), (slots, hit) in found:
            if len(slots):
                out[:, hit] = data[:, slots]
        return Seen(first=out[0], last=out[1], count=out[2])

    def update(self, ids: Ids, *, step: int, first: NDArray[np.bool_] | None = None) -> None:
        """These distinct units took part in `step`; where `first` is true, `first` starts anew."""
        fresh = np.ones(len(ids), dtype=bool)
        for (_, data), (slots, hit) in zip(self._runs, self._places(ids)):
            if not len(slots):
                continue
            data[1, slots] = step
            data[2, slots] += 1
            if first is not None:
                data[0, slots[first[hit]]] = step
            if len(slots) == len(ids):
                fresh = ~hit
                break
            fresh &= ~hit
        if fresh.any():
            new = np.sort(ids[fresh])
            data = np.full((_FIELDS, len(new)), step, dtype=np.int64)
            data[2] = 1
            self._insert(new, data)

    def restore(self, ids: Ids, seen: Seen) -> None:
        """Start from saved records (the table must be empty)."""
        order = np.argsort(ids)
        data = np.stack([seen.first, seen.last, seen.count])[:, order]
        self._runs = [(ids[order], np.ascontiguousarray(data)), _empty_run()]
        self._asked.clear()

    def all(self) -> tuple[Ids, Seen]:
        """Every unit with its record, in order of id."""
        ids, data = _merge(self._runs[0], self._runs[1])
        return ids, Seen(first=data[0], last=data[1], count=data[2])

    def _places(self, ids: Ids) -> list[_Place]:
        """In each run, where those of these units are that it knows."""
        key = ids.tobytes()
        found = self._asked.get(key)
        if found is None:
            if len(self._asked) * len(ids) >= _REMEMBERED:
                self._asked.clear()
            pairs = [_find(known, ids) for known, _ in self._runs]
            found = self._asked[key] = [(at[hit], hit) for at, hit in pairs]
        return found

    def _insert(self, ids: Ids, data: NDArray[np.int64]) -> None:
        self._asked.clear()
        self._runs[1] = _merge(self._runs[1], (ids, data))
        if len(self._runs[1][0]) > max(_MERGE_AT, len(self._runs[0][0]) // 8):
            self._runs = [_merge(*self._runs), _empty_run()]


_Run = tuple[Ids, NDArray[np.int64]]
_Place = tuple[NDArray[np.intp], NDArray[np.bool_]]


def _empty_run() -> _Run:
    return np.empty(0, dtype=np.int64), np.empty((_FIELDS, 0), dtype=np.int64)


def _find(known: Ids, ids: Ids) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    if not len(known):
        return np.zeros(len(ids), dtype=np.intp), np.zeros(len(ids), dtype=bool)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return at, known[at] == ids


def _merge(a: _Run, b: _Run) -> _Run:
    if not len(b[0]):
        return a
    ids = np.concatenate([a[0], b[0]])
    if not len(a[0]) or a[0][-1] < b[0][0]:
        return ids, np.concatenate([a[1], b[1]], axis=1)
    order = np.argsort(ids, kind="stable")
    return ids[order], np.concatenate([a[1], b[1]], axis=1)[:, order]
