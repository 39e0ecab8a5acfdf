"""The pictures of `noshuffle plan`: error over steps, and ε over batch size.

The second is the trade-off between privacy and computation: the number of steps and the
signal-to-noise ratio of every step stay as planned, the batch grows by a factor f, and with it the
noise multiplier (z·f on a sum of f·B clipped gradients). More computation, smaller ε. One example
is then seen f times as often, which is what the sensitivity pays for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.participation import Epochs, Participation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.report.plots import label_ends, spread
from noshuffle.rounding import up
from noshuffle.strategies import Strategy, error, identity
from noshuffle.strategies.fit import fit

if TYPE_CHECKING:
    from noshuffle.plan.comparison import PlanRow

FACTORS = (0.25, 0.5, 1, 2, 4, 8)
#: Lines of a picture: the best mechanism, then those that people know, where they were asked for.
KNOWN = ("blt", "banded", "tree", "identity")
_COLOURS = ("#0b6e99", "#6a4c93", "#4a8c5c", "#c8553d", "#7b8794")


def _few(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The best row and those of `KNOWN`; the table has the others."""
    chosen = [row for row in rows[1:] if row.name in KNOWN]
    return [rows[0], *(chosen or rows[1 : len(_COLOURS)])]


def batch_curve(
    plan: Plan, mechanism: str, *, population: int, batch_size: int
) -> list[tuple[int, float]]:
    """(batch size, ε) at the plan's signal-to-noise ratio and number of steps.

    The mechanism "poisson" is independent noise on batches that are sampled.
    """
    points = []
    planned = plan.noise_multiplier * error(plan.strategy, plan.steps).rms
    for batch in (round(batch_size * factor) for factor in FACTORS):
        if not 1 <= batch <= population:
            continue
        try:
            if mechanism == "poisson":
                part: Participation = Poisson(plan.steps, batch / population)
                strategy: Strategy = identity()
            else:
                part = _passes(plan.steps, population // batch)
                strategy = fit(mechanism, part).strategy
            z = planned * batch / batch_size / error(strategy, plan.steps).rms
            grown = Plan(
                participation=part, strategy=strategy, noise_multiplier=z, delta=plan.delta
            )
            points.append((batch, grown.epsilon()))
        except NoshuffleError:
            continue
    return points


def _passes(steps: int, steps_per_epoch: int) -> Participation:
    """`steps` steps over passes of that length (rounded up to whole passes)."""
    if steps_per_epoch >= steps:
        return SinglePass(steps)
    return Epochs(math.ceil(steps / steps_per_epoch), steps_per_epoch)


def _ticks_written_out() -> Any:
    """Labels of a logarithmic axis as numbers: 0.6 and not 6e-01, 20 and not 2·10¹."""
    from matplotlib.ticker import LogFormatter

    class WrittenOut(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return WrittenOut(labelOnlyBase=False, minor_thresholds=(1, 0.4))


def draw_plan(
    path: Path, rows: Sequence[PlanRow], *, population: int | None, batch_size: int | None
) -> None:
    """Write both pictures into one file (PNG, SVG or PDF by its suffix)."""
    from matplotlib.figure import Figure  # not pyplot: its backend is the user's

    figure = Figure(figsize=(12, 4.4))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.07, right=0.9, wspace=0.42, top=0.9, bottom=0.13)
    shown = _few(rows)
    colours = {row.name: colour for row, colour in zip(shown, _COLOURS)}
    best, ends = rows[0].plan, []
    for row in shown:
        curve = row.noise_multiplier * error(row.plan.strategy, row.plan.steps).per_step
        steps = spread(len(curve), most=600)
        left.plot(steps, curve[[s - 1 for s in steps]], lw=1.5, c=colours[row.name])
        tail = curve[-max(1, len(curve) // 10) :]
        ends.append((float(tail.mean()), row.name, colours[row.name]))
    left.set(
        xlabel="step",
        ylabel="noise std in the running sum / clip norm",
        title=f"error over steps at ε = {up(rows[0].epsilon, digits=3)}, δ = {up(best.delta)}",
        yscale="log",
        xlim=(1, best.steps),
    )
    label_ends(left, best.steps, ends)
    has_batch, batch_size = batch_size is not None, batch_size or 1
    if population is None:
        part = best.participation
        length = part.steps_per_epoch if isinstance(part, Epochs) else part.steps
        population = length * batch_size
    ends, last = [], 0
    fitted = [name for name in colours if name in KNOWN] or [*colours]  # others: seconds a point
    for name in (*fitted, "poisson"):
        points = batch_curve(best, name, population=population, batch_size=batch_size)
        colour, style = (colours[name], "-") if name in colours else ("#444444", "--")
        if points:
            right.plot(*zip(*points), marker="o", ms=3, ls=style, c=colour)
            label = "DP-SGD, Poisson" if name == "poisson" else name
            ends.append((points[-1][1], label, colour))
            last = max(last, points[-1][0])
    right.set(
        xlabel="batch size (computation)" if has_batch else "batch / planned batch (computation)",
        ylabel=f"ε (δ = {up(best.delta)})",
        xscale="log",
        yscale="log",
        title=f"ε over batch size at the signal-to-noise of {rows[0].name}",
    )
    label_ends(right, last, ends)
    for axis in (left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter(_ticks_written_out())
        axis.set_minor_formatter(_ticks_written_out())
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise InvalidInput(f"{path} could not be written: {problem}") from None
