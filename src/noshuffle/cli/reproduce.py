"""`noshuffle reproduce`: draw a figure again from scratch, with the measured numbers beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noshuffle.cli import options as o

FIGURES = ("rates",)


def reproduce(
    figure: Annotated[str, typer.Argument(help="what to draw: rates")] = "rates",
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, about a minute")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="only experiments whose name starts so; repeatable")
    ] = None,
    output: Annotated[Path, typer.Option(help="the picture; a table (.md) lies beside it")] = Path(
        "rates.png"
    ),
    json: o.Json = False,
) -> None:
    """Measure how excess risk and regret scale with n, d and ε, beside what theory says.

    FIGURE is what to draw; rates, the only one so far, takes four minutes of one core.
    """
    import json as encoder
    import sys

    from noshuffle.convex import rates
    from noshuffle.errors import InvalidInput, one_of

    one_of(FIGURES, figure=figure)
    if output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"--output must end in .png, .svg or .pdf, got {str(output)!r}")
    if not output.parent.is_dir():
        raise InvalidInput(f"--output needs an existing folder, got {str(output.parent)!r}")

    def progress(name: str) -> None:
        print(f"measuring {name} …", file=sys.stderr, flush=True)

    curves = rates.measure_all(
        quick=quick, only=tuple(only or ()), progress=None if json else progress
    )
    text = rates.table(curves)
    rates.draw(output, curves)
    output.with_suffix(".md").write_text(text + "\n", encoding="utf8")
    if json:
        record = {
            "figure": figure,
            "quick": quick,
            "picture": str(output),
            "curves": [curve.to_dict() for curve in curves],
        }
        print(encoder.dumps(record, indent=2, ensure_ascii=False))
    else:
        print(text)
        print(f"picture written to {output}")
