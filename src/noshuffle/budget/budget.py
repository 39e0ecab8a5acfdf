"""Budget: a limit on what all runs on the same data cost together, kept on the disk.

A run reserves its whole cost before it starts, is refused where that would pass the limit, and is
charged for what it released when it is closed. One that died stays charged for all that it
reserved, until it is opened again and closed. Costs are (μ, s) and add up as in `accounting.gdp`.
The limit is a privacy filter: the next run may depend on everything released before, so it is fixed
before the first run. `pure` sets a part of ε aside for runs of pure ε (with `delta=0` all of it):
that is added up as it is, and all else must stay within the rest. See docs/budget.md.

    FOLDER/budget.jsonl    a log (`release.log`), locked for the time of one addition
    budget                 its first row: the limit
    run                    a run as it is charged from here on; the newest row of an id counts
    unprotected            a name that a run without privacy may have

State: the folder; nothing in memory, so copies, pickles and forks are the same budget.

>>> import tempfile
>>> from noshuffle import Plan, SinglePass
>>> folder = tempfile.TemporaryDirectory()
>>> budget = Budget(folder.name, epsilon=2.0, delta=1e-5)
>>> plan = Plan.fit(SinglePass(steps=4), mechanism="tree", epsilon=1.0, delta=1e-5)
>>> budget.reserve("run", plan.statement()).settle(plan.statement(steps=0))  # nothing was released
>>> round(budget.total().epsilon(1e-5), 9), len(budget.entries())
(0.0, 1)
>>> places = [budget.reserve("run", plan.statement()) for _ in range(3)]
>>> round(budget.total().epsilon(1e-5), 3)
1.835
>>> budget.reserve("run", plan.statement())
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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from noshuffle.accounting import gdp
from noshuffle.budget.cost import Cost, cost_of, total
from noshuffle.errors import (
    BudgetExceeded,
    InvalidInput,
    Unsupported,
    VerificationFailed,
    instance_of,
    non_negative,
    one_of,
    open_unit,
    positive,
)
from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.release.files import finite, make_folder
from noshuffle.release.log import Damaged, Log, Row, read
from noshuffle.rounding import down, up

_FILE = "budget.jsonl"
_NEIGHBOURS = ("zero-out", "replace-one")
_TURNS: dict[int, threading.Lock] = {}


@dataclass(frozen=True)
class Entry:
    """One run in a budget. `cost` is what it is charged now: all that it may cost while it is open.

    `last` is the newest link of its log that the budget was told of, `run` its folder.
    """

    id: str
    what: str
    cost: Cost
    began: float
    is_open: bool = True
    run: str = ""
    last: str = ""

    def write(self, log: Log) -> None:
        """From here on it is charged like this."""
        log.append("run", entry=finite(asdict(self)))  # JSON has no infinite number

    @classmethod
    def read(cls, row: Row) -> Self:
        own, cost = row["entry"], row["entry"]["cost"]
        mu = math.inf if cost["mu"] is None else cost["mu"]
        return cls(**{**own, "cost": Cost(**{**cost, "mu": mu})})


@dataclass
class _Books:
    """What the rows of a budget add up to."""

    entries: dict[str, Entry]
    unprotected: list[str]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Books:
        runs = [Entry.read(row) for row in rows if row["kind"] == "run"]
        named = [row["name"] for row in rows if row["kind"] == "unprotected"]
        return cls({entry.id: entry for entry in runs}, named)

    def total(self, *, but: str = "") -> Cost:
        """What all runs cost together; runs without a finite cost are apart."""
        return total(
            entry.cost
            for entry in self.entries.values()
            if entry.id != but and math.isfinite(entry.cost.mu)
        )

    def place_of(self, links: Sequence[str], run: str) -> Entry | None:
        """The place of a run that comes back, by the links of its log.

        None for another branch of it: a copy or an older state, whose log lacks the last link that
        was noted, or a folder elsewhere while that of the run is open: both may release.
        """
        at = {link: number for number, link in enumerate(links)}
        mine = [
            entry
            for entry in self.entries.values()
            if entry.last in at and (entry.run == run or not entry.is_open)
        ]
        return max(mine, key=lambda entry: at[entry.last], default=None)


class Budget:
    """What runs on the same data draw on. Arguments:

        folder: where it is kept; made if it is not there, opened if it is.
        epsilon, delta: the limit; needed for a new budget, and never changed afterwards.
        pure: the part of epsilon that is set aside for runs of pure ε.
        unit: what is protected, "example" (default) or "user"; other runs are refused.
        neighbours: "zero-out" (default; covers adding and removing) or "replace-one".

    Guarantees: the runs that were let in are together (ε, δ)-private, however each was chosen by
    what was released before, as long as every run on this data draws on this budget and the
    assumptions of their statements hold. Runs named by `unprotected` are apart from that; others
    that are NOT PRIVATE (no noise, a test seed) are refused. A log that was edited is refused.
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
        self.folder = Path(folder).absolute()  # the same one after the process has gone elsewhere
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidInput(f"a budget is kept in a folder, and {folder} is a file")
        self._file, self._exposes = self.folder / _FILE, ""
        options: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "pure": pure}
        # NumPy's numbers are no JSON.
        options = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
        options |= {"unit": unit, "neighbours": neighbours}
        if not self.is_in(self.folder):
            if epsilon is None or delta is None:
                raise InvalidInput(
                    f"{folder} holds no budget; give epsilon and delta for a new one"
                )
            limit = _new_limit(options)
            make_folder(self.folder)
            with _turn(), Log(self._file) as log:
                if not log.rows:  # otherwise another process was faster
                    log.append("budget", limit=limit)
        self.limit: dict[str, Any] = _rows(self._file)[0]["limit"]
        for name, value in options.items():
            if value not in (None, self.limit[name]):
                raise InvalidInput(
                    f"{folder} is a budget with {name} = {self.limit[name]!r}, got {value!r}; a "
                    "limit is fixed before the first run"
                )
        self.name = str(self.limit["name"])  # by what runs know it
        self.epsilon, self.delta, self.pure = (
            float(self.limit[name]) for name in ("epsilon", "delta", "pure")
        )

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Whether a folder holds a budget; a process that died while it began one has left none."""
        return bool(_rows(Path(folder) / _FILE))

    def __repr__(self) -> str:
        return f"Budget({str(self.folder)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (str(self.folder.resolve()), self._exposes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # scikit-learn's clone: the same data, the same budget

    # -- what there is -------------------------------------------------------------------------

    def _read(self) -> _Books:
        return self._books(_rows(self._file))

    def _books(self, rows: Sequence[Row]) -> _Books:
        if not rows or rows[0]["limit"] != self.limit:
            raise VerificationFailed(
                f"{self._file} is not the budget {self.name} any more; bring it back as it was: "
                "what was spent is not known"
            )
        return _Books.of(rows)

    @contextmanager
    def _adding(self) -> Iterator[tuple[Log, _Books]]:
        """The log, and what it holds: nobody else adds to it until this ends, and has flushed."""
        self._read()  # refuses what was changed; `Log` would cut it off
        with _turn(), Log(self._file) as log:
            yield log, self._books(log.rows)

    def entries(self) -> list[Entry]:
        """Every run, oldest first."""
        return list(self._read().entries.values())

    def unprotected_runs(self) -> list[str]:
        """Runs without a finite cost, by the names they were declared under."""
        return [one.what for one in self.entries() if not math.isfinite(one.cost.mu)]

    def total(self) -> Cost:
        """What all runs cost together, those under way as reserved; unprotected ones are apart."""
        return self._read().total()

    def left(self) -> float:
        """The largest ε, at the budget's δ, of one more Gaussian run (of pure ε, where δ = 0)."""
        return self._left(self.total())

    def words(self) -> str:
        """What was spent, and what it means, as text."""
        entries, spent = self.entries(), self.total()
        who = f"{len(entries)} run{'' if len(entries) == 1 else 's'} on this data"
        lines = [
            f"{who} cost ε = {up(spent.epsilon(self.delta), digits=4)} at "
            f"δ = {up(self.delta)} together ({spent.kind}), of ε = {self.epsilon:g}",
            f"unit: {self.limit['unit']}, {self.limit['neighbours']} neighbours; room for one more "
            f"run of ε = {down(self.left(), digits=4)}",
            "the next run may be chosen by what earlier ones released: the limit is a privacy "
            "filter",
        ]
        lines += [f"NOT PRIVATE, and not counted: {one}" for one in self.unprotected_runs()]
        return "\n".join(lines)

    # -- the limit -----------------------------------------------------------------------------

    def _left(self, spent: Cost) -> float:
        if not self.delta:
            return max(0.0, (self.epsilon - spent.pure) * (1 - 1e-9))
        most = 0.0
        if self.pure < self.epsilon:
            rest = self.epsilon - self.pure
            most = gdp.capacity(epsilon=rest, delta=self.delta, slack=spent.slack)
        mu = math.sqrt(max(0.0, most**2 - spent.mu**2)) * (1 - 1e-9)
        return gdp.epsilon(mu=mu, slack=0.0, delta=self.delta)

    def _cost(self, statement: PrivacyStatement, plan: Plan | None, steps: int) -> Cost:
        """What a run of that statement costs here."""
        if statement.unit != self.limit["unit"]:
            raise InvalidInput(
                f"this budget protects one {self.limit['unit']}, the run one {statement.unit}; use "
                "a budget of its own for it"
            )
        neighbours = self.limit["neighbours"]
        return cost_of(statement, delta=self.delta, neighbours=neighbours, plan=plan, steps=steps)

    def _beside(self, cost: Cost, books: _Books, *, but: str) -> Cost:
        """The cost of a run beside all others but one, which took of the pure ε set aside."""
        return cost.within(self.pure - books.total(but=but).pure)

    def _check(self, books: _Books, what: str, cost: Cost, *, but: str = "") -> None:
        """Raise where a run of this cost would pass the limit."""
        if not math.isfinite(cost.mu):
            return
        before = books.total(but=but)
        after = total([before, cost])
        rest = replace(after, pure=0.0).epsilon(self.delta)
        if after.pure <= self.pure and rest <= self.epsilon - self.pure:
            return
        aside = " (of pure ε only what is set aside by pure= is added up as it is)"
        raise BudgetExceeded(
            f"{what} would bring what this data has cost from ε = "
            f"{up(before.epsilon(self.delta), digits=4)} to "
            f"{up(after.epsilon(self.delta), digits=4)} at δ = {up(self.delta)}, and the limit "
            f"is {self.epsilon:g}{aside if self.pure else ''}; a "
            f"run of at most ε = {down(self._left(before), digits=4)} would fit"
        )

    # -- runs ----------------------------------------------------------------------------------

    def unprotected(self, name: str) -> Budget:
        """The same budget for a run without privacy, by a name that it keeps.

        Its cost is infinite: it is listed, every statement after it names it, and the limit
        speaks of the other runs only.
        """
        instance_of(str, name=name)
        if not name.strip():
            raise InvalidInput(f"a run without privacy needs a name, got {name!r}")
        with self._adding() as (log, books):
            if name not in books.unprotected:
                log.append("unprotected", name=name)
        return _reopened(str(self.folder), name)

    def declared(self) -> list[str]:
        """The names that runs without privacy may have."""
        return self._read().unprotected

    def reserve(
        self,
        what: str,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        run: Path | None = None,
        origin: str | None = None,
        links: Sequence[str] = (),
        parents: Sequence[str] = (),
        keeps_draws: bool = False,
    ) -> Place:
        """Reserve the cost of a run; see `release.account.Account.reserve`.

        A run that comes back gets its own place, open with the whole cost again.

        Guarantees: raises, and writes nothing, where the limit would be passed. When this returns,
        the reservation is on the disk.
        """
        cost = self._cost(statement, plan, steps)  # long work, before anybody waits
        why = " ".join(statement.not_private)
        if not math.isfinite(cost.mu) and not self._exposes:
            raise BudgetExceeded(
                f"{what} has no finite cost ({why or 'no noise, no privacy'}); name it, and it is "
                "listed apart: budget=budget.unprotected('baseline')"
            )
        folder, last = "" if run is None else str(run), links[-1] if links else ""
        with self._adding() as (log, books):
            if {*parents, origin or ""} - {"", *books.entries}:
                raise VerificationFailed(
                    f"{self.folder} does not know of a run that draws on it: the budget is older "
                    "than the run; bring the newer one back"
                )
            known = books.place_of(links, folder)
            if known is None:
                if origin is not None and keeps_draws:
                    raise Unsupported(
                        f"{what} is a copy or an older state of a run whose units keep their "
                        "secret positions: two continuations share them, and cost more than two "
                        "runs; go on with the newest state in its own folder, or begin a new run"
                    )
                entry = Entry(self._new_id(), self._exposes or what, cost, time.time())
            else:
                entry = replace(known, is_open=True)
            cost = self._beside(cost, books, but=entry.id)
            self._check(books, what, cost, but=entry.id)
            entry = replace(entry, cost=cost, run=folder, last=last)
            entry.write(log)
        return Place(self, entry.id, last)

    def _new_id(self) -> str:
        return f"{self.name}/{secrets.token_hex(8)}"


