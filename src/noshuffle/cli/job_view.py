"""A long job in front of a person: progress, a stop between two steps, the closing table, JSON.

`run_and_tell` runs the job of `noshuffle train` or `noshuffle federated`. The first signal (ctrl-C,
see `signals`) stops it after the step it is in, with everything saved; a second one stops at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noshuffle.cli.budget import opened
from noshuffle.cli.promise import print_json
from noshuffle.cli.run_home import check_new_folder
from noshuffle.cli.settings import RunOptions, RunSettings, check_device
from noshuffle.cli.signals import Interrupted, StopRequest, status_of
from noshuffle.cli.words import quoted, refuse
from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.plan.statement import UNCHECKED, PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.open_run import seal
from noshuffle.release.signature import private_key
from noshuffle.report import write_report
from noshuffle.rounding import up


def shown(accuracy: float | None, error: float | None) -> str:
    """A score in words."""
    return f"{100 * (accuracy or 0.0):.1f} %" if error is None else f"{error:.4g}"


class Stopped(Exception):
    """Asked to stop, between two steps; the folder can be resumed."""


@dataclass(frozen=True)
class JobWords:
    """What a kind of job calls its steps, its ε and its accuracy."""

    step: str = "step"
    epsilon: str = "ε"
    accuracy: str = "accuracy on held-out data"
    error: str = "error on held-out data"


@dataclass(frozen=True)
class JobProgress:
    """A step, as it is told to whoever watches; `done` counts those of this process."""

    step: int
    steps: int
    done: int
    seconds: float
    epsilon: float | None
    accuracy: float | None
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What a run ended with: an accuracy or an error (regression) on held-out data.

    `baseline` is that of a model that is not private.
    """

    path: Path
    plan: Plan
    statement: PrivacyStatement
    steps: int
    accuracy: float | None
    baseline: float | None = None
    seconds: float = 0.0
    error: float | None = None

    def rows(self, words: JobWords) -> list[tuple[str, str]]:
        said = self.statement
        unsafe = said.not_private
        epsilon = f"{up(said.epsilon, places=3)} ({'exact' if said.exact else 'upper bound'})"
        rows = [(words.accuracy, shown(self.accuracy, None))]
        if self.error is not None:
            rows = [(words.error, shown(None, self.error))]
        if self.baseline is not None:
            other = (self.baseline, None) if self.error is None else (None, self.baseline)
            told = f"{shown(*other)}  (NOT PRIVATE: do not publish)"
            rows.append(("… trained without privacy", told))
        return [
            *rows,
            *(("NOT PRIVATE", sentence) for sentence in unsafe),
            (words.epsilon, "no guarantee (see above)" if unsafe else epsilon),
            *([] if said.participation_checked else [("", UNCHECKED)]),
            ("δ", up(said.delta)),
            ("per", f"{said.unit}, {said.neighbours} neighbours"),
            ("mechanism", self.plan.strategy.words()),
            ("noise multiplier", f"{self.plan.noise_multiplier:.3f}"),
            ("time", f"{self.seconds:.0f} s"),
        ]

    @property
    def exit_code(self) -> int:
        """Zero where the job did what it was asked for."""
        return 0

    def tell(self, console: Console) -> None:
        """What a kind of job says below the table."""

    def to_record(self) -> dict[str, Any]:
        """The run as plain values, without its settings."""
        kind = "accuracy" if self.error is None else "error"
        return {
            "run": str(self.path),
            f"test_{kind}": self.accuracy if self.error is None else self.error,
            f"baseline_{kind}": self.baseline,
            "seconds": self.seconds,
            "steps": self.steps,
            "statement": self.statement.to_dict(),
        }


_TEXTS = "{task.description}", "{task.fields[count]}", "{task.fields[note]}"
Watch = Callable[[JobProgress], None]
Say = Callable[[str], None]
#: job(settings, path, watch=, say=, is_stopped=, budget=); raises `Stopped` if asked.
JobFn = Callable[..., JobResult]


