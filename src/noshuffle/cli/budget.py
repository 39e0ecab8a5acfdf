"""`noshuffle budget`: begin a budget, see what the runs on some data cost together, draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.cli.words import quoted, say
from noshuffle.errors import InvalidInput
from noshuffle.rounding import up

if TYPE_CHECKING:
    from noshuffle.budget import Budget

BUDGET_HELP = "draw on the budget in this folder (noshuffle budget FOLDER --epsilon … begins one)"
#: The name under which a run without privacy, for comparison, must have been declared.
BASELINE = "baseline"
_PICTURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """What `noshuffle budget` can be asked."""

    folder: Path = argument("where the budget is kept")
    epsilon: float | None = setting(None, "the limit of a new budget: ε of all runs together")
    delta: float | None = setting(None, "δ of a new budget; 0: only runs of pure ε")
    pure: float | None = setting(None, "part of ε set aside for runs of pure ε and searches")
    unit: str | None = setting(None, "what is protected: example (default) or user")
    neighbours: str | None = setting(None, "zero-out (default) or replace-one")
    unprotected: str | None = setting(
        None, f"allow runs without privacy by this name ({BASELINE}: for --baseline)"
    )
    output: Path | None = setting(None, "the picture, .svg or .png (default: budget.svg there)")

    def __post_init__(self) -> None:
        if self.unprotected is not None and not self.unprotected.strip():
            raise InvalidInput(f"unprotected must be a name, got {self.unprotected!r}")
        if self.output is not None and self.output.suffix not in _PICTURES:
            raise InvalidInput(
                f"--output must end with {', '.join(_PICTURES)}; got {self.output.name!r}"
            )


@takes(BudgetSettings, Output)
def budget(asked: BudgetSettings, output: Output) -> None:
    """What all runs on the same data have cost together, and what is left.

    With --epsilon and --delta a new budget is begun; give its folder as --budget to train,
    federated, fit and sum. A limit cannot be changed: it is fixed before the first run.
    """
    from noshuffle.budget import Budget
    from noshuffle.report.budget import draw_budget

    is_begun = asked.epsilon is not None and asked.delta is not None
    if not is_begun and not Budget.is_in(asked.folder):
        raise InvalidInput(
            f"{asked.folder} holds no budget; give --epsilon and --delta to begin one there"
        )
    limits = ("epsilon", "delta", "pure", "unit", "neighbours")
    own = Budget(asked.folder, **{name: getattr(asked, name) for name in limits})
    if asked.unprotected is not None:
        own.unprotected(asked.unprotected)
    picture = asked.output or asked.folder / "budget.svg"
    draw_budget(own, picture)
    if output.json:
        print_json(_record(own, picture))
        return
    from rich.console import Console

    Console(markup=False).print(_table(own))
    say(own.words())
    print(f"picture: {picture}")


def opened(folder: Path | None, *, has_baseline: bool = False) -> Budget | None:
    """The budget that a command draws on, if any; a baseline must have been declared there."""
    if folder is None:
        return None
    from noshuffle.budget import Budget

    if not Budget.is_in(folder):
        raise InvalidInput(
            f"--budget: {folder} holds no budget; begin one first: noshuffle budget "
            f"{quoted(folder)} --epsilon ε --delta δ"
        )
    own = Budget(folder)
    if has_baseline and BASELINE not in own.declared():
        raise InvalidInput(
            f"--baseline trains without privacy on data that has a budget; leave it out, or allow "
            f"it first: noshuffle budget {quoted(folder)} --unprotected {BASELINE}"
        )
    return own


def note_baseline(own: Budget | None, bare: Any) -> None:
    """List a run without privacy before it starts; `bare` is its statement."""
    if own is not None:
        own.unprotected(BASELINE).reserve(BASELINE, bare)


def _record(own: Budget, picture: Path) -> dict[str, Any]:
    spent = own.total()
    return {
        "budget": str(own.folder),
        "name": own.name,
        **{name: own.limit[name] for name in ("epsilon", "delta", "pure", "unit", "neighbours")},
        "spent_epsilon": spent.epsilon(own.delta),
        "mu": spent.mu,
        "failure_probability": spent.slack,
        "exact": spent.is_exact,
        "left_epsilon": own.left(),
        "runs": [
            {
                "what": entry.what,
                "epsilon": entry.cost.epsilon(own.delta),
                "is_open": entry.is_open,
                "began": entry.began,
                "run": entry.run or None,
            }
            for entry in own.entries()
        ],
        "unprotected": own.unprotected_runs(),
        "picture": str(picture),
    }


def _table(own: Budget) -> Any:
    from datetime import datetime

    from rich.table import Table

    from noshuffle.report.budget import running

    table = Table(title=f"budget {own.folder}", title_justify="left")
    for heading in ("run", "began", "state", "ε alone", "ε so far"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    entries = own.entries()
    sums = iter(running(entries, own.delta))
    for number, entry in enumerate(entries, 1):
        is_finite = math.isfinite(entry.cost.mu)
        table.add_row(
            f"{number} {entry.what}",
            f"{datetime.fromtimestamp(entry.began):%Y-%m-%d %H:%M}",
            "reserved" if entry.is_open else "charged",
            up(entry.cost.epsilon(own.delta), digits=4) if is_finite else "NOT PRIVATE",
            up(next(sums), digits=4) if is_finite else "not counted",
        )
    return table