@dataclass
class Place:
    """The place of one run in a budget; a `release.account.Charge`.

    State: by what the run is known there, and the last link of its log that was noted.
    """

    budget: Budget
    origin: str
    last: str

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        link: str = "",
    ) -> None:
        """Charge what was released. More than was reserved is refused where it passes the limit.

        Where another branch of the run has come back to this place since, what this one released is
        charged beside it, whatever the limit: it is out.
        """
        budget = self.budget
        cost = budget._cost(statement, plan, steps)
        with budget._adding() as (log, books):
            cost = budget._beside(cost, books, but=self.origin)
            old = books.entries[self.origin]
            new = replace(old, cost=cost, is_open=False, last=link or self.last)
            if old.last != self.last:
                new = replace(new, id=budget._new_id(), began=time.time())
            elif cost.mu > old.cost.mu or cost.slack > old.cost.slack or cost.pure > old.cost.pure:
                budget._check(books, old.what, cost, but=old.id)
            new.write(log)
        self.origin, self.last = new.id, new.last

    def words(self) -> str:
        """Which run this is, and what all of them cost, for its statement."""
        budget, books = self.budget, self.budget._read()
        spent, runs = books.total(), list(books.entries.values())
        number = list(books.entries).index(self.origin) + 1
        bare = [one.what for one in runs if not math.isfinite(one.cost.mu)]
        beside = f" Beside them, without any privacy: {', '.join(bare)}." if bare else ""
        return (
            f"This is run {number} of {len(runs)} on this data; all together ("
            f"those under way as reserved) cost ε = {up(spent.epsilon(budget.delta))} at δ = "
            f"{up(budget.delta)}, {spent.kind}, and the limit of their budget {budget.name} is ε = "
            f"{budget.epsilon:g}, whoever chose the next run by the results of the last.{beside} "
            "Runs that do not draw on it are not counted."
        )


