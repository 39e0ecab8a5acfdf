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
from typing import TYPE_CHECKING

from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.participation import Epochs, Participation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.report.plots import spread
from noshuffle.strategies import Strategy, error, identity
from noshuffle.strategies.fit import fit

if TYPE_CHECKING:
    from noshuffle.comparison import MechanismRow

FACTORS = (0.25, 0.5, 1, 2, 4, 8)


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


def draw_plan(
    path: Path, rows: Sequence[MechanismRow], *, population: int | None, batch_size: int | None
) -> None:
    """Write both pictures into one file (PNG, SVG or PDF by its suffix)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for index, row in enumerate(rows):
        curve = row.noise_multiplier * error(row.plan.strategy, row.plan.steps).per_step
        steps = spread(len(curve), most=600)
        left.plot(steps, curve[[s - 1 for s in steps]], label=row.name, lw=1.3, c=colours(index))
    best = rows[0].plan
    left.set(
        xlabel="step",
        ylabel="noise std in the running sum / clip norm",
        title=f"error over steps at ε = {rows[0].epsilon:.3g}, δ = {best.delta:g}",
        yscale="log",
    )
    left.set_ylim(bottom=left.get_ylim()[0] / 2)
    left.legend(frameon=False, fontsize=8, ncols=3, loc="lower right")
    batch_size = batch_size or 1
    if population is None:
        part = best.participation
        length = part.steps_per_epoch if isinstance(part, Epochs) else part.steps
        population = length * batch_size
    names = [row.name for row in rows if row.name in ("blt", "tree", "identity", "banded")]
    for name in (*(names or [rows[0].name]), "poisson"):
        points = batch_curve(best, name, population=population, batch_size=batch_size)
        label = "DP-SGD, Poisson sampling" if name == "poisson" else name
        style = "--" if name == "poisson" else "-"
        if points:
            right.plot(*zip(*points), marker="o", ms=3, ls=style, label=label)
    right.set(
        xlabel="batch size (computation)",
        ylabel=f"ε (δ = {best.delta:g})",
        xscale="log",
        yscale="log",
        title="ε over batch size at constant signal-to-noise",
    )
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise InvalidInput(f"{path} could not be written: {problem}") from None
    pyplot.close(figure)
