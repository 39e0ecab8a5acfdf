"""What is told of a `noshuffle fit` run: released weights, the released score, the trade-off.

progress_curve    the progressive score with its noise band, where it was released
coefficients      the largest weights, times the half-width of their column where bounds were given
tradeoff          noise in the mean gradient against ε: this mechanism beside independent noise

All of it comes from the run folder: the model, the noisy scores, the plan.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.plan import Plan
from noshuffle.report import plots
from noshuffle.report.run import RunRecord
from noshuffle.strategies import Strategy, error, identity, sensitivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figure = tuple[str, str]
#: Weights that are drawn; the rest is in model.json.
_MOST = 20


def lead(run: RunRecord) -> str:
    """What the run was, in one line."""
    config = run.config
    rows = f"{config['rows']:,} rows" if isinstance(config.get("rows"), int) else "rows"
    return (
        f"{config.get('task', 'linear')} model of {config.get('target', 'the target')} from "
        f"{config.get('file', 'a table')}, {rows} in their order, {run.plan.steps} steps, "
        f"{run.plan.strategy.words()}"
    )


def cards(run: RunRecord) -> list[tuple[str, str]]:
    """Numbers at the top of the page: all released."""
    found = []
    scored = _scores(run)
    if scored:
        last = scored[-1]
        value, width = last["progressive_score"], 2 * last["progressive_deviation"]
        if run.config.get("score") == "accuracy":
            text = f"{100 * value:.1f} ± {100 * width:.1f} %"
        else:
            text = f"{value:.4g} ± {width:.2g}"
        found.append((text, f"progressive {run.config.get('score', 'score')}, with noise"))
    weights = _model(run).get("coef")
    if weights is not None:
        table = np.atleast_2d(weights)
        zeros = int(np.count_nonzero(~table.any(axis=0)))
        label = "columns used" if zeros else "columns"
        found.append((f"{table.shape[1] - zeros} of {table.shape[1]}", label))
    return found


def figures(run: RunRecord) -> list[Figure]:
    """The pictures with their captions."""
    found: list[Figure] = []
    scored = _scores(run)
    if scored:
        found.append(
            (
                _progress_curve(scored, str(run.config.get("score", "score"))),
                "Progressive validation: every row is predicted before it is learned from. The "
                "running mean was released with noise (band: two deviations) under the same ε.",
            )
        )
    model = _model(run)
    if model.get("coef") is not None:
        found.append((_coefficients(model, run.config), _words_of_weights(run.config)))
    if run.plan.noise_multiplier:
        found.append(
            (
                _tradeoff(run.plan, run.config),
                "Privacy against accuracy, from the plan alone: the noise that the sum of all "
                "gradients carries at the end, per row. The dot is this run.",
            )
        )
    series = plots.noise_series(run.plan) if run.plan.noise_multiplier else []
    if series:
        batch = run.config.get("batch_size")
        found.append(
            (
                plots.noise_curve(series, batch_size=batch if isinstance(batch, int) else None),
                "Noise in the running sum of gradients over steps: mechanisms at this ε.",
            )
        )
    return found


def _scores(run: RunRecord) -> list[dict[str, Any]]:
    return [row for row in run.evaluations if "progressive_score" in row]


def _model(run: RunRecord) -> dict[str, Any]:
    path = run.path / "model.json"
    return dict(json.loads(path.read_text(encoding="utf8"))) if path.is_file() else {}


def _progress_curve(rows: list[dict[str, Any]], name: str) -> str:
    at = np.array([row["rows"] for row in rows])
    value = np.array([row["progressive_score"] for row in rows])
    band = 2 * np.array([row["progressive_deviation"] for row in rows])

    def draw(axes: Axes) -> None:
        times = 100.0 if name == "accuracy" else 1.0
        axes.fill_between(
            at, times * (value - band), times * (value + band), color=plots.ACCENT, alpha=0.15, lw=0
        )
        axes.plot(at, times * value, color=plots.ACCENT, lw=1.6)
        axes.set(xlabel="rows seen", ylabel=f"progressive {name}{', %' if times > 1 else ''}")
        # The first points are all noise; the picture is about the rest.
        later = slice(len(at) // 10, None)
        low = float((times * (value - band))[later].min())
        high = float((times * (value + band))[later].max())
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))

    return plots._draw(draw)


def _half_widths(model: dict[str, Any], config: dict[str, Any]) -> Any:
    """Half the width of every column's bounds, or ones where none were given."""
    columns = model.get("columns", [])
    bounds = config.get("bounds")
    if not bounds or len(bounds) != len(columns):
        return np.ones(len(columns))
    pairs = np.asarray(bounds, dtype=float)
    return (pairs[:, 1] - pairs[:, 0]) / 2


