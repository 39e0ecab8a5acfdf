"""Trial: what one run of a search draws on, which lets in what costs no more than its share.

It counts in memory, in one process: threads wait for each other, and a copy in another process (of
a pool of workers) lets nothing in, as nobody would add up what it counts.

State: the costs that were let in, and why no ε holds for the run, if that was found out.

>>> import pickle
>>> trial = Trial(1.0, 1e-6, "zero-out", "example")
>>> trial.owner == os.getpid(), pickle.loads(pickle.dumps(trial)).owner
(True, 0)
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noshuffle.budget.cost import Cost, cost_of, total
from noshuffle.errors import BudgetExceeded, Unsupported
from noshuffle.rounding import down, up
from noshuffle.statement import PrivacyStatement

INSIDE = "This run is one of a search; the statement of the search covers it, not this one."


@dataclass
class Trial:
    """What one run of a search draws on: give it as `budget=`, and plan for its `epsilon`.

    Guarantees: what it lets in costs no more than its share, however many threads ask at once. A
    forked process is refused, and so is what was pickled.
    """

    epsilon: float
    delta: float
    neighbours: str
    unit: str
    costs: list[Cost] = field(default_factory=list)
    origin: str = "search"
    #: Why no ε holds for a run of it, if that was found out.
    not_private: str = ""
    #: The process that counts; 0 in what was pickled.
    owner: int = field(default_factory=os.getpid, repr=False)
    _turn: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trial:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.epsilon, self.delta, self.neighbours, self.unit)

    def open(
        self,
        what: str,
        statement: PrivacyStatement,
        *,
        run: Path | None = None,
        **more: Any,
    ) -> Trial:
        """Let a run in if the runs of this trial stay within its share."""
        if run is not None:
            raise Unsupported("runs of a search leave no trace: leave out run=, keep the best")
        if self.owner != os.getpid():
            raise Unsupported(
                "this is a copy of what a run of a search draws on, and what it lets in would not "
                "be counted; train in the process of the search (threads may), n_jobs=1"
            )
        self._refuse_others(statement, what)
        cost = cost_of(statement, delta=self.delta, neighbours=self.neighbours)
        with self._turn:
            if not total([*self.costs, cost]).epsilon(self.delta) <= self.epsilon:
                raise BudgetExceeded(
                    f"one run of this search may cost ε = {down(self.epsilon)} at "
                    f"δ = {up(self.delta)}, {what} would cost {up(cost.epsilon(self.delta))}; "
                    "fit plans for trial.epsilon"
                )
            self.costs.append(cost)
        return self

    @property
    def name(self) -> str:
        return self.origin

    def settle(self, statement: PrivacyStatement, **more: Any) -> None:
        """Nothing is given back: the bound is on a run as it was planned. One that turned out to be
        no Gaussian mechanism (a solver reserves its place before it knows) does not leave."""
        if statement.epsilon > 0:
            self._refuse_others(statement, statement.mechanism)
            if statement.not_private:
                self.mark_not_private(" ".join(statement.not_private))

    def mark_not_private(self, why: str) -> None:
        """Then the choice among the runs is not private either."""
        self.not_private = why

    def _refuse_others(self, statement: PrivacyStatement, what: str) -> None:
        if statement.unit != self.unit or statement.mu is None:
            raise Unsupported(
                f"runs of this search must be Gaussian (no sampling, no pure ε) and protect one "
                f"{self.unit}; {what} does not"
            )

    def words(self) -> str:
        """For the statement of the run itself."""
        return INSIDE


def _copied(epsilon: float, delta: float, neighbours: str, unit: str) -> Trial:
    return Trial(epsilon, delta, neighbours, unit, owner=0)
