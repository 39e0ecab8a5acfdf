"""The picture of a budget: what all runs have cost after each of them, below the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noshuffle.budget import Budget
from noshuffle.budget.budget import Entry
from noshuffle.budget.cost import total
from noshuffle.release.files import write_bytes
from noshuffle.report.plots import ACCENT, MUTED, WARM, as_svg, save_picture
from noshuffle.rounding import up

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def running(entries: Sequence[Entry], delta: float) -> list[float]:
    """ε of the first, of the first two, … runs together, as charged now; those of a finite cost."""
    costs = [entry.cost for entry in entries if math.isfinite(entry.cost.mu)]
    return [total(costs[: n + 1]).epsilon(delta) for n in range(len(costs))]


def _spending(axes: Axes, budget: Budget) -> None:
    from matplotlib.ticker import MaxNLocator

    finite = [entry for entry in budget.entries() if math.isfinite(entry.cost.mu)]
    heights = running(finite, budget.delta)
    colours = [MUTED if entry.is_open else ACCENT for entry in finite]
    axes.bar(range(1, len(finite) + 1), heights, color=colours, width=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axhline(budget.epsilon, color=WARM, lw=1.4)
    axes.annotate(
        f"limit ε = {budget.epsilon:g}", (0.01, budget.epsilon), color=WARM, va="bottom",
        xycoords=("axes fraction", "data"),
    )  # fmt: skip
    axes.set(
        xlabel="runs so far (grey: under way, as reserved)",
        ylabel=f"ε together (δ = {up(budget.delta)})",
        ylim=(0, 1.15 * budget.epsilon),
        xlim=(0.3, max(len(finite), 4) + 0.7),
    )


spending_picture = as_svg(_spending)


def draw_budget(budget: Budget, file: Path) -> None:
    """Write the picture as SVG, or in the format that the file is named by (PNG, PDF)."""
    if file.suffix == ".svg":
        write_bytes(file, spending_picture(budget).encode())
    else:
        save_picture(lambda axes: _spending(axes, budget), file, dpi=200)
