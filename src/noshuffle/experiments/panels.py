"""Panels of a picture: the same look for every figure, SVG or PNG by the suffix of its path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Colours by mechanism, alike in all figures.
COLOURS = {
    "identity": "#c8553d",
    "poisson": "#e8a33d",
    "tree": "#4f8a5b",
    "blt": "#0b6e99",
    "bound": "0.25",
}


@contextmanager
def panels(
    path: Path, rows: int, columns: int, *, size: tuple[float, float]
) -> Iterator[list[Any]]:
    """The axes of a grid, row by row; the picture is written when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 8, "svg.fonttype": "none", "axes.titlesize": 9}):
        figure, grid = pyplot.subplots(
            rows,
            columns,
            figsize=(size[0] * columns, size[1] * rows),
            layout="constrained",
            squeeze=False,
        )
        axes = list(grid.ravel())
        for one in axes:
            one.grid(alpha=0.25)
        try:
            yield axes
            for one in axes:
                one.set_visible(one.has_data())
            figure.savefig(path, dpi=130)
        finally:
            pyplot.close(figure)


def plain_ticks(axis: Any, values: Sequence[float], most: int = 6) -> None:
    """Some of these values below the axis, written out, and nothing between them."""
    shown = values[:: max(1, -(-len(values) // most))]
    axis.set_xticks(shown, [f"{v:g}" if v < 1e4 else f"{v:,.0f}" for v in shown])
    axis.set_xticks([], minor=True)
