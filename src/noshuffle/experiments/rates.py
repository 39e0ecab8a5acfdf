"""`rates`: how excess risk and regret of the convex solvers scale, beside what theory says.

One cell is one row of `convex.rates.RATES`: an experiment over its sizes and the fitted slope. The
claim of a row is the exponent of its theorem. No state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from noshuffle.convex import rates
from noshuffle.experiments.figure import (
    Cell,
    Claim,
    ClaimVerdict,
    Figure,
    Request,
    Results,
    not_tested,
    verdict,
)


def _cells(asked: Request) -> Sequence[Cell]:
    def work(rate: rates.Rate, results: Results) -> dict[str, Any]:
        return rates.measure(rate, quick=asked.quick).to_dict()

    return [Cell(rate.name, partial(work, rate)) for rate in rates.RATES]


def curve(record: dict[str, Any]) -> rates.Curve:
    """A curve from its record."""
    known = {f.name for f in fields(rates.Curve)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in record.items()
        if name in known
    }
    return rates.Curve(**values)


def _curves(results: Results) -> list[rates.Curve]:
    return [curve(results[rate.name]) for rate in rates.RATES if rate.name in results]


def _claim(rate: rates.Rate) -> Claim:
    def decide(results: Results) -> ClaimVerdict:
        found = curve(results[rate.name])
        told = found.verdict()
        figures = f"slope {found.slope:+.3f} ± {found.error:.3f}, theory {found.theory:+.2f}"
        if told == "not tested":
            return not_tested(f"{figures}: kinder than the worst case")
        return verdict(found.is_within, figures)

    text = f"{rate.name} scales with {rate.axis} to the power {rate.theory:+.2f}"
    return Claim(text, "theorem of the solver, docs/convex.md", decide)


FIGURE = Figure(
    name="rates",
    title="rates of the convex solvers",
    cells=_cells,
    table=lambda results: rates.table(_curves(results)),
    draw=lambda results, path: rates.draw(path, _curves(results)),
    claims=tuple(_claim(rate) for rate in rates.RATES),
)
