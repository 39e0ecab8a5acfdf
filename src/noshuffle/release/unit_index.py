"""Which row belongs to a unit, and units in order.

    find(units) → rows, −1 where a unit has none          add(units): rows in order of arrival

Integers from zero on, as rows of a data set have, are places of an array. Others, as names and
negative numbers give, are in an open hash table (`native/units.c`), by a secret multiplier, at most
two thirds full. Without a compiler they lie in two sorted runs, a large one and one of recent
arrivals that is merged into it when it has an eighth of its size. Sorting is a radix sort in C.

State: the units by row; the array, and the table or the runs.

>>> index = UnitIndex()
>>> index.add(np.array([7, -3]))
>>> index.find(np.array([-3, 5, 7])).tolist(), index.units.tolist()
([1, -1, 0], [7, -3])
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.c_library import build, text_of
from noshuffle.errors import Unsupported

Units = NDArray[np.int64]
#: Places of the array however few units there are, and for each unit.
_PLACES, _PLACES_EACH = 2**24, 16
#: Slots of an empty hash table, a power of two.
_SLOTS = 1024
#: Units in the run of recent arrivals, at least.
_RECENT = 4096
#: A buffer that sorting keeps, for each thread, and how many units of it.
_scratch, _MOST_SCRATCH = threading.local(), 2**20
#: Units below which numpy sorts faster than the radix sort.
_FEW = 2048


class UnitIndex:
    """Rows of distinct units.

    Guarantees: the answers of a dictionary. An `add` that was interrupted has added nothing, or
    everything.
    """

    def __init__(self) -> None:
        none = np.empty((2, 0), dtype=np.int64)
        self._known = np.zeros(1, dtype=np.int64)  # those without a place, by row, and room behind
        self._count = 0
        self._places = np.zeros(0, dtype=np.int32)  # row + 1 of the units from 0 on; 0: none
        self._marks = np.zeros(1, dtype=np.uint8)  # a bit for each of them
        self._runs = none, none  # units and rows
        self._c = library()
        self._mixer = int.from_bytes(os.urandom(8), "little") | 1
        self._slots, self._far = np.zeros(_SLOTS, dtype=np.uint64), 0  # units in them
        self._unsure: Units | None = None  # of an `add` that may have been interrupted

    def __len__(self) -> int:
        return self._count

    @property
    def units(self) -> Units:
        """By row."""
        out, near = self._known[: self._count].copy(), np.flatnonzero(self._places)
        rows = self._places[near] - np.int64(1)
        kept = rows < self._count  # others are of an `add` that was interrupted
        out[rows[kept]] = near[kept]
        return out

    @property
    def likely(self) -> int:
        """Units that may come: if they are numbers of rows, as many as there are places."""
        return len(self._places)

    def find(self, units: Units) -> Units:
        """The row of every unit, −1 where it has none."""
        if self._unsure is not None:
            self._take_back(self._unsure)
        size = len(self._places)
        if self._c is not None:
            units, rows = np.ascontiguousarray(units), np.empty(len(units), dtype=np.int64)
            tables = self._tables()
            self._c.units_find(*tables, address(units), len(units), address(rows))
            return rows
        if not size or not len(units):
            rows = np.full(len(units), -1, dtype=np.int64)
        elif units.min() >= 0 and units.max() < size:
            rows = self._places.take(units) - np.int64(1)
        else:
            rows = self._places.take(units, mode="clip") - np.int64(1)
            rows[(units < 0) | (units >= size)] = -1
        for known, own in self._runs:
            if len(known):
                at = np.minimum(np.searchsorted(known, units), len(known) - 1)
                rows = np.where(known[at] == units, own[at], rows)
        return rows

    def add(self, units: Units) -> None:
        """Distinct units without a row get the next ones."""
        if self._unsure is not None:
            self._take_back(self._unsure)
        start, end = self._count, self._count + len(units)
        if end >= 1 << 31:
            raise Unsupported(f"the guard holds up to two thousand million units, got {end}")
        self._unsure = np.array(units) if self._c is None else units[:0]
        self._widen(int(units.max()) + 1 if len(units) else 0, most=_PLACES_EACH * end)
        self._known = with_room(self._known, end, likely=self.likely)
        if self._c is not None:
            units = np.ascontiguousarray(units)
            far = self._c.units_far(address(units), len(units), len(self._places))
            if 3 * (self._far + far) > 2 * len(self._slots):
                self._rebuild(size=len(self._places), slots=4 * (self._far + far))
            self._c.units_add(*self._tables(), address(units), len(units), start)
            self._far += far
        else:
            self._known[start:end] = units
            rows = np.arange(start, end)
            is_far = (units < 0) | (units >= len(self._places))
            if is_far.any():
                self._add_to_runs(np.stack([units[is_far], rows[is_far]]))
                units, rows = units[~is_far], rows[~is_far]
            self._places[units] = rows + 1
        self._count = end
        self._unsure = None

    def _tables(self) -> tuple[int, ...]:
        """What the loops in C are told of the index."""
        near = address(self._places), address(self._marks), len(self._places)
        bits = len(self._slots).bit_length() - 1
        return *near, address(self._slots), bits, self._mixer, address(self._known)

    def _widen(self, size: int, *, most: int) -> None:
        """Places for the units below `size`, if they are not too many."""
        if len(self._places) < size <= max(_PLACES, most):
            size = min(2 * size, max(_PLACES, most))
            if self._far:  # some of those in the table have a place now
                self._rebuild(size=size, slots=len(self._slots))
                return
            wider, marks = _zeros(size, np.int32), _zeros(size // 8 + 1, np.uint8)
            wider[: len(self._places)], marks[: len(self._marks)] = self._places, self._marks
            self._places, self._marks = wider, marks

    def _rebuild(self, *, size: int, slots: int) -> None:
        """So many places, and so many slots or up to twice as many, from the units by row.

        An interrupt finds the arrays as they were or as they are, and `units` knows all of either.
        """
        assert self._c is not None
        units, known = self.units, address(self._known)  # where nothing changes
        places, marks = _zeros(size, np.int32), _zeros(size // 8 + 1, np.uint8)
        table = _zeros(1 << max(slots - 1, 1).bit_length(), np.uint64)
        near = address(places), address(marks), size
        tables = *near, address(table), len(table).bit_length() - 1, self._mixer, known
        self._c.units_add(*tables, address(units), len(units), 0)
        far = self._c.units_far(address(units), len(units), size)
        self._places, self._marks, self._slots, self._far = places, marks, table, far

    def _add_to_runs(self, new: Units) -> None:
        large, recent = self._runs[0], _merged(self._runs[1], new)
        if recent.shape[1] > max(_RECENT, large.shape[1] // 8):
            large, recent = _merged(large, recent), recent[:, :0]
        self._runs = large, recent

    def _take_back(self, units: Units) -> None:
        """Forget rows that no unit has got."""
        if self._c is not None:
            self._rebuild(size=len(self._places), slots=len(self._slots))
            self._unsure = None
            return
        near = units[(units >= 0) & (units < len(self._places))]
        self._places[near[self._places[near] > self._count]] = 0
        large, recent = (run[:, run[1] < self._count] for run in self._runs)
        self._runs = large, recent
        self._unsure = None


def _merged(a: Units, b: Units) -> Units:
    both = np.concatenate([a, b], axis=1)
    return both[:, np.argsort(both[0], kind="stable")]


def with_room(array: NDArray[Any], rows: int, *, likely: int = 0) -> NDArray[Any]:
    """The array, or one with its rows and room for so many: twice those it has, or `likely`.

    What lies behind its rows is not set, and takes no memory before it is. (numpy asks for huge
    pages for such an array, which makes new memory ten times cheaper.)
    """
    if rows <= len(array):
        return array
    wider = np.empty((max(rows, likely, len(array) * 2), *array.shape[1:]), dtype=array.dtype)
    wider[: len(array)] = array
    return wider


def _zeros(count: int, dtype: type) -> NDArray[Any]:
    out: NDArray[Any] = np.empty(count, dtype=dtype)
    out.fill(0)
    return out


def in_order(units: Units) -> Units:
    """A sorted copy."""
    built = library() if len(units) >= _FEW else None
    return np.sort(units) if built is None else _radix_sorted(built, units)


def increases(units: Units) -> bool:
    """Whether every unit is larger than the one before it."""
    built = library() if len(units) >= _FEW else None
    if built is None:
        return bool((units[1:] > units[:-1]).all())
    units = np.ascontiguousarray(units)
    return bool(built.units_increase(address(units), len(units)))


def address(array: NDArray[Any]) -> int:
    """Where its first item is; for arrays without gaps, which the caller keeps."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _radix_sorted(built: ctypes.CDLL, units: Units) -> Units:
    units = np.ascontiguousarray(units)
    out, aside = np.empty_like(units), getattr(_scratch, "aside", None)
    if aside is None or not len(units) <= len(aside) <= _MOST_SCRATCH:
        aside = _scratch.aside = np.empty_like(units)
    built.units_sort(address(units), address(out), address(aside), len(units))
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: they are handed out only after they were found to do what numpy does.
    """
    built = build(text_of("units.c"))
    return built if built is not None and agrees(built) else None


def agrees(built: ctypes.CDLL) -> bool:
    array, number = ctypes.c_void_p, ctypes.c_int64
    tables = (array, array, number, array, number, ctypes.c_uint64, array)
    for name, types in {
        "units_sort": (array, array, array, number),
        "units_increase": (array, number),
        "units_find": (*tables, array, number, array),
        "units_add": (*tables, array, number, number),
        "units_far": (array, number, number),
        "units_spread": (array, array, number, array),
        "units_move": (array, array, number, ctypes.c_int32, ctypes.c_int32),
        "units_fill": (array, number, number, array),
    }.items():
        function = getattr(built, name)
        function.argtypes, function.restype = types, None
    built.units_increase.restype = built.units_far.restype = number
    rng = np.random.default_rng(0)
    far, near = rng.integers(-(2**63), 2**63 - 1, 3000), rng.integers(-900, 900, 2000)
    sorts = all(
        np.array_equal(_radix_sorted(built, units), np.sort(units))
        for units in (far, near, far[:1], far[:0], np.sort(near), near + 2**40)
    )
    return sorts and _finds(built, far, np.unique(near))


def _finds(built: ctypes.CDLL, far: Units, near: Units) -> bool:
    """Half of the units are added; those are found, and no others. Records of theirs move on."""
    units = np.random.default_rng(1).permutation(np.concatenate([near, far]))
    half = len(units) // 2
    places, slots = np.zeros(500, dtype=np.int32), np.zeros(4096, dtype=np.uint64)
    known, rows = np.zeros(half, dtype=np.int64), np.empty(len(units), dtype=np.int64)
    marks = np.zeros(len(places) // 8 + 1, dtype=np.uint8)
    near_tables = address(places), address(marks), len(places)
    tables = *near_tables, address(slots), 12, 2**63 + 12345, address(known)
    built.units_add(*tables, address(units), half, 0)
    built.units_find(*tables, address(units), len(units), address(rows))
    is_far = (units < 0) | (units >= len(places))
    data, told = np.zeros((half, 4), dtype=np.int32), np.zeros(9, dtype=np.int64)
    record, own = np.array([7, 7, 1, 3], dtype=np.int32), np.arange(100)
    ordered, twice = np.unique(far), np.array([1, 1])
    built.units_fill(address(data), 0, half, address(record))
    for step in (9, 9):
        built.units_move(address(data), address(own), len(own), step, 2)
    built.units_spread(address(data), address(rows), len(rows), address(told))
    wanted = np.where(np.arange(half)[:, None] < 100, [7, 9, 2, 2], [7, 7, 1, 3])
    return (
        np.array_equal(rows[:half], np.arange(half))
        and bool((rows[half:] == -1).all())
        and built.units_far(address(units), len(units), len(places)) == is_far.sum()
        and built.units_increase(address(ordered), len(ordered)) == 1
        and built.units_increase(address(twice), 2) == 0
        and np.array_equal(data, wanted)
        and told.tolist() == [half, 7, 7, 1, 2, 7, 9, 2, 3]
    )
