"""Budget: a limit on what all runs on the same data cost together, kept on the disk.

A run reserves its whole cost before it starts, is refused where that would pass the limit, and is
charged for what it released when it is closed. One that died stays charged for all that it
reserved, until it is opened again and closed. Costs are (μ, s) and add up as in `accounting.gdp`.
The limit is a privacy filter: the next run may depend on everything released before, so it is fixed
before the first run. `pure` sets a part of ε aside for runs of pure ε (with `delta=0` all of it).
See docs/budget.md.

State: the folder; nothing in memory, so copies, pickles and forks are the same budget.

>>> import tempfile
>>> from noshuffle import Plan, PrivateSum, SinglePass
>>> folder = tempfile.TemporaryDirectory()
>>> budget = Budget(folder.name, epsilon=2.0, delta=1e-5)
>>> plan = Plan.fit(SinglePass(steps=4), mechanism="tree", epsilon=1.0, delta=1e-5)
>>> PrivateSum(plan, clip=1.0, shape=(), budget=budget).close()     # nothing was released
>>> round(budget.total().epsilon(1e-5), 9), len(budget.entries())
(0.0, 1)
>>> sums = [PrivateSum(plan, clip=1.0, shape=(), budget=budget) for _ in range(3)]
>>> round(budget.total().epsilon(1e-5), 3)
1.835
>>> PrivateSum(plan, clip=1.0, shape=(), budget=budget)
Traceback (most recent call last):
    ...
noshuffle.errors.BudgetExceeded: run would bring what this data has cost from ε = 1.835 to 2.155 \
at δ = 1e-05, and the limit is 2; a run of at most ε = 0.6849 would fit
>>> folder.cleanup()
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from noshuffle.budget.cost import Cost
from noshuffle.budget.entries import BooksState, Entry
from noshuffle.budget.limit import SpendingLimit
from noshuffle.budget.open_run import OpenRun
from noshuffle.budget.reservation import Reservation
from noshuffle.budget.store import Books, folder_of
from noshuffle.errors import (
    BudgetExceeded,
    InvalidInput,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    positive,
)
from noshuffle.plan import Plan
from noshuffle.rounding import down, up
from noshuffle.statement import PrivacyStatement

NUMBERS = ("epsilon", "delta", "pure")
NEIGHBOURS = ("zero-out", "replace-one")


class Budget:
    """What runs on the same data draw on. Arguments:

        folder: where the books are kept; made if it is not there, opened if it is.
        epsilon, delta: the limit; needed for a new budget, and never changed afterwards.
        pure: the part of epsilon that is set aside for runs of pure ε.
        unit: what is protected, "example" (default) or "user"; other runs are refused.
        neighbours: "zero-out" (default; covers adding and removing) or "replace-one".

    Guarantees: the runs that were let in are together (ε, δ)-private, however each was chosen by
    what was released before, as long as every run on this data draws on this budget and the
    assumptions of their statements hold. Runs named by `unprotected` are apart from that, and so
    are those that turned out NOT PRIVATE (`not_private_runs`), whose charges stay.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        pure: float | None = None,
        unit: str | None = None,
        neighbours: str | None = None,
    ) -> None:
        instance_of((str, os.PathLike), folder=folder)
        self.folder = folder_of(folder)
        self._books = Books(self.folder)
        self._exposes = ""
        given: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "pure": pure}
        # NumPy's numbers are no JSON.
        given = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
        given |= {"unit": unit, "neighbours": neighbours}
        if not self._books.is_there:
            if epsilon is None or delta is None:
                raise InvalidInput(
                    f"{folder} holds no budget; give epsilon and delta for a new one"
                )
            positive(epsilon=epsilon)
            if not 1e-9 <= epsilon <= 1e6:
                raise InvalidInput(f"epsilon must be between 1e-9 and 1e6, got {epsilon!r}")
            open_unit(delta=delta) if delta else non_negative(delta=delta)
            limit: dict[str, Any] = {"unit": "example", "neighbours": "zero-out"}
            limit |= {"name": secrets.token_hex(6), "pure": 0.0 if delta else epsilon}
            limit |= {name: value for name, value in given.items() if value is not None}
            one_of(("example", "user"), unit=limit["unit"])
            one_of(NEIGHBOURS, neighbours=limit["neighbours"])
            non_negative(pure=limit["pure"])
            if limit["pure"] > epsilon or (not delta and limit["pure"] != epsilon):
                raise InvalidInput(
                    f"pure is a part of epsilon (all of it where delta is 0), got {pure!r}"
                )
            self._books.begin(limit)
        self.limit = self._state().limit
        for name, value in given.items():
            if value not in (None, self.limit[name]):
                raise InvalidInput(
                    f"{folder} is a budget with {name} = {self.limit[name]!r}, got {value!r}; a "
                    "limit is fixed before the first run"
                )
        self._limit = SpendingLimit(**{name: self.limit[name] for name in ("name", *given)})
        self.epsilon, self.delta, self.pure = (float(self.limit[n]) for n in NUMBERS)

    def __repr__(self) -> str:
        return f"Budget({str(self.folder)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (str(self.folder.resolve()), self._exposes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # scikit-learn's clone: the same data, the same books

    # -- what there is -------------------------------------------------------------------------

    def _state(self) -> BooksState:
        with self._books.reading() as events:
            return BooksState.of(events)

    @property
    def name(self) -> str:
        """By what runs know this budget."""
        return str(self.limit["name"])

    def entries(self) -> list[Entry]:
        """Every run, oldest first."""
        return list(self._state().entries.values())

    def unprotected_runs(self) -> list[str]:
        """Runs without a finite cost, by the names they were declared under."""
        return [one.what for one in self.entries() if not math.isfinite(one.cost.mu)]

    def not_private_runs(self) -> list[str]:
        """Runs that were let in and for which no ε holds, as was found later; and why."""
        return [f"{one.what}: {one.not_private}" for one in self._state().void()]

    def total(self) -> Cost:
        """What all runs cost together, those under way as reserved; unprotected ones are apart.

        Of runs that turned out NOT PRIVATE it is no cost: with their charges it bounds the others.
        """
        return self._state().total()

    def left(self) -> float:
        """The largest ε, at the budget's δ, of one more Gaussian run (of pure ε, where δ = 0)."""
        return self._limit.left(self.total())

    def words(self) -> str:
        """What was spent, and what it means, as text."""
        entries, spent, void = self.entries(), self.total(), self.not_private_runs()
        who = f"{len(entries)} run{'' if len(entries) == 1 else 's'} on this data"
        does = f"NOT PRIVATE: no ε holds for {len(void)} of {who}; the others cost at most"
        lines = [
            f"{does if void else f'{who} cost'} ε = {up(spent.epsilon(self.delta), digits=4)} at "
            f"δ = {up(self.delta)} together ({spent.kind}), of ε = {self.epsilon:g}",
            f"unit: {self.limit['unit']}, {self.limit['neighbours']} neighbours; room for one more "
            f"run of ε = {down(self.left(), digits=4)}",
            "the next run may be chosen by what earlier ones released: the limit is a privacy "
            "filter",
        ]
        lines += [f"NOT PRIVATE, its charge stays: {one}" for one in void]
        lines += [f"NOT PRIVATE, and not counted: {one}" for one in self.unprotected_runs()]
        return "\n".join(lines)

    # -- runs ----------------------------------------------------------------------------------

    def unprotected(self, name: str) -> Budget:
        """The same budget for a run without privacy, by a name that the books keep.

        Its cost is infinite: it is listed, every statement after it names it, and the limit
        speaks of the other runs only.
        """
        instance_of(str, name=name)
        if not name.strip():
            raise InvalidInput(f"a run without privacy needs a name, got {name!r}")
        with self._books.writing() as (events, append):
            if name not in BooksState.of(events).unprotected:
                append("unprotected", {"name": name})
        return _reopened(str(self.folder), name)

    def declared(self) -> list[str]:
        """The names that runs without privacy may have."""
        return self._state().unprotected

    def open(
        self,
        what: str,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        run: Path | None = None,
        origin: str | None = None,
        parents: Sequence[str] = (),
        lives: Sequence[str] = (),
        released: int = 0,
        keeps_draws: bool = False,
    ) -> OpenRun:
        """Reserve the cost of a run; see `release.account.Account.open`.

        Guarantees: when this returns, the reservation is durable. A run that comes back finds its
        own place; a copy or an older state of it, which lacks keys or steps, gets one of its own.
        """
        state = self._state()
        cost = self._limit.cost(statement, plan, steps, state)  # long work, before anybody waits
        if not math.isfinite(cost.mu) and not self._exposes:
            raise BudgetExceeded(
                f"{what} has no finite cost (no noise, no privacy); name it, and it is listed "
                "apart: budget=budget.unprotected('baseline')"
            )
        asked = Reservation(
            what=what,
            listed_as=self._exposes,
            statement=statement,
            plan=plan,
            steps=steps,
            run=run,
            origin=origin,
            parents=tuple(parents),
            lives=tuple(lives),
            released=released,
            keeps_draws=keeps_draws,
        )
        return asked.enter(self._limit, self._books)


def _reopened(folder: str, exposes: str) -> Budget:
    made = Budget(folder)
    made._exposes = exposes
    return made
