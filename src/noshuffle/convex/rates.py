"""Measured rates beside the theory's: excess against n, d and ε, slopes fitted on log-log axes.

    slope = least squares fit of log(excess) against log(x),     x = n, d, ε or ln d

Each `Rate` (see `rate_list`, where the accepted intervals and the rules behind them are) is one
panel of the picture. `measure` runs one, `measure_all` all of them, `draw` makes the figure,
`table` the text. A verdict is one of

    held         the slope lies in its interval, and no further than 0.1 below theory
    held (edge)  it does, but within 0.02 of an end: other seeds may miss it
    not tested   a bound from above whose slope is over 0.1 steeper than theory: no bound is broken,
                 and the exponent is not seen either
    missed       the slope lies outside of its interval; the reason follows, where one is known

>>> fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.5), "theory": -1.0, "note": ""}
>>> [Curve("a", slope=s, accepted=(-1.1, -0.9), **fields).verdict() for s in (-1.0, -0.91, -0.5)]
['held', 'held (edge)', 'missed']
>>> Curve("b", slope=-1.9, accepted=(-math.inf, -0.9), **fields).verdict()
'not tested'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.convex.rate_list import AXES, NOTES, RATES, REASONS, Rate
from noshuffle.errors import InvalidInput

#: A bound from above is tested by slopes within this of theory; an edge is nearer than that.
WIDTH, EDGE = 0.1, 0.02

__all__ = ["RATES", "Curve", "Rate", "draw", "fitted_slope", "measure", "measure_all", "table"]


@dataclass(frozen=True)
class Curve:
    """What was measured."""

    name: str
    axis: str
    x: tuple[float, ...]
    excess: tuple[float, ...]
    slope: float
    theory: float
    accepted: tuple[float, float]
    note: str
    reason: str = ""

    @property
    def is_within(self) -> bool:
        """Whether the fitted slope lies in the accepted interval."""
        return self.accepted[0] <= self.slope <= self.accepted[1]

    def verdict(self) -> str:
        """held, held (edge), not tested, or missed and why."""
        low, high = self.accepted
        if not self.is_within:
            return f"missed: {self.reason}" if self.reason else "missed"
        if math.isinf(low) and self.slope < self.theory - WIDTH:
            return "not tested"
        inside = min(high - self.slope, self.slope - low)
        return "held (edge)" if inside < EDGE else "held"

    def to_dict(self) -> dict[str, Any]:
        record = {**asdict(self), "is_within": self.is_within, "verdict": self.verdict()}
        # JSON has no infinity: an open end is null.
        record["accepted"] = [v if math.isfinite(v) else None for v in self.accepted]
        return record


def fitted_slope(x: Sequence[float], excess: Sequence[float]) -> float:
    """Slope of log(excess) over log(x); needs two different sizes and positive excess."""
    if len(set(x)) < 2 or min(excess) <= 0 or min(x) <= 0:
        raise InvalidInput("a slope needs two different sizes and positive values")
    return float(np.polyfit(np.log(np.asarray(x)), np.log(np.asarray(excess)), 1)[0])


def measure(rate: Rate, *, quick: bool = False) -> Curve:
    """Run one experiment: the mean over repeats at every size, and the fitted slope."""
    sizes = rate.sizes[: rate.quick] if quick else rate.sizes
    seeds = range(max(1, rate.repeats - 1) if quick else rate.repeats)
    excess = tuple(float(np.mean([rate.measure(n, seed=s) for s in seeds])) for n in sizes)
    x = tuple(AXES[rate.axis][1](float(size)) for size in sizes)
    return Curve(
        name=rate.name,
        axis=rate.axis,
        x=x,
        excess=excess,
        slope=fitted_slope(x, excess),
        theory=rate.theory,
        accepted=rate.accepted,
        note=NOTES.get(rate.name, ""),
        reason=REASONS.get(rate.name, ""),
    )


def measure_all(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Curve]:
    """Every experiment in order (or those whose name starts with one of `only`)."""
    chosen = [r for r in RATES if not only or any(r.name.startswith(o) for o in only)]
    if not chosen:
        names = ", ".join(r.name for r in RATES)
        raise InvalidInput(f"no experiment is called {', '.join(only)}; there are: {names}")
    out = []
    for rate in chosen:
        if progress is not None:
            progress(rate.name)
        out.append(measure(rate, quick=quick))
    return out


def table(curves: Sequence[Curve]) -> str:
    """A Markdown table: measured slope beside the theory's."""
    lines = [
        "| solver | against | measured slope | theory | accepted | verdict | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in curves:
        low, high = c.accepted
        interval = f"{low:+.2f} to {high:+.2f}" if math.isfinite(low) else f"at most {high:+.2f}"
        lines.append(
            f"| {c.name} | {c.axis} | {c.slope:+.3f} | {c.theory:+.2f} | {interval} "
            f"| {c.verdict()} | {c.note} |"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Sequence[Curve]) -> None:
    """One small log-log panel per curve: points, the fitted line, and the theory's direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(curves))
    lines = -(-len(curves) // columns)
    size = (3.2 * columns, 2.6 * lines)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False
    )
    for axes in grid.ravel()[len(curves) :]:
        axes.set_visible(False)
    for axes, c in zip(grid.ravel(), curves):
        x, y = np.asarray(c.x), np.asarray(c.excess)
        middle = math.exp(float(np.mean(np.log(x)))), math.exp(float(np.mean(np.log(y))))
        axes.loglog(x, y, "o", color="#0b6e99", ms=4)
        fit, theory = ((x / middle[0]) ** s * middle[1] for s in (c.slope, c.theory))
        axes.loglog(x, fit, color="#0b6e99", lw=1.2, label=f"measured {c.slope:+.2f}")
        axes.loglog(x, theory, color="#c8553d", lw=1.2, ls="--", label=f"theory {c.theory:+.2f}")
        told = c.verdict().partition(":")[0]
        axes.set_title(c.name if told == "held" else f"{c.name}: {told}", fontsize=9)
        axes.set_xlabel(c.axis, fontsize=8)
        picks = x[:: -(-len(x) // 4)]
        axes.set_xticks(picks, [f"{v:g}" if v >= 1e3 else f"{v:.3g}" for v in picks])
        axes.set_xticks([], minor=True)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
