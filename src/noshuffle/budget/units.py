"""What each unit has spent over all runs: Σ μ_u² by the steps that it really took part in.

    μ_u of a run   that of the plan's pattern with at most as many steps as the unit had
    used up        Σ μ_u² of closed runs + what is reserved for everybody > what the limit allows

A run without sampling is, row by row of its noise, a sequence of Gaussian mechanisms whose μ_t
depend on the unit's own past and present steps; their squares add up to ‖C u‖²/z² for the steps u
that the unit had, and a unit is left out before the sum passes the limit. That is the individual
filter of Feldman and Zrnic (2021) in the Gaussian form of Koskela, Tobaben and Honkela (2023): runs
and the steps of a unit may be chosen by what was released before. What a unit has spent tells how
often it took part: keep it as secret as the data.

State: two sorted arrays, 16 bytes a unit, in a file that the books name by its digest.

>>> spent = UnitSpending().add(np.array([3, 9]), np.array([0.5, 0.25]))
>>> spent.add(np.array([9, 4]), np.array([1.0, 1.0])).of(np.array([3, 4, 9, 7])).round(9)
array([0.5 , 1.  , 1.25, 0.  ])
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import VerificationFailed
from noshuffle.participation import narrowed
from noshuffle.plan import Plan
from noshuffle.release.files import make_folder, sync, write_bytes
from noshuffle.release.unit_ids import Ids

Array = np.ndarray


@dataclass(frozen=True)
class UnitSpending:
    """Σ μ² by unit; `ids` are in order. A value: `add` makes a new one."""

    ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    spent: Array = field(default_factory=lambda: np.empty(0))

    def add(self, ids: Ids, amounts: Array) -> UnitSpending:
        """What is spent once these units, each named once, have spent so much more; rounded up."""
        order = np.argsort(ids, kind="stable")
        new, more = ids[order], amounts[order]
        at = np.searchsorted(self.ids, new)
        is_known = np.zeros(len(new), dtype=bool)
        inside = at < len(self.ids)
        is_known[inside] = self.ids[at[inside]] == new[inside]
        spent = self.spent.copy()
        spent[at[is_known]] = np.nextafter(spent[at[is_known]] + more[is_known], np.inf)
        places = at[~is_known]
        return UnitSpending(
            np.insert(self.ids, places, new[~is_known]), np.insert(spent, places, more[~is_known])
        )

    def without(self, part: UnitSpending) -> UnitSpending:
        """What is spent without one run that was added before; rounded up."""
        rest = self.spent.copy()
        at = np.searchsorted(self.ids, part.ids)
        rest[at] = np.maximum(np.nextafter(rest[at] - part.spent, np.inf), 0.0)
        return UnitSpending(self.ids, rest)

    def of(self, ids: Ids) -> Array:
        """What each of these has spent; 0 for one that was never seen."""
        if not len(self.ids):
            return np.zeros(len(ids))
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.spent[at], 0.0)

    def above(self, limit: float) -> Ids:
        """The units that have spent more than this, in order."""
        return self.ids[self.spent > limit]

    @property
    def most(self) -> float:
        """What the unit that has spent most has spent."""
        return float(self.spent.max(initial=0.0))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a file of its own, readable by its owner only; what the books must know of it."""
        buffer = io.BytesIO()
        np.save(buffer, np.stack([self.ids, self.spent.view(np.int64)]))
        data = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        name = f"units-{digest[:16]}.npy"
        write_bytes(folder / name, data, mode=0o600)
        return {"file": name, "digest": digest, "units": len(self.ids)}

    @classmethod
    def load(cls, folder: Path, record: dict[str, Any] | None) -> UnitSpending:
        """What `save` wrote; another file is refused."""
        if record is None:
            return cls()
        try:
            data = (folder / record["file"]).read_bytes()
        except OSError as error:
            raise VerificationFailed(f"{folder}: what units have spent is gone ({error})") from None
        if hashlib.sha256(data).hexdigest() != record["digest"]:
            raise VerificationFailed(f"{folder / record['file']} is not what was written there")
        ids, spent = np.load(io.BytesIO(data), allow_pickle=False)
        return cls(ids, spent.view(np.float64))


def amounts(plan: Plan, steps: int, counts: Ids, *, at_most: float, factor: float = 1.0) -> Array:
    """μ_u² of units that took part so often in the first `steps` steps of a plan.

    Guarantees: never below the exact value for any pattern of that many steps that the plan
    admits, never above `at_most`, the μ² of the run.
    """
    kinds, which = np.unique(counts, return_inverse=True)
    costs = []
    for count in kinds.tolist():
        part, cost = narrowed(plan.participation, count), at_most
        if count == 0:
            cost = 0.0
        elif part is not None and plan.noise_multiplier:
            reach = plan.sensitivity_after(steps, participation=part).value
            shift = reach * plan.multiplier_of_sensitivity * factor
            cost = min(at_most, (shift / plan.noise_multiplier) ** 2)
        costs.append(cost)
    return np.array(costs)[which]


def new_secret(folder: Path) -> str:
    """A secret by which names of units become numbers; returns what shows that it is the one."""
    make_folder(folder)
    own = folder / f".ids.key.{secrets.token_hex(8)}"
    write_bytes(own, secrets.token_bytes(32), mode=0o600)
    try:
        os.link(
            own, folder / "ids.key"
        )  # of several processes that begin the same budget, one does
        sync(folder)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not (folder / "ids.key").exists():
            write_bytes(folder / "ids.key", own.read_bytes(), mode=0o600)
    finally:
        own.unlink()
    return _print_of(folder)


def _print_of(folder: Path) -> str:
    return hashlib.sha256(b"ns-budget" + (folder / "ids.key").read_bytes()).hexdigest()


def secret_of(folder: Path, limit: dict[str, Any]) -> bytes:
    if not (folder / "ids.key").exists() or _print_of(folder) != limit.get("ids"):
        raise VerificationFailed(
            f"{folder / 'ids.key'} is missing or another one: without it nobody knows which unit "
            "has spent what; bring it back"
        )
    return (folder / "ids.key").read_bytes()