def run_and_tell(
    kind: str, job: JobFn, settings: RunSettings, path: Path, run: RunOptions, words: JobWords
) -> int:
    """Run the job with progress, then the closing table (or JSON); returns the exit status."""
    check_device(settings.device)
    if run.sign is not None:
        private_key(run.sign)  # refused before the work, not after it
    own = opened(run.budget, has_baseline=settings.baseline)
    console = Console(stderr=True, quiet=run.json, markup=False)
    if run.is_new:
        check_new_folder(path)  # again: imports take a while, and others may have begun there
    # Before there is a plan (data, fits) nothing has begun that would have to be finished.
    asked = StopRequest(lambda: not (path / "plan.json").is_file())
    try:
        with asked, watching(console, words) as (watch, say):
            told = {"watch": watch, "say": say, "is_stopped": asked, "budget": own}
            result = finished(path) or job(settings, path, **told)
    except (Stopped, KeyboardInterrupt) as error:
        status = asked.status if isinstance(error, Stopped) else status_of(error)
        if not (path / "plan.json").is_file():
            raise Interrupted(status - 128) from None
        again = quoted(path) + (f" --budget {quoted(run.budget)}" if run.budget else "")
        return refuse(f"stopped; go on with noshuffle {kind} --resume {again}", status=status)
    if run.sign is not None and result.steps == result.plan.steps:
        seal(path, sign=run.sign)
    if run.json:
        print_json({**result.to_record(), "settings": settings.to_dict()})
        return result.exit_code
    table = Table(show_header=False, title=f"run {path}", title_justify="left")
    for row in result.rows(words):
        table.add_row(*row)
    out = Console(markup=False)  # names may hold brackets, here and in every table
    out.print(table)
    result.tell(out)
    print(f"report: {path / 'report.html'}")  # one line each, to be copied
    print(f"check the evidence: noshuffle verify {quoted(path)}")
    return result.exit_code


def finished(path: Path) -> JobResult | None:
    """What a run that has ended ended with, from its folder; None if there is something to do."""
    folder = RunFolder(path)
    if not folder.is_started:
        return None
    history = History.read(folder)
    if not history.has_ended:
        return None
    folder.remove_secrets()  # its process may have been killed before it did that
    plan, steps = history.plan, history.steps
    if steps < plan.steps:
        raise InvalidInput(
            f"{path} ended after {steps} of {plan.steps} steps and cannot go on; begin a new run, "
            "or one that adds up with it"
        )
    if not (path / "report.html").exists():
        write_report(path)
    told = {"test_accuracy": math.nan, "test_error": None}
    for row in folder.metrics():
        told |= {name: row[name] for name in told if row.get(name) is not None}
    return JobResult(
        path=path,
        plan=plan,
        statement=history.statement(),
        steps=steps,
        accuracy=told["test_accuracy"],
        error=told["test_error"],
    )


@contextmanager
def watching(console: Console, words: JobWords) -> Iterator[tuple[Watch, Say]]:
    """A progress bar on a terminal, a line per evaluation elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    hidden = console.quiet or not sys.stderr.isatty()
    name, count, note = map(TextColumn, _TEXTS)
    columns = name, BarColumn(), count, note, TimeRemainingColumn()
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("starting", total=None, count="", note="")
        first: list[JobProgress] = []

        def watch(seen: JobProgress) -> None:
            # Counted from the first step on: an engine may take a while to start.
            start = first[0] if first else JobProgress(0, 0, 0, 0.0, None, None)
            if not first:
                first.append(seen)
            done, seconds = seen.done - start.done, seen.seconds - start.seconds
            rate = f"{done / seconds:.1f}/s" if seconds else ""
            fields = {"count": f"{seen.step}/{seen.steps} {words.step}s  {rate}"}
            if seen.epsilon is not None and (seen.accuracy, seen.error) != (None, None):
                score = shown(seen.accuracy, seen.error)
                name = words.accuracy if seen.error is None else words.error
                fields["note"] = f"ε {up(seen.epsilon, places=2)}  {name.split()[0]} {score}"
                if hidden:
                    console.print(
                        f"{words.step} {seen.step}/{seen.steps}  {rate}  {words.epsilon} "
                        f"{up(seen.epsilon, places=2)}  {name} {score}",
                        highlight=False,
                    )
            bar.update(task, completed=seen.step, total=seen.steps, **fields)  # type: ignore[arg-type]

        def say(text: str) -> None:
            """A phase, or a whole sentence that stays."""
            if text.endswith("."):
                console.print(text, highlight=False)
            else:
                bar.update(task, description=text)

        yield watch, say