def _new_limit(options: dict[str, Any]) -> dict[str, Any]:
    """The limit of a new budget, with what was not given."""
    epsilon, delta = options["epsilon"], options["delta"]
    positive(epsilon=epsilon)
    if not 1e-9 <= epsilon <= 1e6:
        raise InvalidInput(f"epsilon must be between 1e-9 and 1e6, got {epsilon!r}")
    open_unit(delta=delta) if delta else non_negative(delta=delta)
    limit: dict[str, Any] = {"unit": "example", "neighbours": "zero-out"}
    limit |= {"name": secrets.token_hex(6), "pure": 0.0 if delta else epsilon}
    limit |= {name: value for name, value in options.items() if value is not None}
    one_of(("example", "user"), unit=limit["unit"])
    one_of(_NEIGHBOURS, neighbours=limit["neighbours"])
    non_negative(pure=limit["pure"])
    if limit["pure"] > epsilon or (not delta and limit["pure"] != epsilon):
        raise InvalidInput(
            f"pure is a part of epsilon (all of it where delta is 0), got {options['pure']!r}"
        )
    return limit


def _turn() -> threading.Lock:
    """Processes wait for each other at the log; threads here, since a process has a log open once.

    A fork may inherit a lock that nobody will open, so each process has its own.
    """
    return _TURNS.setdefault(os.getpid(), threading.Lock())


def _rows(file: Path) -> list[Row]:
    """The rows of a budget. Of a last line that a killed process did not write to its end nothing
    has come: no run had begun by it, or what was reserved stays.

    Guarantees: raises `VerificationFailed` where the log was edited.
    """
    rows: list[Row] = []
    try:
        rows.extend(read(file))
    except FileNotFoundError:
        pass
    except Damaged as damage:
        if not damage.is_torn:
            raise VerificationFailed(
                f"{damage}; bring the budget back as it was: what was spent is not known"
            ) from None
    return rows


def _reopened(folder: str, exposes: str) -> Budget:
    budget = Budget(folder)
    budget._exposes = exposes
    return budget
