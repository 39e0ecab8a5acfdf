"""A table of units: when each was first and last seen, and how often, without Python loops.

Units are 64-bit integers (`unit_ids`), each with a row of a growing array (`unit_index` finds it),
so a step with m units costs O(m).

Most batches are the same in every epoch, so their units always come together and have one record
between them. Such a group is found by its first unit, and its bytes are compared: to ask for it, or
to move it on, touches no row. The first batch that cuts across it ends it.

State: the rows, with the number of each unit's group, and the records of the groups, which are
written into the rows when somebody asks for a unit in another way.

>>> table = UnitTable()
>>> table.update(np.array([7, 3]), step=0)
>>> table.update(np.array([3, 9]), step=4)
>>> seen = table.look_up(np.array([3, 5]))
>>> seen.first.tolist(), seen.last.tolist(), seen.count.tolist()
([0, -1], [4, -1], [2, 0])
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput
from noshuffle.release.unit_ids import Ids as Ids
from noshuffle.release.unit_index import address, grown, library, new_index

#: first, last, count
Record = tuple[int, int, int]
_FIELDS = 4  # the same, and the number of a group (0: none)
#: Units of groups, and rows of batches, that are remembered; each weighs so many more itself.
_IN_GROUPS, _MOST_ROWS, _EACH = 2**21, 2**21, 64


@dataclass(frozen=True)
class Seen:
    """What is known of each unit asked for; −1, −1, 0 where it was never seen."""

    first: Ids
    last: Ids
    count: Ids

    def record(self, i: int) -> Record:
        """That of one unit."""
        return int(self.first[i]), int(self.last[i]), int(self.count[i])


class Spread(NamedTuple):
    """How many of the units asked for were seen before; least and largest first, last, count, and
    number of a group among those."""

    known: int
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def is_one(self) -> bool:
        """Whether all that were seen have one record."""
        return self.low[:3] == self.high[:3]


class BatchCache:
    """The units of batches that came before, in order, by the first and last of their ids.

    To find the distinct units of a batch is a sort, and an epoch brings the same batches again.
    Only batches in which every row counts; when they hold two million rows it starts anew.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int, int], tuple[bytes, Ids]] = {}
        self._rows = 0

    def get(self, ids: Ids) -> Ids | None:
        """The units of the batch with these ids."""
        found = self._batches.get(_ends(ids)) if len(ids) else None
        return found[1] if found is not None and found[0] == ids.tobytes() else None

    def add(self, ids: Ids, units: Ids) -> None:
        """Remember a batch, and keep its units from being changed."""
        if self._rows + len(ids) + _EACH > _MOST_ROWS:
            self._batches, self._rows = {}, 0
        units.flags.writeable = False
        self._batches[_ends(ids)] = (ids.tobytes(), units)
        self._rows += len(ids) + _EACH


def _ends(ids: Ids) -> tuple[int, int, int]:
    return int(ids[0]), int(ids[-1]), len(ids)


@dataclass
class _UnitGroup:
    """Units that have always come together."""

    number: int
    units: bytes
    rows: Ids
    record: Record


