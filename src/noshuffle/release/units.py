"""Units: their numbers, who took part when, and the one walk by which steps are admitted.

`Guard.take` is what a run calls for every step, what a run that is opened again calls for every row
of its log, and what `verify` calls. Ids are integers or names; names become integers by 64 bits of
BLAKE2b under the secret of the run (two that collided would count as one unit, the strict side).

State: a row (first step, last step, count) per unit; small integers have their place in an array,
others get the next free one.

>>> from noshuffle.participation import Epochs
>>> guard = Guard(Epochs(epochs=2, steps_per_epoch=2))
>>> for units in ([3, 5], [4, 6], [5, 3]):
...     _ = guard.take(np.array(units))
>>> guard.take(np.array([3, 6]))
Traceback (most recent call last):
    ...
noshuffle.errors.ParticipationViolation: unit 3 may not take part in step 3: it was seen first in \
step 0, so with 2 steps per epoch it may come only every 2 steps after that (last seen: 2); \
private.batches(loader) keeps to one order, and AnyOrderEpochs with mechanism='identity' takes a \
new one in every epoch; keep the order of the plan, or use on_violation='drop'
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import HorizonExceeded, InvalidInput, ParticipationViolation
from noshuffle.participation import Mask, Participation, Seen

Ids = NDArray[np.int64]
NOBODY: Ids = np.empty(0, dtype=np.int64)
#: Integers below this have their place in an array.
_SMALL = 2**24
#: Units of earlier steps that lists may refer to.
_REMEMBERED = 2**24
_WIDTHS = {"1": "u1", "2": "<u2", "4": "<u4"}
#: Kinds of arrays that hold Python's objects: those of pandas, and NumPy's own texts.
_OBJECTS = "OT"
#: What NumPy would make two ids, or an id that is a text, of.
_NO_IDS = (tuple, UUID, type(None))


# -- ids -------------------------------------------------------------------------------------------


@lru_cache(maxsize=2**18)  # federated users check in again in every round
def name_to_id(name: str | bytes, secret: bytes = b"") -> int:
    """64 bits of BLAKE2b of a unit's name, as a signed integer.

    With a secret, nobody who reads the log can try out names.
    """
    # Half a surrogate pair, which JSON and some file names hold, is a name like others.
    data = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
    digest = hashlib.blake2b(data, digest_size=8, key=secret).digest()
    return int.from_bytes(digest, "little", signed=True)


def kind_of_ids(ids: Any) -> str:
    """ "integers" or "names"; "" for none at all. What is neither, `as_ids` refuses."""
    if isinstance(ids, Tensor):
        return "integers" if ids.numel() else ""
    if isinstance(ids, np.ndarray) and ids.dtype.kind not in _OBJECTS:
        return ("names" if ids.dtype.kind in "US" else "integers") if ids.size else ""
    first = next(iter(ids), None) if isinstance(ids, Iterable) else ids
    return "" if first is None else "names" if isinstance(first, str | bytes) else "integers"


def ids_and_kind(ids: Any, *, secret: bytes = b"") -> tuple[Ids, str]:
    """`as_ids` and `kind_of_ids` of ids that can be read once only (a generator), too.

    >>> ids_and_kind(iter(["7"]))[1], ids_and_kind(iter([7]))[1]
    ('names', 'integers')
    """
    if isinstance(ids, Iterable) and not isinstance(ids, Tensor | np.ndarray):
        ids = list(ids)
    return as_ids(ids, secret=secret), kind_of_ids(ids)


def as_ids(ids: Any, *, secret: bytes = b"") -> Ids:
    """Unit ids from a tensor, an array, or a list of integers or names."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if not isinstance(ids, np.ndarray) or ids.dtype.kind in _OBJECTS:
        items = list(ids) if isinstance(ids, Iterable) else [ids]
        kinds = set(map(type, items))
        are_names = {issubclass(kind, str | bytes) for kind in kinds}
        if are_names == {True}:
            return np.array([name_to_id(i, secret) for i in items], dtype=np.int64)
        if True in are_names:
            raise InvalidInput(
                "ids must all be integers or all be names, got both in one batch; 5 and '5' would "
                "count as two units"
            )
        if strange := [kind for kind in kinds if issubclass(kind, _NO_IDS)]:
            raise InvalidInput(
                "ids must be one integer or name per example, got one of type "
                f"{strange[0].__name__}; make names of them: [str(one) for one in ids]"
            )
        ids = np.array(items, dtype=np.int64) if not items else np.asarray(items)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise InvalidInput(
            "ids must be one integer or name per example, got an array of shape "
            f"{ids.shape} and type {ids.dtype}; make names of them: [str(one) for one in ids]"
        )
    if ids.dtype.kind in "US":
        return as_ids(ids.tolist(), secret=secret)
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
        raise InvalidInput("ids must fit into 64 signed bits, got a larger one; give names instead")
    return np.asarray(ids, dtype=np.int64)


