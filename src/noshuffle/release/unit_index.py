"""Which row belongs to a unit, and units in order.

    find(units) → rows, −1 where a unit has none; place(units) → rows they will have; add(units)

Rows are handed out in blocks of sixteen. Integers from zero on, as rows of a data set have, share
the block of their fifteen neighbours, with a bit for each that was added: units of a sorted batch
lie in memory one behind the other, and 10⁷ of them touch one cache line each. Others, as names and
negative numbers give, are numbered in order of arrival, and that number is in an open hash table
(`native/units.c`), by a secret multiplier, at most two thirds full. Sorting is a radix sort in C.
Without a compiler a dictionary does all of it.

State: blocks and bits of the near units; the far ones by number, their blocks, and the table.

>>> index = new_index()
>>> rows = index.place(np.array([7, -3, 8]))
>>> index.add(np.array([7, -3, 8]))
>>> index.units.tolist(), index.find(np.array([-3, 5, 7])).tolist() == [rows[1], -1, rows[0]]
([-3, 7, 8], True)
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
#: Rows of a block, as a power of two (native/units.c has the same).
_BLOCK = 4
#: Units from zero on that have blocks by their number, however few there are, and for each unit.
_PLACES, _PLACES_EACH = 2**24, 16
#: Slots of an empty hash table, a power of two.
_SLOTS = 1024
#: A buffer that sorting keeps, for each thread, and how many units of it.
_scratch, _MOST_SCRATCH = threading.local(), 2**20
#: Units below which numpy sorts faster than the radix sort.
_FEW = 2048


class _Arrays:
    """What an index knows, as one value: an interrupt finds the old arrays or the new ones.

    `blocks`: of near units, by unit; 0: none. `marks`: a bit for each near unit that was added.
    `slots`: (tag, number + 1) of far units. `known`, `far_blocks`: these units and their blocks, by
    number. `told`: all of it for the loops in C.
    """

    def __init__(self, mixer: int, sizes: Units, **arrays: NDArray[Any]) -> None:
        self.arrays, self.mixer, self.sizes = arrays, mixer, sizes
        self.blocks, self.marks, self.slots, self.known, self.far_blocks = arrays.values()
        self.near = len(self.blocks) << _BLOCK
        bits = len(self.slots).bit_length() - 1
        self.table = address(self.slots), bits, mixer, address(self.known)
        ends = address(self.far_blocks), address(sizes)
        self.told = address(self.blocks), address(self.marks), self.near, *self.table, *ends

    def but(self, **arrays: NDArray[Any]) -> _Arrays:
        """With these instead."""
        return _Arrays(self.mixer, self.sizes, **self.arrays | arrays)


class DictIndex:
    """Rows of distinct units, by a dictionary.

    Guarantees: a unit keeps its row. An `add` that was interrupted has added nothing, or
    everything; a `place` that was gives away rows which nobody gets.
    """

    likely = 0  # rows that may come

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self.rows = 0  # every row is below this

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def units(self) -> Units:
        """In order."""
        return np.array(sorted(self._rows), dtype=np.int64)

    def find(self, units: Units) -> Units:
        """The row of every unit, −1 where it has none."""
        return np.array([self._rows.get(unit, -1) for unit in units.tolist()], dtype=np.int64)

    def place(self, units: Units) -> Units:
        """The rows that distinct units without one will have once they are added, in this order."""
        self.rows += len(units)
        return np.arange(self.rows - len(units), self.rows)

    def add(self, units: Units) -> None:
        """Distinct units that `place` was just asked about have their rows now."""
        rows = range(self.rows - len(units), self.rows)
        self._rows.update(zip(units.tolist(), rows))  # in one call


class UnitIndex:
    """Rows of distinct units, by loops in C.

    Guarantees: those of `DictIndex`.
    """

    def __init__(self, built: ctypes.CDLL) -> None:
        self._c = built
        #: Blocks given away (the first is nobody's), near units, far units.
        self._sizes = np.array([1, 0, 0])
        self._own = _Arrays(
            int.from_bytes(os.urandom(8), "little") | 1,
            self._sizes,
            blocks=np.zeros(1, dtype=np.int32),
            marks=np.zeros(2, dtype=np.uint8),
            slots=np.zeros(_SLOTS, dtype=np.uint64),
            known=np.empty(1, dtype=np.int64),
            far_blocks=np.empty(1, dtype=np.int32),
        )

    def __len__(self) -> int:
        return int(self._sizes[1] + self._sizes[2])

    @property
    def units(self) -> Units:
        """In order."""
        near = np.flatnonzero(np.unpackbits(self._own.marks, bitorder="little"))
        return np.sort(np.concatenate([near, self._own.known[: self._sizes[2]]]))

    @property
    def rows(self) -> int:
        """Every row is below this."""
        return int(self._sizes[0]) << _BLOCK

    @property
    def likely(self) -> int:
        """Rows that may come: if units are numbers of rows, one for each that may be near."""
        return self._own.near

    def find(self, units: Units) -> Units:
        """The row of every unit, −1 where it has none."""
        units, rows = np.ascontiguousarray(units), np.empty(len(units), dtype=np.int64)
        self._c.units_find(*self._own.told, address(units), len(units), address(rows))
        return rows

    def place(self, units: Units) -> Units:
        """The rows that distinct units without one will have once they are added, in this order."""
        count = len(self) + len(units)
        if count >= 1 << 31:
            raise Unsupported(f"the guard holds up to two thousand million units, got {count}")
        self._widen(int(units.max()) + 1 if len(units) else 0, most=_PLACES_EACH * count)
        units, is_near = np.ascontiguousarray(units), (units >= 0) & (units < self._own.near)
        self._grow(int(self._sizes[2]) + len(units) - int(np.count_nonzero(is_near)))
        rows = np.empty(len(units), dtype=np.int64)
        self._c.units_place(*self._own.told, address(units), len(units), address(rows))
        return rows

    def add(self, units: Units) -> None:
        """Distinct units that `place` was just asked about have their rows now."""
        units = np.ascontiguousarray(units)
        self._c.units_add(*self._own.told, address(units), len(units))

    def _widen(self, size: int, *, most: int) -> None:
        """Blocks for the units below `size`, if they are not too many. Who is far stays far."""
        own = self._own
        if own.near < size <= max(_PLACES, most):
            count = (min(2 * size, max(_PLACES, most)) >> _BLOCK) + 1
            blocks, marks = _zeros(count, np.int32), _zeros(count << _BLOCK >> 3, np.uint8)
            blocks[: len(own.blocks)], marks[: len(own.marks)] = own.blocks, own.marks
            self._own = own.but(blocks=blocks, marks=marks)

    def _grow(self, far: int) -> None:
        """For so many far units."""
        own = self._own
        if far > len(own.known):
            blocks = grown(own.far_blocks, (2 * far >> _BLOCK) + 1)
            own = self._own = own.but(known=grown(own.known, far), far_blocks=blocks)
        if 3 * far > 2 * len(own.slots):
            own = own.but(slots=_zeros(1 << (4 * far - 1).bit_length(), np.uint64))
            self._c.units_hash(*own.table, int(self._sizes[2]))
            self._own = own


def _row(blocks: NDArray[np.int32], at: Units) -> Units:
    rows: Units = blocks[at >> _BLOCK].astype(np.int64) << _BLOCK
    return rows + (at & ((1 << _BLOCK) - 1))


def grown(array: NDArray[Any], rows: int, *, likely: int = 0) -> NDArray[Any]:
    """The array, or one with its rows that is as long as asked: twice those it has, or `likely`.

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


