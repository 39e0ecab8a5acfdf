"""StreamUnits: who the rows of a learning stream are, so that no unit comes twice.

ids become numbers by a secret of the stream, the same in every phase. A unit is refused that was
here before, in this call or any other, whichever phase that was; so are ids of another kind than
before. State kept: the units that were seen (single ones in a
set until they are many, since a table takes a thousand as soon as one), and, in the order they
came, those of rows that were not released yet.

>>> units = StreamUnits(may_repeat=False)
>>> units.take(units.check(2, [7, 8]))
>>> units.first(2).tolist()
[7, 8]
>>> units.check(1, [8])
Traceback (most recent call last):
    ...
noshuffle.errors.ParticipationViolation: id 8 came twice and the plan allows one row each; drop \
the second one
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sized
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, ParticipationViolation, instance_of
from noshuffle.release.units import Ids, UnitTable, ids_and_kind, name_to_id

#: Single units that are seen before the table takes them in.
_MOST_SINGLE = 2**16
#: Units that left are cut off the front together.
_MOST_GONE = 2**12
_LEAST, _MOST = -(2**63), 2**63


def one_id_each(ids: Sized, rows: int) -> None:
    """Refuse more or fewer ids than rows."""
    if len(ids) != rows:
        raise InvalidInput(f"ids must hold one id for each of {rows} rows, got {len(ids)}")


class NewUnits(NamedTuple):
    """Units of rows that may come, in order, the distinct ones among them, and their kind."""

    units: list[int] | Ids
    distinct: Ids | None
    kind: str


class StreamUnits:
    """The units of a stream; `may_repeat`: of one call, where a unit is a user with rows.

    Guarantees: `check` changes nothing; what it lets pass may be taken until somebody else is.
    """

    def __init__(self, *, may_repeat: bool) -> None:
        self._may_repeat = may_repeat
        #: By which names become numbers, in every phase alike.
        self.secret = token_hex(16)
        #: "integers" or "names".
        self.kind = ""
        #: Whether rows come with ids; None before the first.
        self.are_named: bool | None = None
        self._seen = UnitTable()
        self._singles: set[int] = set()
        self._waiting, self._gone = array("q"), 0

    def check(self, rows: int, ids: Iterable[Hashable] | None) -> NewUnits | None:
        """Refuse ids that may not come; None where rows have none."""
        if self.are_named not in (None, ids is not None):
            raise InvalidInput("rows came with ids in one call and without in another; do the same")
        if ids is None:
            return None
        if not isinstance(ids, list):  # which needs no further look
            instance_of(Iterable, ids=ids)
        given: Any = ids if isinstance(ids, np.ndarray | list) else list(ids)
        one_id_each(given, rows)
        if rows == 1 and (unit := self._single(given)) is not None:
            found = NewUnits([unit], None, self.kind)
            twice = self._was_here(unit)
        else:
            units, kind = ids_and_kind(given, secret=bytes.fromhex(self.secret))
            if rows and self.kind not in ("", kind):
                raise InvalidInput(
                    f"this stream told its rows apart by {self.kind}, and now {kind} came; 5 and "
                    "'5' would count as two units, so give the same kind in every call"
                )
            distinct, came = self._distinct(units)
            found = NewUnits(units, distinct, kind)
            twice = bool(came.any())
        if twice:
            one = given[0 if rows == 1 else int(np.flatnonzero(came)[0])]
            raise ParticipationViolation(
                f"id {one!r} came twice and the plan allows one row each; drop the second one"
            )
        return found

    def take(self, found: NewUnits | None) -> None:
        """Rows come whose units were checked."""
        self.are_named = found is not None
        if found is None:
            return
        self.kind = self.kind or found.kind
        if len(found.units) == 1:
            unit = int(found.units[0])
            self._singles.add(unit)
            self._waiting.append(unit)
            if len(self._singles) >= _MOST_SINGLE:
                self._take_singles()
        elif found.distinct is not None and len(found.units):
            self.note(found.distinct)
            self._waiting.frombytes(np.ascontiguousarray(found.units).tobytes())

    def _single(self, given: Any) -> int | None:
        """The unit of one plain id of the kind that came before; None: ask `ids_and_kind`."""
        one = given[0]
        if type(one) is str and self.kind == "names":
            return name_to_id(one, secret=bytes.fromhex(self.secret))
        if type(one) in (int, np.int64) and self.kind == "integers" and _LEAST <= one < _MOST:
            return int(one)
        return None

    def _was_here(self, unit: int) -> bool:
        if unit in self._singles:
            return True
        if not len(self._seen):
            return False
        return bool(self._seen.look_up(np.array([unit], dtype=np.int64)).count[0] > 0)

    def _distinct(self, units: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Units in order, and which rows are of one that came before."""
        self._take_singles()
        twice = self._seen.look_up(units).count > 0
        distinct, firsts = np.unique(units, return_index=True)
        if not self._may_repeat:
            twice[np.setdiff1d(np.arange(len(units)), firsts)] = True
        return distinct, twice

    def _take_singles(self) -> None:
        if self._singles:
            own = np.fromiter(self._singles, dtype=np.int64, count=len(self._singles))
            self.note(own)
            self._singles = set()

    def first(self, count: int, *, after: int = 0) -> Ids:
        """The units of so many rows that were not released yet, the oldest first."""
        start = self._gone + after
        return np.array(self._waiting[start : start + count], dtype=np.int64)

    def drop(self, count: int | None = None) -> None:
        """The rows of so many units were released, or will not be. None: of all."""
        self._gone = len(self._waiting) if count is None else self._gone + count
        if self._gone >= min(_MOST_GONE, len(self._waiting)):
            self._waiting, self._gone = self._waiting[self._gone :], 0

    def note(self, units: Ids) -> None:
        """These distinct units were here; they may be ones that another process took."""
        self._seen.update(units, step=0, first=np.ones(len(units), dtype=bool))

    def state(self) -> dict[str, Any]:
        """As tensors and plain values."""
        self._take_singles()
        return {
            "has_ids": self.are_named,
            "kind_of_ids": self.kind,
            "_secret": self.secret,
            "units": torch.from_numpy(self._seen.all()[0].copy()),
            "pending": torch.from_numpy(self.first(len(self._waiting))),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.are_named, self.kind = state["has_ids"], state["kind_of_ids"]
        self.secret = state["_secret"]
        self._waiting, self._gone = array("q", state["pending"].tolist()), 0
        self._seen, self._singles = UnitTable(), set()
        self.note(state["units"].numpy())
