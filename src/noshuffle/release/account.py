"""What a run draws on: the budget over all runs on the same data, as the door sees it.

    enter      before the first release: reserve what the whole run will cost, or be refused
    leave      when a run is closed: it is charged for what its ledger shows

The budget itself (`noshuffle.budget`) stands above all drivers; here are the things that they ask
of it. A run that draws on a budget has a fact `budget` in its ledger from the start, and goes
on only with it; notes of the kind `budget` in its log hold what is said of it in the statement.

State: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.release.facts import void_notes
from noshuffle.release.file_identity import identity, is_same
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.spending import Ancestor, spent
from noshuffle.statement import PrivacyStatement

if TYPE_CHECKING:
    from noshuffle.release.folder import RunFolder
    from noshuffle.release.ledger import Ledger


class Charge(Protocol):
    """The place of one run in a budget."""

    @property
    def origin(self) -> str:
        """By what the run's ledger knows it."""
        ...

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        rows: int = 0,
    ) -> None:
        """Charge what was released instead of what was reserved; a statement that says NOT PRIVATE
        marks the run. `rows`: the steps on record.
        """

    def words(self) -> str:
        """Which run this is among those on the same data, and what they cost together."""
        ...


class Account(Protocol):
    """What runs draw on; `noshuffle.Budget` is one."""

    @property
    def name(self) -> str:
        """Runs are known to it as "name/…"."""
        ...

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
    ) -> Charge:
        """Reserve the cost of a run, or raise `BudgetExceeded`.

        `statement` is that of the whole run, `plan` and `steps` say the same where it is sampled.
        `origin`, `lives` (the public names of its keys) and `released` (its steps on record) tell
        a run that is resumed from a copy or an older state of it; `parents` are the origins of the
        runs that it was forked from and that drew on this account. With `keeps_draws` (see
        `Participation`) such a copy is refused: it shares secrets with the run.
        """
        ...


#: The fact that names the budget of a run before it is known whether the run fits.
ASKED = "budget_asked"


def check_budget(budget: Account) -> None:
    """Refuse what no run can draw on."""
    if not hasattr(budget, "open"):
        raise InvalidInput(
            f"budget must be a noshuffle.Budget, got {type(budget).__name__}; open one that is "
            "there with noshuffle.Budget(folder), or begin it with epsilon= and delta="
        )


def enter(
    budget: Account | None,
    plan: Plan,
    ledger: Ledger,
    folder: RunFolder | None,
    ancestors: Sequence[Ancestor],
) -> Charge | None:
    """Reserve the cost of a run that was just opened; None without a budget.

    Guarantees: when this returns, everything that the run may release is reserved. Raises for a
    run that draws on a budget, or was begun to, and is opened without one.
    """
    origin = ledger.meta("budget")
    if budget is None:
        if name := origin or ledger.meta(ASKED):
            raise InvalidInput(
                f"this run draws on the budget {name.partition('/')[0]}, from which it would "
                "release more than was charged; give budget="
            )
        return None
    check_budget(budget)
    if folder is not None and origin is None:
        # Before the charge: a folder whose run the limit refused must not go on without it.
        ledger.bind(ASKED, budget.name)
    before, notes = _uncounted(ancestors, budget.name), ledger.notes("life")
    charge = budget.open(
        "run" if folder is None else f"run {folder.path.name}",
        spent(plan, plan.steps, ancestors=before),
        plan=None if before else plan,
        steps=plan.steps,
        run=None if folder is None else folder.path.resolve(),
        origin=origin,
        parents=[one.budget for one in ancestors if one not in before],
        lives=_lives_here(notes),
        released=ledger.released,
        keeps_draws=plan.participation.keeps_draws,
    )
    ledger.bind("budget", charge.origin)
    ledger.note("budget", words=charge.words())
    return charge


def _lives_here(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of the newest life, and of those before it as long as their ledger was this file.

    A ledger that came from another file was copied or restored: what it was before is another run
    in the books, or the same one with steps that this ledger lacks, so that it pays for itself.
    """
    is_here = [is_same(life, notes[-1]) for life in notes]
    start = max((i + 1 for i, same in enumerate(is_here) if not same), default=0)
    return [str(life["keys"]) for life in notes[start:]]


def pays_for_itself(folder: RunFolder) -> bool:
    """Whether a later phase of a stream needs a place of its own in a budget: one that was copied
    or restored, and so goes on beside the phases that the first one pays for, or that has one."""
    if not folder.ledger_file.exists():
        return False
    with closing(Evidence(folder.ledger_file)) as evidence:
        if not evidence.is_made:  # its process was killed before it began
            return False
        now, notes = identity(folder.ledger_file), evidence.notes("life")
        has_place = not {"budget", ASKED}.isdisjoint(evidence.bound())
    return has_place or not all(is_same(life, now) for life in notes)


def leave(
    charge: Charge | None,
    plan: Plan,
    ledger: Ledger,
    ancestors: Sequence[Ancestor],
    *,
    released: int,
) -> None:
    """Charge a run for what it released, and note what its statement will say of it.

    `released` is at least what the ledger shows; a run in memory may have used noise without rows.
    """
    if charge is None:
        return
    ledger.check_owner()  # a forked process has a copy of a run that goes on
    facts, rows = ledger.facts(), ledger.released
    before = _uncounted(ancestors, charge.origin)
    if released and _is_in_one_piece(plan, facts):
        released = plan.steps
    said = spent(plan, released, ancestors=before).with_assumptions(*void_notes(facts))
    charge.settle(said, plan=None if before else plan, steps=released, rows=rows)
    ledger.note("budget", words=charge.words())


def _is_in_one_piece(plan: Plan, facts: Mapping[str, str | None]) -> bool:
    """Whether a run that has begun is charged for the whole plan, wherever it stopped.

    Counts of norms were paid for all steps at once. What sampled steps cost is known for a number
    of them that was fixed beforehand: where a run stops may be chosen by its results, and its cost
    is no sum over steps, as that of Gaussian ones is.
    """
    return facts.get("adaptive_clip") == "yes" or plan.participation.is_sampled


def _uncounted(ancestors: Sequence[Ancestor], origin: str) -> list[Ancestor]:
    """Runs that this one was forked from, as far as they do not draw on the same budget."""
    name = origin.partition("/")[0]
    return [one for one in ancestors if one.budget.partition("/")[0] != name]
