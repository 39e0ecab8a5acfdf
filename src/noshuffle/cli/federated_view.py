"""What a person sees of a federated run: progress, the closing table, the JSON record."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from noshuffle.cli.federated_job import Result, Seen
    from noshuffle.cli.federated_settings import FederatedSettings, Limits


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """The first ctrl-C (or SIGTERM) asks to stop after the round; a second one stops at once."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, handle) for number in numbers]
    except ValueError:  # not in the main thread: whoever runs us handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


@contextmanager
def watching(
    console: Console, settings: FederatedSettings
) -> Iterator[tuple[Callable[[Seen], None], Callable[[str], None]]]:
    """A progress bar on a terminal, a line per evaluation elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds  {task.fields[rate]}"),
        TextColumn("ε per user ≤ {task.fields[epsilon]:.2f}  {task.fields[note]}"),
        TimeRemainingColumn(),
    )
    hidden = console.quiet or not sys.stderr.isatty()
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("starting", total=settings.rounds, rate="", epsilon=0.0, note="")

        first: list[Seen] = []

        def watch(seen: Seen) -> None:
            # Counted from the first round on: an engine may take a while to start.
            done, seconds = seen.done, seen.seconds
            if first:
                done, seconds = done - first[0].done, seconds - first[0].seconds
            else:
                first.append(seen)
            rate = f"{done / seconds:.1f}/s" if seconds else ""
            fields: dict[str, Any] = {"rate": rate, "epsilon": seen.epsilon}
            if seen.accuracy is not None:
                fields["note"] = f"accuracy on held-out users {100 * seen.accuracy:.1f} %"
                if hidden:
                    console.print(
                        f"round {seen.round}/{seen.rounds}  {rate}  ε per user ≤ "
                        f"{seen.epsilon:.2f}  {fields['note']}",
                        highlight=False,
                    )
            bar.update(task, completed=seen.round, total=seen.rounds, **fields)

        def say(text: str) -> None:
            """A phase, or a whole sentence that stays."""
            if text.endswith("."):
                console.print(text, highlight=False)
            else:
                bar.update(task, description=text)

        yield watch, say


def derivation(limits: Limits | None) -> str:
    """The limits and what they follow from, in one line."""
    if limits is None:
        return "none: cohorts are drawn by secret coin flips, which a network cannot promise"
    is_derived = limits.is_separation_derived or limits.is_max_derived
    return limits.words() + (f" from {limits.why}" if is_derived else "")


def closing_table(settings: FederatedSettings, result: Result) -> None:
    """What came of the run, and who paid what for it."""
    from rich.console import Console
    from rich.table import Table

    statement, plan = result.statement, result.plan
    table = Table(show_header=False, title=f"run {result.path}", title_justify="left")
    table.add_row("accuracy, held-out users", f"{100 * result.accuracy:.1f} %")
    if result.baseline is not None:
        table.add_row("… without noise (not private)", f"{100 * result.baseline:.1f} %")
    exact = "exact" if statement.exact else "upper bound"
    table.add_row("ε per user, at most", f"{statement.epsilon:.3f} ({exact})")
    table.add_row("δ", f"{statement.delta:g}")
    table.add_row("neighbours", statement.neighbours)
    table.add_row("mechanism", plan.strategy.words())
    table.add_row("noise multiplier", f"{plan.noise_multiplier:.3f}")
    table.add_row("limits", derivation(result.limits))
    rate = result.rounds_now / result.training_seconds if result.training_seconds else 0.0
    table.add_row("rounds", f"{result.rounds} of {plan.steps} ({rate:.1f} a second)")
    if result.skipped:
        numbers = ", ".join(map(str, result.skipped))
        table.add_row("rounds passed over", f"{numbers} (open when the run died; charged)")
    console = Console()
    console.print(table)
    if result.users:
        _spending_table(console, result)
    if not result.is_complete:
        console.print("ended early: no user was free any more; the rest of the plan is unused")
    elif result.limits is not None and result.limits.shortage:
        console.print(
            f"the limits left at least {result.limits.shortage:,} invitations unfilled; ask fewer "
            "clients a round, or allow more participations"
        )
    print(f"report: {result.path / 'report.html'}")  # one line each, to be copied
    if (result.path / "operator.html").is_file():
        print(f"raw counts, for you alone: {result.path / 'operator.html'}")
    print(f"check the evidence: noshuffle verify {result.path}")


def _spending_table(console: Console, result: Result) -> None:
    from rich.table import Table

    table = Table(title="ε by how often a user was asked", title_justify="left")
    for heading in ("times asked", "users", "ε"):
        table.add_column(heading, justify="right")
    for row in result.users:
        table.add_row(str(row.participations), f"{row.users:,}", f"{row.epsilon:.3f}")
    console.print(table)


def to_record(settings: FederatedSettings, result: Result) -> dict[str, Any]:
    """The run as plain values."""
    limits = result.limits
    return {
        "run": str(result.path),
        "test_accuracy": result.accuracy,
        "test_loss": result.loss if math.isfinite(result.loss) else None,
        "baseline_accuracy": result.baseline,
        "rounds": result.rounds,
        "is_complete": result.is_complete,
        "skipped_rounds": list(result.skipped),
        "seconds": result.seconds,
        "rounds_per_second": result.rounds_now / max(result.training_seconds, 1e-9),
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
            for row in result.users
        ],
        "statement": result.statement.to_dict(),
        "settings": settings.to_dict(),
    }
