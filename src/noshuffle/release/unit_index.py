"""Which row belongs to a unit, and units in order.

    find(units) → rows, −1 where a unit has none          add(units): rows in order of arrival

Integers from zero on, as rows of a data set have, are places of an array. Others, as names and
negative numbers give, lie in two sorted runs, a large one and one of recent arrivals that is merged
into it when it has an eighth of its size. Sorting is a radix sort in C (`native/units.c`).

State: the units by row; the array and the runs.

>>> index = UnitIndex()
>>> index.add(np.array([7, -3]))
>>> index.find(np.array([-3, 5, 7])).tolist(), index.units.tolist()
([1, -1, 0], [7, -3])
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.c_library import build, text_of
from noshuffle.errors import Unsupported

Units = NDArray[np.int64]
#: Places of the array however few units there are, and for each unit.
_PLACES, _PLACES_EACH = 2**24, 16
#: Units in the run of recent arrivals, at least.
_RECENT = 4096
#: Units below which numpy sorts faster than the radix sort.
_FEW = 2048


class UnitIndex:
    """Rows of distinct units.

    Guarantees: the answers of a dictionary. An `add` that was interrupted has added nothing, or
    everything.
    """

    def __init__(self) -> None:
        none = np.empty((2, 0), dtype=np.int64)
        self._known = np.zeros(1, dtype=np.int64)  # by row; there is room behind the last
        self._count = 0
        self._places = np.zeros(0, dtype=np.int32)  # row + 1 of the units from 0 on; 0: none
        self._runs = none, none  # units and rows
        self._unsure: Units | None = None  # of an `add` that may have been interrupted

    @property
    def units(self) -> Units:
        """By row; not to be kept over an `add`."""
        return self._known[: self._count]

    def find(self, units: Units) -> Units:
        """The row of every unit, −1 where it has none."""
        if self._unsure is not None:
            self._take_back(self._unsure)
        size = len(self._places)
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
        make_room(self._known, end)
        self._known[start:end] = units
        self._widen(int(units.max()) + 1 if len(units) else 0, most=_PLACES_EACH * end)
        rows = np.arange(start, end)
        is_far = (units < 0) | (units >= len(self._places))
        self._unsure = np.array(units)
        if is_far.any():
            self._add_to_runs(np.stack([units[is_far], rows[is_far]]))
            units, rows = units[~is_far], rows[~is_far]
        self._places[units] = rows + 1
        self._count = end
        self._unsure = None

    def _widen(self, size: int, *, most: int) -> None:
        """Places for the units below `size`, if they are not too many."""
        if len(self._places) < size <= max(_PLACES, most):
            wider = np.zeros(min(2 * size, max(_PLACES, most)), dtype=np.int32)
            wider[: len(self._places)] = self._places
            self._places = wider

    def _add_to_runs(self, new: Units) -> None:
        large, recent = self._runs[0], _merged(self._runs[1], new)
        if recent.shape[1] > max(_RECENT, large.shape[1] // 8):
            large, recent = _merged(large, recent), recent[:, :0]
        self._runs = large, recent

    def _take_back(self, units: Units) -> None:
        """Forget rows that no unit has got."""
        near = units[(units >= 0) & (units < len(self._places))]
        self._places[near[self._places[near] > self._count]] = 0
        large, recent = (run[:, run[1] < self._count] for run in self._runs)
        self._runs = large, recent
        self._unsure = None


def _merged(a: Units, b: Units) -> Units:
    both = np.concatenate([a, b], axis=1)
    return both[:, np.argsort(both[0], kind="stable")]


def make_room(array: NDArray[Any], rows: int) -> None:
    """Lengthen an array that nobody has a view of to so many rows, or a quarter more than it has.

    Its memory is moved by the system, not copied, and an interrupt comes before or behind it.
    """
    if rows > len(array):
        array.resize((max(rows, len(array) * 5 // 4), *array.shape[1:]), refcheck=False)


def in_order(units: Units) -> Units:
    """A sorted copy."""
    built = library() if len(units) >= _FEW else None
    return np.sort(units) if built is None else _radix_sorted(built, units)


def _radix_sorted(built: ctypes.CDLL, units: Units) -> Units:
    out, aside = np.array(units, dtype=np.int64), np.empty(len(units), dtype=np.int64)
    built.units_sort(out.ctypes.data, aside.ctypes.data, len(out))
    return out


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled sort, or None where it cannot be built or is switched off.

    Guarantees: it is handed out only after it was found to sort as numpy does.
    """
    built = build(text_of("units.c"))
    return built if built is not None and agrees(built) else None


def agrees(built: ctypes.CDLL) -> bool:
    built.units_sort.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    built.units_sort.restype = None
    rng = np.random.default_rng(0)
    far, near = rng.integers(-(2**63), 2**63 - 1, 3000), rng.integers(-900, 900, 2000)
    return all(
        np.array_equal(_radix_sorted(built, units), np.sort(units))
        for units in (far, near, far[:1], far[:0], np.sort(near), near + 2**40)
    )
