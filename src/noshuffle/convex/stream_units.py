"""StreamUnits: who the rows of a learning stream are, so that no unit comes twice.

ids become numbers by a secret of the stream, the same in every phase. A unit is refused that was
here before, in this call or any other, whichever phase that was; so are ids of another kind than
before, and units whose budget is used up. State kept: the units that were seen (single ones in a
set until they are many, since a table takes a thousand as soon as one), and those of rows whose
batch has not left yet, in the pieces that they came in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, ParticipationViolation, instance_of
from noshuffle.release.units import Ids, UnitTable, ids_and_kind

#: Single units that are seen before the table takes them in.
_MOST_SINGLE = 1024


class StreamUnits:
    """The units of a stream; `may_repeat`: of one call, where a unit is a user with rows.

    Guarantees: `admit` changes nothing where it raises.
    """

    def __init__(self, *, may_repeat: bool) -> None:
        self._may_repeat = may_repeat
        #: By which names become numbers, in every phase alike; "integers" or "names".
        self.secret = self.kind = ""
        #: Whether rows come with ids; None before the first.
        self.are_named: bool | None = None
        self._seen = UnitTable()
        self._singles: set[int] = set()
        self._pieces: list[Ids] = []

    def admit(
        self,
        rows: int,
        ids: Iterable[Hashable] | None,
        *,
        barred: Ids,
        bind_fn: Callable[[str], None],
    ) -> None:
        """Take in the ids of rows, or refuse; `bind_fn` is told their kind once."""
        if self.are_named not in (None, ids is not None):
            raise InvalidInput("rows came with ids in one call and without in another; do the same")
        if ids is not None:
            self._admit(rows, ids, barred, bind_fn)
        self.are_named = ids is not None

    def _admit(
        self, rows: int, ids: Iterable[Hashable], barred: Ids, bind_fn: Callable[[str], None]
    ) -> None:
        instance_of(Iterable, ids=ids)
        given = ids if isinstance(ids, np.ndarray) else list(ids)
        if len(given) != rows:
            raise InvalidInput(f"ids must hold one id for each of {rows} rows, got {len(given)}")
        if not rows:
            return
        units, kind = ids_and_kind(given, secret=bytes.fromhex(self.secret))
        if self.kind not in ("", kind):
            raise InvalidInput(
                f"this stream told its rows apart by {self.kind}, and now {kind} came; 5 and '5' "
                "would count as two units, so give the same kind in every call"
            )
        distinct, twice = self._distinct(units)
        if twice.any():
            one = given[int(np.flatnonzero(twice)[0])]
            raise ParticipationViolation(
                f"id {one!r} came twice and the plan allows one row each; drop the second one"
            )
        if len(barred) and np.isin(units, barred).any():
            raise ParticipationViolation(
                "some ids have used up the budget of this data; leave their rows out "
                "(budget.used_up says which)"
            )
        if not self.kind:
            bind_fn(kind)
            self.kind = kind
        if rows == 1:
            self._singles.add(int(units[0]))
        else:
            self._seen.update(distinct, step=0)
        self._pieces.append(units)

    def _distinct(self, units: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Units in order, and which rows are of one that came before."""
        if len(units) == 1 and len(self._singles) < _MOST_SINGLE:
            if int(units[0]) in self._singles:
                return units, np.ones(1, dtype=bool)
            return units, self._seen.look_up(units).count > 0
        self._take_singles()
        twice = self._seen.look_up(units).count > 0
        distinct, firsts = np.unique(units, return_index=True)
        if not self._may_repeat:
            twice[np.setdiff1d(np.arange(len(units)), firsts)] = True
        return distinct, twice

    def _take_singles(self) -> None:
        if self._singles:
            own = np.fromiter(self._singles, dtype=np.int64, count=len(self._singles))
            self._seen.update(np.sort(own), step=0)
            self._singles = set()

    @property
    def _pending(self) -> Ids:
        """Units of rows whose batch has not left, in the order they came."""
        if len(self._pieces) != 1:
            self._pieces = [np.concatenate([np.empty(0, dtype=np.int64), *self._pieces])]
        return self._pieces[0]

    def of_batch(self, first: int, count: int, *, come_again: bool) -> Ids:
        """The units of a batch that leaves."""
        if come_again:  # in the same order
            return self._pending[first : first + count]
        units, rest = self._pending[:count], self._pending[count:]
        self._pieces = [rest]
        return units

    def state(self) -> dict[str, Any]:
        """As tensors and plain values."""
        self._take_singles()
        return {
            "has_ids": self.are_named,
            "kind_of_ids": self.kind,
            "_secret": self.secret,
            "units": torch.from_numpy(self._seen.all()[0].copy()),
            "pending": torch.from_numpy(self._pending.copy()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.are_named, self.kind = state["has_ids"], state["kind_of_ids"]
        self.secret = state["_secret"]
        self._pieces = [state["pending"].numpy().copy()]
        self._seen, self._singles = UnitTable(), set()
        self._seen.update(np.sort(state["units"].numpy()), step=0)
