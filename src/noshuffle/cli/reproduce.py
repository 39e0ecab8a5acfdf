"""`noshuffle reproduce`: draw a figure again from scratch, with the measured numbers beside it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, check_picture, print_json
from noshuffle.errors import one_of

FIGURES = ("rates",)


@dataclass(frozen=True, kw_only=True)
class FigureSettings:
    figure: str = argument("what to draw: rates", "rates")
    quick: bool = setting(False, "small sizes, about a minute", "--quick")
    only: list[str] | None = setting(None, "only experiments whose name starts so; repeatable")
    output: Path = setting(Path("rates.png"), "the picture; a table (.md) lies beside it")


@takes(FigureSettings, Output)
def reproduce(asked: FigureSettings, output: Output) -> None:
    """Measure how excess risk and regret scale with n, d and ε, beside what theory says.

    FIGURE is what to draw; rates, the only one so far, takes four minutes of one core.
    """
    from noshuffle.convex import rates

    one_of(FIGURES, figure=asked.figure)
    check_picture(asked.output, "--output")

    def progress(name: str) -> None:
        print(f"measuring {name} …", file=sys.stderr, flush=True)

    curves = rates.measure_all(
        quick=asked.quick, only=tuple(asked.only or ()), progress=None if output.json else progress
    )
    text = rates.table(curves)
    rates.draw(asked.output, curves)
    asked.output.with_suffix(".md").write_text(text + "\n", encoding="utf8")
    if output.json:
        print_json(
            {
                "figure": asked.figure,
                "quick": asked.quick,
                "picture": str(asked.output),
                "curves": [curve.to_dict() for curve in curves],
            }
        )
    else:
        print(text)
        print(f"picture written to {asked.output}")
