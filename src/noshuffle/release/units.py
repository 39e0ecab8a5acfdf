"""A table of units: when each was first and last seen, and how often, without Python loops.

Units are 64-bit integers in three sorted runs, a large one and two smaller ones of recent arrivals,
each merged into the next when it has grown, so a step with m units costs O(m log N) and not O(N).
Names become integers through 64 bits of BLAKE2b; two that collided would count as one unit, which
is the strict side.

Most batches are the same in every epoch, so their units always come together and have one record
between them. Such a party is kept by the bytes of its units: to ask for it, or to move it on, takes
one look into a dictionary. The first batch that cuts across it ends it.

State: the runs, with the number of each unit's party, and the records of the parties, which
are written into the runs when somebody asks for a unit in another way.

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
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput

Ids = NDArray[np.int64]
#: first, last, count
Record = tuple[int, int, int]
_FIELDS = 4  # the same, and the number of a party (0: none)
#: How large the runs behind the first may grow.
_SMALL = (65536, 4096)
_REMEMBERED = 2**18
_IN_PARTIES = 2**21


@dataclass(frozen=True)
class Seen:
    """What is known of each unit asked for; −1, −1, 0 where it was never seen."""

    first: Ids
    last: Ids
    count: Ids

    def record(self, i: int) -> Record:
        """That of one unit."""
        return int(self.first[i]), int(self.last[i]), int(self.count[i])


def name_to_id(name: str | bytes, *, secret: bytes = b"") -> int:
    """64 bits of BLAKE2b of a unit's name, as a signed integer.

    With a secret, nobody who reads the ledger can try out names.
    """
    data = name.encode() if isinstance(name, str) else name
    digest = hashlib.blake2b(data, digest_size=8, key=secret).digest()
    return int.from_bytes(digest, "little", signed=True)


def kind_of_ids(ids: Any) -> str:
    """ "integers" or "names"; "" for none at all. What is neither, `as_ids` refuses."""
    if isinstance(ids, Tensor):
        return "integers" if ids.numel() else ""
    if isinstance(ids, np.ndarray):
        return ("names" if ids.dtype.kind in "US" else "integers") if ids.size else ""
    first = next(iter(ids), None) if isinstance(ids, Iterable) else ids
    return "" if first is None else "names" if isinstance(first, str | bytes) else "integers"


def as_ids(ids: Any, *, secret: bytes = b"") -> Ids:
    """Unit ids from a tensor, an array, or a list of integers or names."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray):
        items = list(ids) if isinstance(ids, Iterable) else [ids]
        if items and all(isinstance(i, str | bytes) for i in items):
            return np.array([name_to_id(i, secret=secret) for i in items], dtype=np.int64)
        ids = np.array(items, dtype=np.int64) if not items else np.asarray(items)
        if ids.dtype.kind in "US":  # NumPy made names of the numbers among them
            raise InvalidInput(
                "ids must all be integers or all be names, got both in one batch; 5 and '5' would "
                "count as two units"
            )
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise InvalidInput(
            "ids must be one integer or name per example, got an array of shape "
            f"{ids.shape} and type {ids.dtype}"
        )
    if ids.dtype.kind in "US":
        return as_ids(ids.tolist(), secret=secret)
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
        raise InvalidInput("ids must fit into 64 signed bits, got a larger one; give names instead")
    return np.asarray(ids, dtype=np.int64)


#: Rows of batches that are remembered.
_MOST_ROWS = 2**21


class BatchCache:
    """The units of batches that came before, in order, by the bytes of their ids.

    To find the distinct units of a batch is a sort, and an epoch brings the same batches again.
    Only batches in which every row counts; when they hold two million rows it starts anew.
    """

    def __init__(self) -> None:
        self._batches: dict[bytes, tuple[Ids, bytes]] = {}
        self._rows = 0

    def get(self, ids: bytes) -> tuple[Ids, bytes] | None:
        """The units of the batch whose ids have these bytes, and their bytes."""
        return self._batches.get(ids)

    def add(self, ids: bytes, units: Ids) -> None:
        """Remember a batch, and keep its units from being changed."""
        rows = len(ids) // 8
        if self._rows + rows > _MOST_ROWS:
            self._batches, self._rows = {}, 0
        units.flags.writeable = False
        key = units.tobytes()
        self._batches[ids] = (units, ids if key == ids else key)
        self._rows += rows