# -- who took part ---------------------------------------------------------------------------------


class UnitTable:
    """First step, last step and count of every unit, a batch at a time."""

    def __init__(self) -> None:
        self._small, self._large = _rows(0), _rows(0)
        self._places: dict[int, int] = {}

    def look_up(self, units: Ids) -> Seen:
        """What is known of each."""
        is_small = _are_small(units)
        if is_small is None:
            return Seen(*self._small_rows(units)[:, units])
        rows = _rows(len(units))
        small = units[is_small]
        rows[:, is_small] = self._small_rows(small)[:, small]
        at = np.array([self._places.get(u, -1) for u in units[~is_small].tolist()], dtype=np.int64)
        known = np.flatnonzero(~is_small)[at >= 0]
        rows[:, known] = self._large[:, at[at >= 0]]
        return Seen(*rows)

    def update(self, units: Ids, *, step: int, first: Mask) -> None:
        """These distinct units took part in a step; `first` says for whom it counts as first."""
        is_small = _are_small(units)
        if is_small is None:
            _write(self._small_rows(units), units, step=step, first=first)
            return
        small = units[is_small]
        _write(self._small_rows(small), small, step=step, first=first[is_small])
        places = self._places
        at = [places.setdefault(u, len(places)) for u in units[~is_small].tolist()]
        self._large = _wide(self._large, len(places))
        _write(self._large, np.array(at, dtype=np.int64), step=step, first=first[~is_small])

    def all(self) -> tuple[Ids, Seen]:
        """Every unit that took part."""
        small = np.flatnonzero(self._small[2])
        large = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        rows = np.concatenate([self._small[:, small], self._large[:, : len(large)]], axis=1)
        return np.concatenate([small, large]), Seen(*rows)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._small[2])) + len(self._places)

    def _small_rows(self, units: Ids) -> NDArray[np.int32]:
        """The array, with room for these."""
        self._small = _wide(self._small, int(units.max(initial=-1)) + 1)
        return self._small


def _rows(count: int) -> NDArray[np.int32]:
    rows = np.full((3, count), -1, dtype=np.int32)
    rows[2] = 0
    return rows


