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

import numpy as np

from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.participation import Epochs, Participation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import error, identity
from noshuffle.strategies.fit import fit

if TYPE_CHECKING:
    from noshuffle.comparison import MechanismRow

FACTORS = (0.25, 0.5, 1, 2, 4, 8)


def batch_curve(
    plan: Plan, mechanism: str, *, population: int, batch_size: int
) -> list[tuple[int, float]]:
    """(batch size, ε) at the plan's signal-to-noise ratio and number of steps."""
    points = []
    for factor in FACTORS:
        batch = round(batch_size * factor)
        if not 1 <= batch <= population:
            continue
        z = plan.noise_multiplier * batch / batch_size
        try:
            if mechanism == "poisson":
                part: Participation = Poisson(plan.steps, batch / population)
                grown = Plan(
                    participation=part, strategy=identity(), noise_multiplier=z, delta=plan.delta
                )
            else:
                part = _spread(plan.steps, population // batch)
                strategy = fit(mechanism, part).strategy
                grown = Plan(
                    participation=part,
                    strategy=strategy,
                    noise_multiplier=_same_noise(plan, strategy, z),
                    delta=plan.delta,
                )
            points.append((batch, grown.epsilon()))
        except NoshuffleError:
            continue
    return points


def _spread(steps: int, steps_per_epoch: int) -> Participation:
    """`steps` steps over passes of that length (rounded up to whole passes)."""
    if steps_per_epoch >= steps:
        return SinglePass(steps)
    return Epochs(math.ceil(steps / steps_per_epoch), steps_per_epoch)


def _same_noise(plan: Plan, strategy: Any, z: float) -> float:
    """The multiplier under which this strategy's rms noise equals the planned one, grown by f."""
    planned = error(plan.strategy, plan.steps).rms
    return z * planned / error(strategy, plan.steps).rms


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
        picks = np.unique(np.linspace(0, len(curve) - 1, 600).round().astype(int))
        left.plot(picks + 1, curve[picks], label=row.name, lw=1.3, color=colours(index))
    left.set(
        xlabel="step",
        ylabel="noise std in the running sum / clip norm",
        title=f"error over steps at ε = {rows[0].epsilon:.3g}, δ = {rows[0].plan.delta:g}",
        yscale="log",
    )
    left.set_ylim(bottom=left.get_ylim()[0] / 2)
    left.legend(frameon=False, fontsize=8, ncols=3, loc="lower right")
    best = rows[0]
    batch_size = batch_size or 1
    if population is None:
        part = best.plan.participation
        length = part.steps_per_epoch if isinstance(part, Epochs) else part.steps
        population = length * batch_size
    names = [row.name for row in rows if row.name in ("blt", "tree", "identity", "banded")]
    for name in names or [best.name]:
        points = batch_curve(best.plan, name, population=population, batch_size=batch_size)
        if points:
            right.plot(*zip(*points), marker="o", ms=3, label=name)
    points = batch_curve(
        _as_identity(best.plan), "poisson", population=population, batch_size=batch_size
    )
    if points:
        right.plot(*zip(*points), marker="o", ms=3, ls="--", label="DP-SGD, Poisson sampling")
    right.set(
        xlabel="batch size (computation)",
        ylabel=f"ε (δ = {best.plan.delta:g})",
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


def _as_identity(plan: Plan) -> Plan:
    """Independent noise whose rms error equals the plan's: what DP-SGD would have to add."""
    z = plan.noise_multiplier * error(plan.strategy, plan.steps).rms
    z /= error(identity(), plan.steps).rms
    return Plan(
        participation=plan.participation,
        strategy=identity(),
        noise_multiplier=z,
        delta=plan.delta,
    )
