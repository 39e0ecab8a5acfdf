"""A run while it lives: what its folder shows of it right now, in a few lines or as a page.

Only what may be published is read: plan, statement, metrics.jsonl (functions of released values),
and from the ledger the number of released steps and their times. No loss, no unit, and norms as
the noisy histogram that a run may pay for (`clipping.norm_histogram`). A
reader takes no lock, so the run does not notice. ε of a forked run counts its parents. State: none;
a snapshot is taken anew each time.

>>> bar(3, 12, width=8), sparkline([0.1, 0.5, 0.9])
('██░░░░░░', '▁▅█')
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from noshuffle.clipping.norm_histogram import NormHistogram
from noshuffle.release.files import finite
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import is_locked
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.spending import COUNTS, spent
from noshuffle.report.run import RunRecord, read_run
from noshuffle.rounding import up
from noshuffle.statement import PrivacyStatement

_BLOCKS = "▁▂▃▄▅▆▇█"
#: Steps that the present speed is taken from.
RECENT = 50
#: A run whose last step is so many seconds, and so many usual steps, ago stands still.
LONG, LONG_STEPS = 120.0, 30


@dataclass(frozen=True)
class RunSnapshot:
    """Where a run stands. `epsilon` is None where no finite ε holds."""

    run: str
    step: int
    steps: int
    epsilon: float | None
    planned_epsilon: float | None
    delta: float
    unit: str
    is_private: bool
    steps_per_second: float | None
    seconds_since_step: float | None
    accuracy: tuple[tuple[int, float], ...] = ()
    norm_histogram: NormHistogram | None = None
    #: Whether a process has the folder; None where that cannot be asked.
    has_process: bool | None = None

    @property
    def is_done(self) -> bool:
        return self.step >= self.steps

    @property
    def stands_still(self) -> bool:
        """Whether its process is gone before the last step, or no step came for long."""
        if self.is_done or self.has_process is False:
            return not self.is_done
        long = max(LONG, LONG_STEPS / self.steps_per_second if self.steps_per_second else 0.0)
        return (self.seconds_since_step or 0.0) > long

    @property
    def seconds_left(self) -> float | None:
        """At the present speed; None where there is none."""
        if self.stands_still or not self.steps_per_second:
            return None
        return (self.steps - self.step) / self.steps_per_second

    def to_dict(self) -> dict[str, Any]:
        found = ("is_done", "stands_still", "seconds_left")
        return {**asdict(self), **{name: getattr(self, name) for name in found}}


def snapshot(path: Path) -> RunSnapshot:
    """What the folder shows now; a folder that is no run is refused."""
    run = read_run(path)
    step, speed, since = _pace(RunFolder(path), run)
    scored = (row for row in run.evaluations if row.get("test_accuracy") is not None)
    said, planned = (_spent(run, steps) for steps in (step, run.plan.steps))
    return RunSnapshot(
        run=str(path),
        step=step,
        steps=run.plan.steps,
        epsilon=finite(said.epsilon),
        planned_epsilon=finite(planned.epsilon),
        delta=planned.delta,
        unit=run.plan.unit,
        is_private=not run.not_private,
        steps_per_second=speed,
        seconds_since_step=since,
        accuracy=tuple((int(row["step"]), float(row["test_accuracy"])) for row in scored),
        norm_histogram=run.norm_histogram,
        has_process=is_locked(path),
    )


def _pace(folder: RunFolder, run: RunRecord) -> tuple[int, float | None, float | None]:
    """Released steps, steps a second over the last ones, and seconds since the last one."""
    try:
        with closing(Evidence(folder.ledger_file)) as ledger:
            query = f"SELECT step, time FROM steps ORDER BY step DESC LIMIT {RECENT}"
            rows = ledger.db.execute(query).fetchall()
    except (OSError, sqlite3.Error):  # being written, or moved away: what the statement says
        rows = []
    if not rows:
        return int(run.statement.get("released_steps", 0)), None, None
    (last, newest), (first, oldest) = rows[0], rows[-1]
    speed = (last - first) / (newest - oldest) if newest > oldest else None
    return last + 1, speed, max(0.0, time.time() - newest)


def _spent(run: RunRecord, step: int) -> PrivacyStatement:
    """What its statement would say after so many steps, but for sentences that cost nothing."""
    counts = tuple(s for s in run.statement.get("assumptions", ()) if s in COUNTS.values())
    return spent(run.plan, step, ancestors=run.ancestors, notes=counts)


def bar(done: int, of: int, *, width: int) -> str:
    full = round(width * min(done, of) / of)
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from the least to the largest."""
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in values)


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"


