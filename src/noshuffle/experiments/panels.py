"""What the views of figures share: panels of one look, tables in Markdown.

A picture is SVG or PNG by the suffix of its path. No state.

>>> print(*markdown(("a", "b"), [(1, 2.5)]), sep="\\n")
| a | b |
|---|---|
| 1 | 2.5 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Colours by mechanism, alike in all figures.
COLOURS = {
    "identity": "#c8553d",
    "poisson": "#e8a33d",
    "tree": "#4f8a5b",
    "blt": "#0b6e99",
}


@contextmanager
def panels(
    path: Path, rows: int, columns: int, *, size: tuple[float, float]
) -> Iterator[list[Any]]:
    """The axes of a grid, row by row; the picture is written when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: its backend is the user's

    look: Any = {
        "font.size": 8,
        "svg.fonttype": "none",
        "axes.titlesize": 9,
        "svg.hashsalt": path.stem,
    }
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for one in axes:
            one.grid(alpha=0.25)
        yield axes
        for one in axes:
            one.set_visible(one.has_data())
        is_dated = path.suffix == ".svg"  # which would be another file each time
        figure.savefig(path, dpi=130, metadata={"Date": None} if is_dated else None)


def legend_below(axes: Any, *, columns: int = 2) -> None:
    """What the lines are, below the panel: in it a legend hides points that come later."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            ncols=columns,
            frameon=False,
            fontsize=7,
            columnspacing=1.2,
        )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    lines = [heads, *rows]
    drawn = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    return [drawn[0], "|---" * len(heads) + "|", *drawn[1:]]


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Some of these values below the axis, written out, and nothing between them."""
    shown = values[:: max(1, -(-len(values) // 6))]
    axis.set_xticks(shown, [f"{v:g}" if v < 1e4 else f"{v:,.0f}" for v in shown])
    axis.set_xticks([], minor=True)
