"""What a run draws on: the budget over all runs on the same data, as runs see it.

    reserve    before the first step: what the whole run will cost, or be refused
    settle     when a run is closed: it is charged for what its log shows

`noshuffle.Budget` is one; it stands above all runs. A run that draws on a budget says so in its log
from the start, and goes on only with it. State: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan, PrivacyStatement


class Charge(Protocol):
    """The place of one run in a budget."""

    @property
    def origin(self) -> str:
        """By what the run's log knows it: "name of the budget/…"."""
        ...

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        link: str = "",
    ) -> None:
        """Charge what was released, not what was reserved. `link`: the newest row of its log."""

    def words(self) -> str:
        """Which run this is among those on the same data, and what they cost together."""
        ...


class Account(Protocol):
    """What runs draw on."""

    @property
    def name(self) -> str:
        """Runs are known to it as "name/…"."""
        ...

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
    ) -> Charge:
        """Reserve the cost of a run, or raise `BudgetExceeded`.

        `statement` is that of the whole run, `plan` and `steps` say the same where it is sampled.
        A run that was here before has an `origin`; `links` are those of its log, the last of them
        that of this start. One whose links lack the last that was noted is another branch of the
        run, and is charged anew (with `keeps_draws` it is refused: branches share secret draws).
        `parents` are the origins of the runs that it was forked from and that drew on this account.
        """
        ...


def check_budget(budget: Account) -> None:
    """Refuse what no run can draw on."""
    if not hasattr(budget, "reserve"):
        raise InvalidInput(
            f"budget must be a noshuffle.Budget, got {type(budget).__name__}; open one that is "
            "there with noshuffle.Budget(folder), or begin it with epsilon= and delta="
        )