def status_lines(now: RunSnapshot, *, width: int) -> list[str]:
    """A few lines, none wider than a terminal of 40 columns or more (the folder's name aside)."""
    share = f" {100 * now.step / now.steps:.0f} %"
    lines = [
        now.run,
        f"step {now.step:,} of {now.steps:,}",
        bar(now.step, now.steps, width=max(8, min(width, 60) - len(share))) + share,
    ]
    planned = "∞" if now.planned_epsilon is None else up(now.planned_epsilon, digits=3)
    spent = "∞" if now.epsilon is None else up(now.epsilon, digits=3)
    if now.is_private:
        lines.append(f"ε {spent} of {planned} (δ = {up(now.delta)}) per {now.unit}")
    else:
        lines.append("NOT PRIVATE: no ε holds")
    if now.stands_still:
        lines += _still_lines(now)
    elif not now.is_done:
        if (left := now.seconds_left) is not None:
            lines.append(f"{now.steps_per_second:.3g} steps/s, about {duration(left)} left")
        if now.seconds_since_step is not None:
            lines.append(f"last step {duration(now.seconds_since_step)} ago")
    if now.accuracy:
        curve = sparkline([value for _, value in now.accuracy[-20:]])
        lines.append(f"held-out {100 * now.accuracy[-1][1]:.1f} % {curve}")
    if (norms := now.norm_histogram) is not None:
        lines.append(f"norms {sparkline(list(norms.shares))} {100 * norms.above:.0f} % clipped")
    return [*lines, "finished"] if now.is_done else lines


def _still_lines(now: RunSnapshot) -> list[str]:
    """Since when, and whether somebody is there; of time that is left nothing can be said."""
    lines = []
    if (ago := now.seconds_since_step) is not None:
        since = datetime.fromtimestamp(time.time() - ago)
        lines = [f"stands still since {since:%Y-%m-%d %H:%M}", f"last step {duration(ago)} ago"]
    if now.has_process is False:
        lines.append("its process has ended (go on: --resume)")
    return lines


def live_page(path: Path, *, every: float) -> str:
    """The same as a page that loads itself again, with the pictures of the report."""
    from noshuffle.report.page_parts import document, pictures
    from noshuffle.report.plots import epsilon_curve, learning_curve, norm_bars

    now, run = snapshot(path), read_run(path)
    lines = "".join(f"<p>{escape(line)}</p>" for line in status_lines(now, width=28)[1:])
    drawn = []
    if now.accuracy:
        drawn.append((learning_curve(run.evaluations), "Accuracy on held-out data."))
    if now.norm_histogram is not None:
        caption = "Gradient norms before clipping, counted with noise that is part of ε."
        drawn.append((norm_bars(now.norm_histogram), caption))
    # Counts spend all of it at the first step; of a fork, the plan has its own part alone.
    has_curve = now.planned_epsilon is not None and not (run.has_counts or run.ancestors)
    if now.step and now.is_private and has_curve:
        drawn.append((epsilon_curve(run.plan, last=now.step), "Privacy spent so far."))
    again = "" if now.is_done else f"<meta http-equiv='refresh' content='{max(1, round(every))}'>"
    return document(f"noshuffle run {run.name}", f"{lines}{pictures(drawn)}", again)