def _words_of_weights(config: dict[str, Any]) -> str:
    scaled = (
        "times half the width of the column's bounds" if config.get("bounds") else "as they are"
    )
    return (
        f"The largest released weights, {scaled}; each carries noise. "
        "Zeros made by an l1 penalty are exact."
    )


def _coefficients(model: dict[str, Any], config: dict[str, Any]) -> str:
    table = np.atleast_2d(np.asarray(model["coef"], dtype=float)) * _half_widths(model, config)
    size = np.abs(table).max(axis=0)
    order = np.argsort(-size)[:_MOST][::-1]
    names = [str(model["columns"][i])[:28] for i in order]
    classes = [str(c) for c in model.get("classes", [])]

    def draw(axes: Axes) -> None:
        at = np.arange(len(order))
        if len(table) == 1:
            values = table[0, order]
            colours = [plots.ACCENT if v >= 0 else plots.WARM for v in values]
            axes.barh(at, values, color=colours, height=0.7)
            if len(classes) == 2:
                axes.set_xlabel(f"weight towards {classes[1]!r}")
            else:
                axes.set_xlabel("weight")
        else:
            for k, row in enumerate(table):
                label = classes[k] if k < len(classes) else str(k)
                axes.plot(row[order], at, "o", ms=4, alpha=0.8, label=label)
            axes.legend(frameon=False, fontsize=8, loc="lower right")
            axes.set_xlabel("weight of each class")
        axes.axvline(0, color=plots.MUTED, lw=0.8)
        axes.set_yticks(at, names, fontsize=8)

    return plots._draw(draw, height=max(2.2, 0.24 * len(order) + 0.9))


def _tradeoff(plan: Plan, config: dict[str, Any]) -> str:
    given = config.get("rows")
    rows = given if isinstance(given, int) and given > 0 else plan.steps
    own = plan.epsilon()
    targets = np.geomspace(min(0.05, own / 4), max(16.0, 4 * own), 25)
    lines: list[tuple[str, list[float]]] = []
    choices: list[tuple[str, Strategy]] = [
        (f"this mechanism ({plan.strategy.name})", plan.strategy)
    ]
    if plan.strategy.name != "identity":
        choices.append(("independent noise (DP-SGD)", identity()))
    from noshuffle.accounting import gaussian

    twice = plan.multiplier_of_sensitivity
    for label, strategy in choices:
        try:
            factor = sensitivity(strategy, plan.participation).value * twice
            last = float(error(strategy, plan.steps).per_step[-1])
        except NoshuffleError:
            continue
        values = [
            factor / gaussian.mu(epsilon=float(e), delta=plan.delta) * last / rows for e in targets
        ]
        lines.append((label, values))
    here = plan.noise_multiplier * float(error(plan.strategy, plan.steps).per_step[-1]) / rows

    def draw(axes: Axes) -> None:
        for (label, values), colour in zip(lines, (plots.ACCENT, plots.MUTED)):
            axes.loglog(targets, values, color=colour, lw=1.4, label=label)
        axes.loglog([own], [here], "o", color=plots.WARM, ms=6)
        axes.set(xlabel=f"ε (δ = {plan.delta:g})", ylabel="noise / (rows · clip norm)")
        axes.legend(frameon=False)

    return plots._draw(draw)
