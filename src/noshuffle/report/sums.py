"""What is told of a `noshuffle sum` run: private totals with the noise they carry.

All of it comes from metrics.jsonl, which holds released totals and deviations that follow from the
plan; the true sums are nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle.report import plots
from noshuffle.report.run import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Columns that get a picture; the rest is in totals.csv.
_MOST = 8


def lead(run: RunRecord) -> str:
    columns = ", ".join(run.config.get("summed", []))
    return (
        f"running totals of {columns or 'a table'} from {run.config.get('file', 'a stream')}, "
        f"{run.config.get('batch', '?')} rows a step, {run.progress()}, "
        f"{run.plan.strategy.words()}"
    )


def cards(run: RunRecord) -> list[tuple[str, str]]:
    if not run.evaluations:
        return []
    last = run.evaluations[-1]
    return [
        (
            f"{total:,.6g} ± {2 * last['deviation']:,.3g}",
            f"{name}, private total ± two deviations of its noise",
        )
        for name, total in list(zip(run.config.get("summed", []), last["totals"]))[:_MOST]
    ]


def figures(run: RunRecord) -> Iterator[plots.Figure]:
    """One picture a column, and the noise beside other mechanisms."""
    rows = [row for row in run.evaluations if "totals" in row]
    if not rows:
        return
    for i, name in enumerate(run.config.get("summed", [])[:_MOST]):
        yield (
            _running_sum(rows, i, str(name)),
            f"Private running total of {name}; the band is two standard deviations of the noise. "
            "What clipping took off is not in it.",
        )
    yield from plots.noise_figure(
        run.plan,
        "Noise in the running total over steps, in units of the clip norm: mechanisms at this ε.",
        independent="one by one",
    )


@plots.as_svg
def _running_sum(axes: Axes, rows: list[dict[str, Any]], column: int, name: str) -> None:
    at = np.array([row["rows"] for row in rows])
    value = np.array([row["totals"][column] for row in rows])
    band = 2 * np.array([row["deviation"] for row in rows])
    axes.fill_between(at, value - band, value + band, color=plots.ACCENT, alpha=0.18, lw=0)
    axes.plot(at, value, color=plots.ACCENT, lw=1.5, marker="o" if len(at) < 40 else "", ms=3)
    axes.set(xlabel="rows", ylabel=f"{name}, private total")