def new_index() -> UnitIndex | DictIndex:
    built = library()
    return DictIndex() if built is None else UnitIndex(built)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: they are handed out only after they were found to do what numpy does.
    """
    built = build(text_of("units.c"))
    return built if built is not None and agrees(built) else None


def agrees(built: ctypes.CDLL) -> bool:
    array, number = ctypes.c_void_p, ctypes.c_int64
    table = (array, number, ctypes.c_uint64, array)
    whole = (array, array, number, *table, array, array, array, number)
    for name, types in {
        "units_sort": (array, array, array, number),
        "units_increase": (array, number),
        "units_find": (*whole, array),
        "units_place": (*whole, array),
        "units_add": whole,
        "units_hash": (*table, number),
        "units_spread": (array, array, number, array),
        "units_move": (array, array, number, ctypes.c_int32, ctypes.c_int32),
        "units_fill": (array, array, number, array),
    }.items():
        function = getattr(built, name)
        function.argtypes, function.restype = types, None
    built.units_increase.restype = number
    rng = np.random.default_rng(0)
    far, near = rng.integers(-(2**63), 2**63 - 1, 3000), rng.integers(-900, 900, 2000)
    sorts = all(
        np.array_equal(_radix_sorted(built, units), np.sort(units))
        for units in (far, near, far[:1], far[:0], np.sort(near), near + 2**40)
    )
    return sorts and _finds(built, far, _distinct(near))


def _distinct(units: Units) -> Units:
    """`np.unique`, which imports numpy.ma where it is asked for nothing else (NumPy 2)."""
    return np.unique(units, return_counts=True)[0]


def _finds(built: ctypes.CDLL, far: Units, near: Units) -> bool:
    """Half of the units are added; those are found, and no others. Records of theirs move on."""
    units = np.random.default_rng(1).permutation(np.concatenate([near, far]))
    half = len(units) // 2
    own = _Arrays(
        2**63 + 12345,
        np.array([1, 0, 0]),
        blocks=np.zeros(30, dtype=np.int32),
        marks=np.zeros(60, dtype=np.uint8),
        slots=np.zeros(4096, dtype=np.uint64),
        known=np.empty(half, dtype=np.int64),
        far_blocks=np.empty(half, dtype=np.int32),
    )
    placed, rows = np.empty(half, dtype=np.int64), np.empty(len(units), dtype=np.int64)
    built.units_place(*own.told, address(units), half, address(placed))
    built.units_add(*own.told, address(units), half)
    own = own.but(slots=np.zeros(8192, dtype=np.uint64))
    is_near = (units[:half] >= 0) & (units[:half] < own.near)
    built.units_hash(*own.table, half - np.count_nonzero(is_near))
    built.units_find(*own.told, address(units), len(units), address(rows))
    used = int(own.sizes[0]) << _BLOCK
    data, told = np.zeros((used, 4), dtype=np.int32), np.zeros(9, dtype=np.int64)
    record, ordered, twice = np.array([7, 7, 1, 3], np.int32), _distinct(far), np.array([1, 1])
    built.units_fill(address(data), address(placed), half, address(record))
    for step in (9, 9):
        built.units_move(address(data), address(placed), 100, step, 2)
    built.units_spread(address(data), address(rows), len(rows), address(told))
    wanted = np.zeros_like(data)
    wanted[placed] = np.where(np.arange(half)[:, None] < 100, [7, 9, 2, 2], [7, 7, 1, 3])
    return (
        len(_distinct(placed)) == half
        and np.array_equal(rows[:half], placed)
        and np.array_equal(placed[is_near], _row(own.blocks, units[:half][is_near]))
        and bool((rows[half:] == -1).all())
        and own.sizes[1:].tolist() == [is_near.sum(), half - is_near.sum()]
        and np.array_equal(own.known[: own.sizes[2]], units[:half][~is_near])
        and built.units_increase(address(ordered), len(ordered)) == 1
        and built.units_increase(address(twice), 2) == 0
        and np.array_equal(data, wanted)
        and told.tolist() == [half, 7, 7, 1, 2, 7, 9, 2, 3]
    )
