"""What a federated run ended with, as a person and as a program read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noshuffle.cli.federated_settings import Limits
from noshuffle.cli.job_view import JobResult, JobWords
from noshuffle.federated.per_user import Spending

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class FederatedResult(JobResult):
    """A run of rounds; `skipped` are rounds lost to a crash before this start."""

    limits: Limits | None
    rounds_now: int
    training_seconds: float
    is_complete: bool
    skipped: tuple[int, ...]
    loss: float
    users: tuple[Spending, ...]

    def rows(self, words: JobWords) -> list[tuple[str, str]]:
        rate = self.rounds_now / self.training_seconds if self.training_seconds else 0.0
        more = [
            ("limits", derivation(self.limits)),
            ("rounds", f"{self.steps} of {self.plan.steps} ({rate:.1f} a second)"),
        ]
        if self.skipped:
            numbers = ", ".join(map(str, self.skipped))
            more.append(("rounds passed over", f"{numbers} (open when the run died; charged)"))
        return [*super().rows(words), *more]

    def tell(self, console: Console) -> None:
        """Who paid what, and what the limits left unused."""
        if self.users:
            console.print(_spending_table(self.users))
        if not self.is_complete:
            console.print("ended early: no user was free any more; the rest of the plan is unused")
        elif self.limits is not None and self.limits.shortage:
            console.print(
                f"the limits left at least {self.limits.shortage:,} invitations unfilled; ask "
                "fewer clients a round, or allow more participations"
            )

    def to_record(self) -> dict[str, Any]:
        limits = self.limits
        return {
            **super().to_record(),
            "test_loss": self.loss if math.isfinite(self.loss) else None,
            "rounds": self.steps,
            "is_complete": self.is_complete,
            "skipped_rounds": list(self.skipped),
            "rounds_per_second": self.rounds_now / max(self.training_seconds, 1e-9),
            "limits": None
            if limits is None
            else {
                "separation": limits.separation,
                "max_participations": limits.max_participations,
                "separation_is_derived": limits.is_separation_derived,
                "max_participations_is_derived": limits.is_max_derived,
                "unfilled_invitations": limits.shortage,
            },
            "users": [
                {
                    "participations": row.participations,
                    "users": row.users,
                    "epsilon": row.epsilon if math.isfinite(row.epsilon) else None,
                }
                for row in self.users
            ],
        }


def derivation(limits: Limits | None) -> str:
    """The limits and what they follow from, in one line."""
    if limits is None:
        return "none: cohorts are drawn by secret coin flips, which a network cannot promise"
    is_derived = limits.is_separation_derived or limits.is_max_derived
    return limits.words() + (f" from {limits.why}" if is_derived else "")


def _spending_table(users: tuple[Spending, ...]) -> Any:
    from rich.table import Table

    table = Table(title="ε by how often a user was asked", title_justify="left")
    for heading in ("times asked", "users", "ε"):
        table.add_column(heading, justify="right")
    for row in users:
        table.add_row(str(row.participations), f"{row.users:,}", f"{row.epsilon:.3f}")
    return table
