"""What is told of a `noshuffle fit` run: released weights, the trade-off.

coefficients      the largest weights, times the half-width of their column where bounds were given
tradeoff          noise in the mean gradient against ε: this mechanism beside independent noise

All of it comes from the run folder: the model, the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle.accounting import gaussian
from noshuffle.errors import NoshuffleError
from noshuffle.plan import Plan
from noshuffle.release.files import read_json
from noshuffle.report import plots
from noshuffle.report.plots import ACCENT, MUTED, WARM, as_svg
from noshuffle.report.run import RunRecord
from noshuffle.rounding import up
from noshuffle.strategies import error, identity, sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Weights that are drawn; the rest is in model.json.
_MOST = 20


def lead(run: RunRecord) -> str:
    config = run.config
    rows = f"{config['rows']:,} rows" if isinstance(config.get("rows"), int) else "rows"
    return (
        f"{config.get('task', 'linear')} model of {config.get('target', 'the target')} from "
        f"{config.get('file', 'a table')}, {rows} in their order, {run.progress()}, "
        f"{run.plan.strategy.words()}"
    )


def cards(run: RunRecord) -> list[tuple[str, str]]:
    """How many columns have weights."""
    weights = _model(run).get("coef")
    if weights is None:
        return []
    table = np.atleast_2d(weights)
    used, columns = np.count_nonzero(table.any(axis=0)), table.shape[1]
    return [(f"{used} of {columns}", "columns with a weight that is not zero")]


def figures(run: RunRecord) -> Iterator[plots.Figure]:
    model, bounds = _model(run), run.config.get("bounds")
    if model.get("coef") is not None:
        scaled = "times half the width of the column's bounds" if bounds else "as they are"
        yield (
            _coefficients(model, bounds),
            f"The largest released weights, {scaled}; each carries noise. "
            "Zeros made by an l1 penalty are exact.",
        )
    if run.plan.noise_multiplier and not run.not_private:
        yield (
            _tradeoff(run.plan, run.config.get("rows")),
            "Privacy against accuracy, from the plan alone: the noise that the sum of all "
            "gradients carries at the end, per row. The dot is this run.",
        )
    yield from plots.noise_figure(
        run.plan,
        "Noise in the running sum of gradients over steps: mechanisms at this ε.",
        per=run.config.get("batch_size"),
    )


def _model(run: RunRecord) -> dict[str, Any]:
    path = run.path / "model.json"
    return dict(read_json(path)) if path.is_file() else {}


@as_svg
def _coefficients(axes: Axes, model: dict[str, Any], bounds: Any) -> None:
    table = np.atleast_2d(np.asarray(model["coef"], dtype=float))
    if bounds and len(bounds) == len(model.get("columns", [])):
        table = table * np.diff(np.asarray(bounds, dtype=float), axis=1)[:, 0] / 2
    order = np.argsort(-np.abs(table).max(axis=0))[:_MOST][::-1]
    classes = [str(c) for c in model.get("classes", [])]
    at = np.arange(len(order))
    axes.figure.set(figheight=max(2.2, 0.24 * len(order) + 0.9))
    if len(table) == 1:
        values = table[0, order]
        axes.barh(at, values, color=[ACCENT if v >= 0 else WARM for v in values], height=0.7)
        axes.set_xlabel(f"weight towards {classes[1]!r}" if len(classes) == 2 else "weight")
    else:
        for k, row in enumerate(table):
            label = classes[k] if k < len(classes) else str(k)
            axes.plot(row[order], at, "o", ms=4, alpha=0.8, label=label)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        axes.set_xlabel("weight of each class")
    axes.axvline(0, color=MUTED, lw=0.8)
    axes.set_yticks(at, [str(model["columns"][i])[:28] for i in order], fontsize=8)


@as_svg
def _tradeoff(axes: Axes, plan: Plan, given: object) -> None:
    rows = given if isinstance(given, int) and given > 0 else plan.steps
    own = plan.epsilon()
    most = min(max(16.0, 4 * own), gaussian.MOST_EPSILON * (1 - 1e-9))  # rounding may pass an end
    targets = np.geomspace(min(0.05, max(own, 1e-9) / 4), most, 25)
    mu = np.array([gaussian.mu(epsilon=float(e), delta=plan.delta) for e in targets])
    choices = [(f"this mechanism ({plan.strategy.name})", plan.strategy, ACCENT)]
    if plan.strategy.name != "identity":
        choices.append(("independent noise (DP-SGD)", identity(), MUTED))
    for label, strategy, colour in choices:
        try:
            factor = sensitivity(strategy, plan.participation).value
            factor *= plan.multiplier_of_sensitivity * error(strategy, plan.steps).per_step[-1]
        except NoshuffleError:
            continue
        axes.loglog(targets, factor / mu / rows, color=colour, lw=1.4, label=label)
    here = plan.noise_multiplier * float(error(plan.strategy, plan.steps).per_step[-1]) / rows
    axes.loglog([own], [here], "o", color=WARM, ms=6)
    axes.set(xlabel=f"ε (δ = {up(plan.delta)})", ylabel="noise / (rows · clip norm)")
    axes.legend(frameon=False)