class UnitTable:
    """first, last, count per unit, looked up and updated a batch at a time.

    Guarantees: the answers are those of a dictionary from units to records, whichever way units
    come together. An update that was interrupted may be done again, and then counts once.
    """

    def __init__(self) -> None:
        self._index = new_index()
        self._data = np.zeros((1, _FIELDS), dtype=np.int32)  # by row, and further ones behind them
        # Rows of the units asked for last: a step looks the same ones up several times. Arrays that
        # nobody changes are known by themselves, others by their bytes.
        self._asked: tuple[bytes | Ids, Ids] | None = None
        self._told: tuple[Ids, Spread] | None = None  # of such rows, until a record changes
        # A group is in both dictionaries, or it is none: numbers in rows may be of former ones.
        self._groups: dict[int, _UnitGroup] = {}
        self._firsts: dict[int, int] = {}  # the number of a group by its first unit
        self._behind: set[int] = set()  # numbers of groups whose rows hold older records
        self._founded = self._grouped = 0

    def __len__(self) -> int:
        return len(self._index)

    def shared(self, ids: Ids) -> Record | None:
        """The one record of these units, if they have always come together in this order, alone or
        with others behind them."""
        ids = np.asarray(ids, dtype=np.int64)  # of another width, others have the same bytes
        group = self._led_by(ids)
        is_part = group is not None and group.units.startswith(ids.tobytes())
        return group.record if group is not None and is_part else None

    def look_up(self, ids: Ids) -> Seen:
        """The records of these units (distinct or not)."""
        ids = np.asarray(ids, dtype=np.int64)  # as in `shared`
        group = self._group(ids)
        if group is not None:
            first, last, count = np.repeat(np.array(group.record), len(ids)).reshape(3, -1)
            return Seen(first=first, last=last, count=count)
        self._write_back()
        rows = self._rows(ids)
        if len(rows) and rows.min() >= 0:
            return _seen(self._data.take(rows, axis=0))
        out = np.empty((3, len(ids)), dtype=np.int64)
        out[:2], out[2] = -1, 0
        hit = np.flatnonzero(rows >= 0)
        if len(hit):
            out[:, hit] = self._data[rows[hit], :3].T
        return Seen(first=out[0], last=out[1], count=out[2])

    def spread(self, ids: Ids) -> Spread:
        """What the records of these units have between them."""
        ids = np.asarray(ids, dtype=np.int64)
        self._write_back()
        return self._spread(self._rows(ids))

    def _spread(self, rows: Ids) -> Spread:
        if self._told is not None and self._told[0] is rows:
            return self._told[1]
        told = np.zeros(9, dtype=np.int64)
        if (built := library()) is not None:
            built.units_spread(address(self._data), address(rows), len(rows), address(told))
        elif len(hit := rows[rows >= 0]):
            own = self._data.take(hit, axis=0)
            told[:] = len(hit), *own.min(axis=0), *own.max(axis=0)
        known, *ends = told.tolist()
        self._told = rows, Spread(known, tuple(ends[:4]), tuple(ends[4:]))
        return self._told[1]

    def update(self, ids: Ids, *, step: int, first: NDArray[np.bool_] | None = None) -> None:
        """These distinct units took part in `step`; where `first` is true, `first` starts anew."""
        ids = np.asarray(ids, dtype=np.int64)
        if step >= 1 << 31:
            raise _too_large()
        if not len(ids):
            return
        group = self._group(ids)
        if group is not None and (first is None or first.all() == first.any()):
            self._move_on(group, step=step, is_anew=first is not None and bool(first[0]))
            return
        rows, built = self._rows(ids), library()
        if built is not None and first is None:
            spread = self._spread(rows)
            if spread.known == len(ids):
                if spread.high[3]:
                    self._part(rows)  # groups that end write their records
                    spread = self._spread(rows)
                number = self._new_number(len(ids)) if spread.is_one else 0
                self._told = None
                # In one call: an interrupt finds these units before the step or behind it.
                built.units_move(address(self._data), address(rows), len(rows), step, number)
                if number:
                    self._found(ids, rows, number, _record(self._data[rows[0]]))
                return
        self._told = None
        is_known = rows >= 0
        known = rows[is_known]
        self._part(known)
        if len(known):
            own = self._data.take(known, axis=0)
            own[:, 2] += own[:, 1] != step
            own[:, 1] = step
            if first is not None:
                own[first[is_known], 0] = step
            is_group = len(known) == len(ids) and bool((own[:, :3] == own[0, :3]).all())
            own[:, 3] = number = self._new_number(len(ids)) if is_group else 0
            # All fields at once: an interrupt finds these units before the step or behind it.
            self._data[known] = own
            if number:
                self._found(ids, known, number, _record(own[0]))
        if len(known) < len(ids):
            new = ids[~is_known] if len(known) else ids
            number = 0 if len(known) else self._new_number(len(ids))
            rows = self._append(new, np.array([step, step, 1, number]))
            if number:
                self._found(ids, rows, number, (step, step, 1))

    def restore(self, ids: Ids, seen: Seen) -> None:
        """Start from saved records (the table must be empty)."""
        none = np.zeros(len(ids), dtype=np.int64)
        self._append(ids, np.stack([seen.first, seen.last, seen.count, none], axis=1))

    def all(self) -> tuple[Ids, Seen]:
        """Every unit with its record, in order of id; theirs to change."""
        self._write_back()
        units = self._index.units
        return units, _seen(self._data.take(self._index.find(units), axis=0))

    def _group(self, ids: Ids) -> _UnitGroup | None:
        """The group that these units are, in their order."""
        group = self._led_by(ids)
        return group if group is not None and group.units == ids.tobytes() else None

    def _led_by(self, ids: Ids) -> _UnitGroup | None:
        """The group whose first unit is the first of these."""
        return self._groups.get(self._firsts.get(int(ids[0]), 0)) if len(ids) else None

    def _new_number(self, size: int) -> int:
        """The number of a group to come, 0 where the table is full of them."""
        if self._grouped + size + _EACH > _IN_GROUPS:
            return 0
        self._founded += 1
        return self._founded

    def _found(self, ids: Ids, rows: Ids, number: int, record: Record) -> None:
        """A group whose rows have its number already."""
        self._grouped += len(ids) + _EACH
        self._firsts[int(ids[0])] = number
        self._groups[number] = _UnitGroup(number, ids.tobytes(), rows, record)

    def _move_on(self, group: _UnitGroup, *, step: int, is_anew: bool) -> None:
        first, last, count = group.record
        if last != step:
            self._behind.add(group.number)
            group.record = (step if is_anew else first, step, count + 1)

    def _part(self, rows: Ids) -> None:
        """End the groups that the units of these rows are of; the rows know everything then."""
        if not self._groups or not len(rows):
            return
        numbers = self._data[rows, 3]
        if len(rows) > self._founded:
            numbers = np.flatnonzero(np.bincount(numbers))
        for number in self._groups.keys() & set(numbers.tolist()):
            self._write(number)
            group = self._groups.pop(number)
            self._grouped -= len(group.rows) + _EACH
            self._firsts.pop(int.from_bytes(group.units[:8], sys.byteorder, signed=True), None)

    def _write_back(self) -> None:
        for number in list(self._behind):
            self._write(number)

    def _write(self, number: int) -> None:
        """Bring the rows up to date with one group."""
        if number in self._behind:
            group = self._groups[number]
            self._told = None
            self._data[group.rows, :3] = group.record
            self._behind.discard(number)

    def _rows(self, ids: Ids) -> Ids:
        is_fixed = ids.base is None and not ids.flags.writeable
        key = ids if is_fixed else ids.tobytes()
        asked = self._asked
        if asked is None or not (asked[0] is key or _are_equal(asked[0], key)):
            asked = self._asked = (key, self._index.find(ids))
        return asked[1]

    def _append(self, ids: Ids, records: NDArray[np.int64]) -> Ids:
        """Rows for units that have none, theirs from the moment when the index knows of them."""
        if records.size and (records.min() < 0 or records.max() >= 1 << 31):
            raise _too_large()
        rows = self._index.place(ids)
        self._data = grown(self._data, self._index.rows, likely=self._index.likely)
        if records.ndim == 1 and (built := library()) is not None:
            own = records.astype(np.int32)
            built.units_fill(address(self._data), address(rows), len(rows), address(own))
        else:
            self._data[rows] = records
        self._asked = None
        self._index.add(ids)
        return rows


def _are_equal(a: bytes | Ids, b: bytes | Ids) -> bool:
    return isinstance(a, bytes) and isinstance(b, bytes) and a == b


def _too_large() -> InvalidInput:
    return InvalidInput("steps and counts of a unit are below two thousand million")


def _record(row: NDArray[np.int32]) -> Record:
    return int(row[0]), int(row[1]), int(row[2])


def _seen(data: NDArray[np.int32]) -> Seen:
    first, last, count, _ = data.T.astype(np.int64)
    return Seen(first=first, last=last, count=count)
