"""`noshuffle sum`: a table of numbers becomes private running totals, step by step.

Every `--batch` rows are one step of `PrivateSum`; its total, with noise, is released after each.
The true sums are computed nowhere but inside a step, and are written nowhere.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.budget import BUDGET_HELP, opened
from noshuffle.cli.from_record import argument, check_fields, given, setting, takes
from noshuffle.cli.mechanisms import HELP, mechanism_named
from noshuffle.cli.number_rows import NumberRow, NumberRows, open_text
from noshuffle.cli.promise import (
    DELTA_HELP,
    FOLDER_HELP,
    FORK_HELP,
    JSON_HELP,
    TEST_SEED_HELP,
    print_json,
)
from noshuffle.cli.run_home import begun, check_fork, check_new_folder, dated, kept_settings
from noshuffle.cli.words import quoted, refuse, say
from noshuffle.errors import InvalidInput, open_unit, positive, whole

if TYPE_CHECKING:
    from noshuffle.budget import Budget
    from noshuffle.release.private_sum import PrivateSum

_SCHEMA = "The columns of the table and the number of its rows are taken to be public knowledge."
_BEYOND = "What one id adds beyond that many steps is left out."
#: Steps between two checkpoints; totals since the last one are in metrics.jsonl.
_SAVE_EVERY = 50
#: Totals in the table that is printed; the file holds all of them.
_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class SumSettings:
    """What is summed and how; a run folder keeps it."""

    clip: float = setting(
        ..., "bound on what one row (or one id) adds in one step: a norm over the columns",
        check=positive,
    )  # fmt: skip
    columns: str | None = setting(None, "columns to add up, a,b,c (default: all but the id)")
    id: str | None = setting(
        None, "column that names whose row it is: an id is protected, not a row"
    )
    max_participations: int = setting(
        1, "with --id: most steps one id may add to; what comes after counts as zero", check=whole
    )
    epsilon: float = setting(1.0, "ε of all totals together", check=positive)
    delta: float = setting(1e-6, DELTA_HELP, check=open_unit)
    mechanism: str = setting("blt", HELP)
    batch: int = setting(100, "rows a step", check=whole)
    steps: int | None = setting(
        None, "planned number of steps (default: as many as the file fills; needed with -)",
        check=whole,
    )  # fmt: skip
    header: bool | None = setting(
        None, "whether the first line names the columns (default: if it holds a word)"
    )
    test_seed: str | None = setting(None, TEST_SEED_HELP)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.id is None and self.max_participations != 1:
            raise InvalidInput("max_participations belongs to --id; without ids a row comes once")


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    file: Path = argument("a .csv table of numbers, or - for standard input")
    out: Path | None = setting(None, FOLDER_HELP)
    resume: Path | None = setting(
        None, "go on with the run in this folder; give the whole input again, and no other option"
    )
    json: bool = setting(False, JSON_HELP, "--json")
    budget: Path | None = setting(None, BUDGET_HELP)
    fork_of: Path | None = setting(None, FORK_HELP, "--fork")

    def __post_init__(self) -> None:
        check_fork(self.fork_of, resume=self.resume)


@takes(given(SumSettings), SumOptions)
def sum_(stated: dict[str, Any], where: SumOptions) -> int:
    """Private running totals of the columns of a table, in its order.

    FILE is a .csv table, or - for standard input. A row with an empty cell, NA or NaN counts as
    zeros.

    For example: noshuffle sum sales.csv --clip 100 --epsilon 1 · tail -f log.csv | noshuffle sum -
    --clip 1 --batch 60 --steps 1440
    """
    from noshuffle.cli.signals import StopRequest

    settings, path = _settings_and_folder(stated, where)
    run = _Run(settings, where, path, opened(where.budget))
    with StopRequest(lambda: run.is_reading) as is_stopped:
        try:
            is_done = run.add_all(is_stopped)
        except BaseException:  # every total that was told is in the folder already
            run.sums.release.close_run()
            raise
        run.close()
    if not is_done:
        again = f"noshuffle sum {quoted(where.file)} --resume {quoted(path)}"
        return refuse(f"stopped; go on with {again}", status=is_stopped.status)
    run.tell(as_json=where.json)
    return 0


def _settings_and_folder(stated: dict[str, Any], where: SumOptions) -> tuple[SumSettings, Path]:
    if where.resume is not None:
        if stated or where.out:
            raise InvalidInput("--resume takes all settings from the run folder; give it alone")
        kept = kept_settings(where.resume, kind="sum", budget=where.budget)
        names = SumSettings.__dataclass_fields__
        return SumSettings(**{k: v for k, v in kept.items() if k in names}), where.resume
    if "clip" not in stated:
        raise InvalidInput(
            "give --clip, the most that one row may add: a bound known beforehand, not read off "
            "the table"
        )
    path = where.out or dated("sum" if str(where.file) == "-" else where.file.stem)
    check_new_folder(path)
    return SumSettings(**stated), path


class _Run:
    def __init__(
        self,
        settings: SumSettings,
        where: SumOptions,
        path: Path,
        budget: Budget | None,
    ) -> None:
        from noshuffle.noise import test_source
        from noshuffle.participation import MinSeparation, SinglePass
        from noshuffle.plan import Plan
        from noshuffle.release.folder import RunFolder
        from noshuffle.release.private_sum import PrivateSum

        self.settings, self.file, self.path = settings, where.file, path
        self.folder = RunFolder(path)
        self.is_quiet = where.json
        is_begun = self.folder.is_started
        steps = 0 if is_begun else settings.steps or self._count()
        self.table = self._open()
        self.assumptions = [_SCHEMA] if settings.id is None else [_SCHEMA, _BEYOND]
        told = {"kind": "sum", "file": self.file.name, "summed": list(self.table.columns)}
        told["further_assumptions"] = self.assumptions
        if is_begun:
            self.plan = self.folder.plan()
            self._check_columns()
        else:
            most = min(settings.max_participations, steps)
            self.plan = Plan.fit(
                SinglePass(steps) if most == 1 else MinSeparation(steps, 1, most),
                mechanism=mechanism_named(settings.mechanism),
                epsilon=settings.epsilon,
                delta=settings.delta,
                unit="example" if settings.id is None else "user",
            )
        seed = settings.test_seed
        told |= asdict(settings)
        flags = {"draws_on_budget": budget is not None, "is_fork": where.fork_of is not None}
        with nullcontext() if is_begun else begun(self.folder, told, **flags):
            self.sums: PrivateSum = PrivateSum(
                self.plan,
                clip=settings.clip,
                shape=(len(self.table.columns),),
                on_violation="drop" if settings.id is not None else "refuse",
                run=self.folder,
                fork_of=where.fork_of,
                source=None if seed is None else test_source(seed=seed),
                budget=budget,
            )
        self.lost = self._take_up()
        self.is_cut = self.is_reading = False

    def _take_up(self) -> int:
        """Go on from the newest total; the number of steps that were charged and are in no total.

        A process that was killed within a step leaves one: its rows do not come again.
        """
        from noshuffle.release.folder import step_of

        self.folder.forget_metrics_after(self.sums.step)
        saved = max(map(step_of, self.folder.saved()), default=0)
        *_, last = [{"step": 0, "rows": 0}, *self.folder.metrics()]
        if last["step"] > saved:
            self.sums.go_on_from(last["totals"])
        self.told = last["rows"]
        self.rows = self.told + (self.sums.step - last["step"]) * self.settings.batch
        lost: int = self.sums.step - max(last["step"], saved)
        return lost

    def _open(self) -> NumberRows:
        asked = self.settings
        names = None if asked.columns is None else [c.strip() for c in asked.columns.split(",")]
        name = "standard input" if str(self.file) == "-" else str(self.file)
        return NumberRows(
            open_text(self.file), name, columns=names, id=asked.id, has_header=asked.header
        )

    def _check_columns(self) -> None:
        """Refuse to go on with other columns: totals would change their meaning half-way."""
        from noshuffle.release.files import read_json

        summed, here = read_json(self.folder.config_file).get("summed"), list(self.table.columns)
        if summed is not None and summed != here:
            raise InvalidInput(
                f"{self.table.name} has the columns {', '.join(here)}, the run sums "
                f"{', '.join(summed)}; give the same table again"
            )

    def _count(self) -> int:
        """Steps that the file fills; the whole file is read, so that nothing odd comes later."""
        if str(self.file) == "-":
            raise InvalidInput(
                "give --steps with standard input: how many steps of --batch rows are planned"
            )
        rows = sum(1 for _ in self._open())
        if not rows:
            raise InvalidInput(f"{self.file} has no rows")
        return -(-rows // self.settings.batch)

    def add_all(self, is_stopped: Callable[[], bool]) -> bool:
        """Every step that is left; whether nobody asked to stop."""
        lines = iter(self.table)
        self.rows = sum(1 for _ in islice(lines, self.rows))
        if self.rows < self.told:
            raise InvalidInput(
                f"{self.table.name} holds {self.rows} rows, the run has summed {self.told} "
                "already; give the whole input again"
            )
        while True:
            self.is_reading = True  # a stream may be silent for long
            try:
                rows = list(islice(lines, self.settings.batch))
            except KeyboardInterrupt:
                return False
            finally:
                self.is_reading = False
            self.is_cut = bool(rows) and self.sums.step >= self.plan.steps
            if not rows or self.is_cut:
                return True
            self._add(rows)
            if is_stopped() and self.sums.step < self.plan.steps:
                return False

    def _add(self, rows: list[NumberRow]) -> None:
        import numpy as np

        values = np.array([value for value, _ in rows], dtype=np.float64)
        ids: Any = np.arange(self.rows, self.rows + len(rows))
        if self.settings.id is not None:
            ids = [who for _, who in rows]
        self.sums.add(values, ids=ids)
        self.rows += len(rows)
        total = [float(v) for v in self.sums.total]
        line = {"step": self.sums.step, "rows": self.rows, "totals": total}
        self.folder.append_metrics({**line, "deviation": self.sums.deviation})
        if self.sums.step % _SAVE_EVERY == 0:
            self.sums.save()
            if not self.is_quiet and sys.stderr.isatty():
                print(f"\r{self.rows:,} rows …", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Totals and report into the folder; a finished run ends."""
        from noshuffle.release.files import write_bytes
        from noshuffle.report import write_report

        self.lines = list(self.folder.metrics())
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["step", "rows", *self.table.columns, "standard_deviation"])
        for line in self.lines:
            out.writerow([line["step"], line["rows"], *line["totals"], line["deviation"]])
        write_bytes(self.folder.path / "totals.csv", text.getvalue().encode())
        self.sums.close()
        self.statement = self.sums.statement().with_assumptions(*self.assumptions)
        write_report(self.folder.path)

    def tell(self, *, as_json: bool) -> None:
        path, columns = self.path, self.table.columns  # the folder as it was given
        if self.is_cut:
            print(
                f"noshuffle: warning: the {self.plan.steps:,} planned steps are used up after "
                f"{self.rows:,} rows; the rest of the input was not read",
                file=sys.stderr,
            )
        if self.lost:
            print(
                f"noshuffle: warning: {self.lost} of the steps were cut off before their totals "
                "were written: their rows are in no total, and the noise is larger than is told",
                file=sys.stderr,
            )
        if as_json:
            totals = self.lines[-1]["totals"] if self.lines else [0.0] * len(columns)
            record = {
                "run": str(path),
                "steps": self.sums.step,
                "planned_steps": self.plan.steps,
                "rows": self.rows,
                "totals": dict(zip(columns, totals)),
                "standard_deviation": self.sums.deviation,
                "csv": str(path / "totals.csv"),
                "report": str(path / "report.html"),
                "statement": self.statement.to_dict(),
            }
            print_json(record)
            return
        self._print_table()
        say(f"\n{self.statement.words()}\n")
        print(f"totals: {path / 'totals.csv'}")  # one line each, to be copied
        print(f"report: {path / 'report.html'}")
        if self.sums.step < self.plan.steps:
            print(
                f"{self.sums.step} of {self.plan.steps} planned steps; go on, once there is more: "
                f"noshuffle sum {quoted(self.file)} --resume {quoted(path)}"
            )
        print(f"check the evidence: noshuffle verify {quoted(path)}")

    def _print_table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="private running totals", title_justify="left")
        for heading in ("rows", *self.table.columns, "± standard deviation"):
            table.add_column(heading, justify="right", no_wrap=True)
        last = len(self.lines) - 1
        picks = sorted({round(last * i / (_MOST_LINES - 1)) for i in range(_MOST_LINES)})
        for line in (self.lines[i] for i in picks if self.lines):
            cells = [f"{value:,.6g}" for value in line["totals"]]
            table.add_row(f"{line['rows']:,}", *cells, f"{line['deviation']:,.4g}")
        Console(markup=False).print(table)