def _wide(rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    have = rows.shape[1]
    return rows if count <= have else np.concatenate([rows, _rows(max(count, have) - have)], axis=1)


def _write(rows: NDArray[np.int32], at: Ids, *, step: int, first: Mask) -> None:
    rows[0, at[first]] = step
    rows[1, at] = step
    rows[2, at] += 1


def _are_small(units: Ids) -> Mask | None:
    """Which units have their place in the array; None: all of them."""
    if not len(units) or (units.min() >= 0 and units.max() < _SMALL):
        return None
    return np.asarray((units >= 0) & (units < _SMALL))


class Admitted(NamedTuple):
    """The units of a step in order, and which rows of its batch are theirs (None: all)."""

    units: Ids
    keep: Mask | None


class Guard:
    """Who may take part in which step; the same for a run and for whoever verifies it.

    A unit stands once in a step; with `groups` (the unit is a user) its rows are one contribution.
    """

    def __init__(self, participation: Participation, *, groups: bool = False) -> None:
        self.participation, self.steps = participation, 0
        self.table, self._groups = UnitTable(), groups

    def take(self, ids: Ids | None, *, drop: bool = False, is_part: bool = False) -> Admitted:
        """Let these units take part in the next step, or in a further part of the last one.

        `ids=None`: units that nobody names, or that a secret draw decides about. With `drop`, rows
        that may not take part are left out instead of refused.

        Guarantees: where it raises, nothing changed. Every unit's steps are a pattern that the
        participation allows, and no unit is in two parts of a step.
        """
        step, rule = self.steps - is_part, self.participation
        if step >= rule.steps:
            raise HorizonExceeded(
                f"step {step} (counted from 0) lies beyond the {rule.steps} planned steps; fit a "
                "longer plan for a new run"
            )
        if ids is None or rule.is_sampled:
            self.steps = step + 1
            return Admitted(NOBODY if ids is None else ids, None)
        units, repeats = distinct(ids, step=step, groups=self._groups, drop=drop)
        seen = self.table.look_up(units)
        mask = rule.admits(step, seen) & (seen.last < step)
        if not drop:
            self._refuse(units, seen, mask, step)
        keep = None
        if repeats is not None or not mask.all():
            keep = mask[np.searchsorted(units, ids)]
            keep &= True if repeats is None else ~repeats
            units, seen = units[mask], Seen(*(column[mask] for column in seen))
        self.table.update(units, step=step, first=rule.begins_anew(step, seen))
        self.steps = step + 1
        return Admitted(units, keep)

    def admits(self, ids: Ids) -> Mask:
        """Which of these distinct units may take part in the next step; takes nobody."""
        return self.participation.admits(self.steps, self.table.look_up(ids))

    def why_not(self, unit: int, step: int | None = None) -> str:
        """The rule that a unit would break."""
        record = self.table.look_up(np.array([unit], dtype=np.int64))
        first, last, count = (int(column[0]) for column in record)
        step = self.steps if step is None else step
        if last == step:
            return "it is in another part of this step already"
        return self.participation.why_not(step, first=first, last=last, count=count)

    def _refuse(self, units: Ids, seen: Seen, mask: Mask, step: int) -> None:
        if mask.all():
            return
        refused = np.flatnonzero(~mask)
        unit = int(units[refused[0]])
        others = f" (and {len(refused) - 1} more units of this batch)" if len(refused) > 1 else ""
        raise ParticipationViolation(
            f"unit {unit} may not take part in step {step}{others}: {self.why_not(unit, step)}; "
            "keep the order of the plan, or use on_violation='drop'"
        )


def distinct(ids: Ids, *, step: int, groups: bool, drop: bool) -> tuple[Ids, Mask | None]:
    """Distinct units in order, and which rows repeat a unit and are dropped (None: none)."""
    if bool((ids[1:] > ids[:-1]).all()):  # in order already, as data in file order is
        return ids, None
    ordered = np.sort(ids)
    if bool((ordered[1:] > ordered[:-1]).all()):
        return ordered, None
    units, first, often = np.unique(ids, return_index=True, return_counts=True)
    if groups:
        return units, None
    if not drop:
        raise ParticipationViolation(
            f"unit {int(units[often > 1][0])} appears twice in step {step}; a batch holds each "
            "example once (a plan with unit='user' groups the examples of a user)"
        )
    repeats = np.ones(len(ids), dtype=bool)
    repeats[first] = False
    return units, repeats


# -- lists of units in few bytes -------------------------------------------------------------------


class UnitLists:
    """Lists of units as JSON, in order.

        [a, b]          all from a to b − 1
        7               those of step 7
        "2…", "8…"      base64 of differences of so many bytes, the first from 0; 8: of units

    State: the lists of steps that later ones may refer to; readers and writers keep the same.
    """

    def __init__(self) -> None:
        self._steps: dict[bytes, int] = {}
        self._lists: dict[int, Ids] = {}
        self._held = 0

    def encode(self, step: int, units: Ids) -> Any:
        """The list of a step; `units` are distinct and in order."""
        size = len(units)
        if not size or int(units[-1]) - int(units[0]) == size - 1:
            return [int(units[0]), int(units[-1]) + 1] if size else [0, 0]
        known = self._steps.get(_name(units))
        if known is not None:
            return known
        self._remember(step, units)
        gaps = np.diff(units, prepend=0)
        top = int(gaps.max()) if units[0] >= 0 and int(gaps.min()) >= 0 else 2**32
        for width, form in _WIDTHS.items():
            if top < 256 ** int(width):
                return width + base64.b64encode(gaps.astype(form).tobytes()).decode()
        return "8" + base64.b64encode(units.astype("<i8").tobytes()).decode()

    def decode(self, step: int, encoded: Any) -> Ids:
        """The list that `encode` wrote; ValueError, KeyError or TypeError for anything else."""
        if isinstance(encoded, list):
            first, end = encoded
            return np.arange(first, end, dtype=np.int64)
        if isinstance(encoded, int):
            return self._lists[encoded]
        data = base64.b64decode(encoded[1:], validate=True)
        if encoded[0] == "8":
            units = np.frombuffer(data, dtype="<i8").astype(np.int64)
        else:
            units = np.cumsum(np.frombuffer(data, dtype=_WIDTHS[encoded[0]]), dtype=np.int64)
        self._remember(step, units)
        return units

    def _remember(self, step: int, units: Ids) -> None:
        if self._held + len(units) <= _REMEMBERED and step not in self._lists:
            self._held += len(units)
            self._steps[_name(units)], self._lists[step] = step, units


def _name(units: Ids) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(units).tobytes(), digest_size=16).digest()