class UnitTable:
    """first, last, count per unit, looked up and updated a batch at a time.

    Guarantees: the answers are those of a dictionary from units to records, whichever way units
    come together. An update that was interrupted may be done again, and then counts once.
    """

    def __init__(self) -> None:
        self._runs = [_empty_run() for _ in range(1 + len(_SMALL))]
        # Where units lie that were asked for, by their bytes, for as long as no unit is added: a
        # step looks the same ones up several times, and an epoch brings back those of the last.
        self._asked: dict[bytes, list[_Place]] = {}
        # A party is in both dictionaries, or it is none: numbers in the runs may be of former ones.
        self._parties: dict[bytes, Record] = {}
        self._numbers: dict[int, bytes] = {}
        self._behind: set[bytes] = set()  # parties whose records in the runs are old
        self._founded = self._members = 0

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self._runs)

    def shared(self, key: bytes) -> Record | None:
        """The one record of the units with these bytes, if they have always come together."""
        return self._parties.get(key)

    def look_up(self, ids: Ids) -> Seen:
        """The records of these units (distinct or not)."""
        ids = np.asarray(ids, dtype=np.int64)  # of another width, others have the same bytes
        one = self._parties.get(ids.tobytes())
        if one is not None:
            first, last, count = np.repeat(np.array(one), len(ids)).reshape(3, -1)
            return Seen(first=first, last=last, count=count)
        self._write_back()
        found = list(zip(self._runs, self._places(ids)))
        for (_, data), (slots, _) in found:
            if len(slots) == len(ids):
                first, last, count = data[:3, slots]
                return Seen(first=first, last=last, count=count)
        out = np.empty((3, len(ids)), dtype=np.int64)
        out[:2], out[2] = -1, 0
        for (_, data), (slots, hit) in found:
            if len(slots):
                out[:, hit] = data[:3, slots]
        return Seen(first=out[0], last=out[1], count=out[2])

    def update(self, ids: Ids, *, step: int, first: NDArray[np.bool_] | None = None) -> None:
        """These distinct units took part in `step`; where `first` is true, `first` starts anew."""
        ids = np.asarray(ids, dtype=np.int64)
        if not len(ids):
            return
        key = ids.tobytes()
        if key in self._parties and (first is None or first.all() == first.any()):
            self._move_on(key, step=step, is_anew=first is not None and bool(first[0]))
            return
        self._part(ids)
        fresh = np.ones(len(ids), dtype=bool)
        for (_, data), (slots, hit) in zip(self._runs, self._places(ids)):
            if not len(slots):
                continue
            own = data[:, slots]
            own[2] += own[1] != step
            own[1] = step
            if first is not None:
                own[0, first[hit]] = step
            is_party = len(slots) == len(ids) and bool((own[:3] == own[:3, :1]).all())
            own[3] = number = self._new_number(len(ids)) if is_party else 0
            # All fields at once: an interrupt finds these units before the step or behind it.
            data[:, slots] = own
            if number:
                self._found(key, number, (int(own[0, 0]), step, int(own[2, 0])))
            fresh &= ~hit
        if fresh.any():
            new = np.sort(ids[fresh])
            number = self._new_number(len(ids)) if len(new) == len(ids) else 0
            data = np.array([[step], [step], [1], [number]], dtype=np.int64)
            self._insert(new, data.repeat(len(new), axis=1))
            if number:
                self._found(key, number, (step, step, 1))

    def restore(self, ids: Ids, seen: Seen) -> None:
        """Start from saved records (the table must be empty)."""
        order = np.argsort(ids)
        none = np.zeros(len(ids), dtype=np.int64)
        data = np.stack([seen.first, seen.last, seen.count, none])[:, order]
        self._runs[0] = (ids[order], np.ascontiguousarray(data))
        self._asked.clear()

    def all(self) -> tuple[Ids, Seen]:
        """Every unit with its record, in order of id; theirs to change."""
        self._write_back()
        ids, data = reduce(_merge, self._runs)
        first, last, count = data[:3].copy()
        return ids.copy(), Seen(first=first, last=last, count=count)

    def _new_number(self, members: int) -> int:
        """The number of a party to come, 0 where there is no room for it."""
        if self._members + members > _IN_PARTIES:
            return 0
        self._founded += 1
        return self._founded

    def _found(self, key: bytes, number: int, record: Record) -> None:
        """A party that the runs know of already."""
        self._members += len(key) // 8
        self._numbers[number] = key
        self._parties[key] = record

    def _move_on(self, key: bytes, *, step: int, is_anew: bool) -> None:
        first, last, count = self._parties[key]
        if last != step:
            self._behind.add(key)
            self._parties[key] = (step if is_anew else first, step, count + 1)

    def _part(self, ids: Ids) -> None:
        """End the parties that these units are of; the runs know everything of them then."""
        if not self._numbers:
            return
        for (_, data), (slots, _) in zip(self._runs, self._places(ids)):
            for number in self._numbers.keys() & set(data[3, slots].tolist()):
                key = self._numbers[number]
                self._write(key)
                if self._parties.pop(key, None) is not None:
                    self._members -= len(key) // 8
                del self._numbers[number]

    def _write_back(self) -> None:
        for key in list(self._behind):
            self._write(key)

    def _write(self, key: bytes) -> None:
        """Bring the runs up to date with one party."""
        if key in self._behind:
            record = np.array(self._parties[key])[:, None]
            places = self._places(np.frombuffer(key, dtype=np.int64))
            for (_, data), (slots, _) in zip(self._runs, places):
                data[:3, slots] = record
            self._behind.discard(key)

    def _places(self, ids: Ids) -> list[_Place]:
        """In each run, where those of these units are that it knows."""
        key = ids.tobytes()
        found = self._asked.get(key)
        if found is None:
            if len(self._asked) * len(ids) >= _REMEMBERED:
                self._asked.clear()
            low = int(ids.min()) if len(ids) else 0
            found = self._asked[key] = [_find(known, ids, low=low) for known, _ in self._runs]
        return found

    def _insert(self, ids: Ids, data: NDArray[np.int64]) -> None:
        runs = [*self._runs[:-1], _merge(self._runs[-1], (ids, data))]
        for i in range(len(_SMALL), 0, -1):
            if len(runs[i][0]) > max(_SMALL[i - 1], len(runs[0][0]) // 8 if i == 1 else 0):
                runs[i - 1 : i + 1] = [_merge(*runs[i - 1 : i + 1]), _empty_run()]
        self._asked.clear()
        self._runs = runs


_Run = tuple[Ids, NDArray[np.int64]]
_Place = tuple[NDArray[np.intp], NDArray[np.bool_]]


def _empty_run() -> _Run:
    return np.empty(0, dtype=np.int64), np.empty((_FIELDS, 0), dtype=np.int64)


def _find(known: Ids, ids: Ids, *, low: int) -> _Place:
    """Where those of these units are that a run knows, and which they are; none is below `low`."""
    if not len(known) or low > known[-1]:
        return np.empty(0, dtype=np.intp), np.zeros(len(ids), dtype=bool)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    hit = known[at] == ids
    return at[hit], hit


def _merge(a: _Run, b: _Run) -> _Run:
    if not len(b[0]):
        return a
    ids = np.concatenate([a[0], b[0]])
    if not len(a[0]) or a[0][-1] < b[0][0]:
        return ids, np.concatenate([a[1], b[1]], axis=1)
    order = np.argsort(ids, kind="stable")
    return ids[order], np.concatenate([a[1], b[1]], axis=1)[:, order]
