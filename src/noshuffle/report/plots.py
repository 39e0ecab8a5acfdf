"""The pictures of a report, each an SVG string: no file, no network, no script.

learning_curve   accuracy on held-out data over steps
epsilon_curve    ε spent so far
noise_curve      standard deviation of the noise in the model over steps, the chosen mechanism
                 beside a Honaker tree and independent noise at the same ε
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, error, identity, sensitivity
from noshuffle.strategies.fit import fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, ACCENT, MUTED, WARM = "#1f2933", "#0b6e99", "#9aa5b1", "#c8553d"
#: Steps above which the noise curve is not drawn for strategies without a closed form.
_MOST_POINTS = 400


def _draw(draw: Any, *, width: float = 6.4, height: float = 3.4) -> str:
    """Run `draw(axes)` on a fresh figure and return it as SVG text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "noshuffle", "font.size": 10, "axes.edgecolor": MUTED}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def learning_curve(
    rows: Sequence[dict[str, Any]], *, step: str = "step", of: str = "held-out data"
) -> str:
    """Accuracy of the released models on held-out data over steps (or rounds)."""
    points = [
        (row["step"], 100 * row["test_accuracy"])
        for row in rows
        if row.get("test_accuracy") is not None
    ]

    def draw(axes: Axes) -> None:
        axes.plot(*zip(*points), color=ACCENT, marker="o", ms=3)
        axes.set(xlabel=step, ylabel=f"accuracy on {of}, %")

    return _draw(draw)


def epsilon_curve(plan: Plan) -> str:
    """ε spent after each step, from the plan alone."""
    count = min(plan.steps, 60)
    steps = np.unique(np.linspace(1, plan.steps, count).round().astype(int))
    values = [plan.epsilon_after(int(step)) for step in steps]

    def draw(axes: Axes) -> None:
        axes.step(steps, values, where="post", color=WARM)
        axes.set(xlabel="step", ylabel=f"ε spent (δ = {plan.delta:g})", ylim=(0, None))

    return _draw(draw)


def noise_series(plan: Plan, *, independent: str = "DP-SGD") -> list[tuple[str, Any]]:
    """(label, standard deviation in the prefix sum over steps), all at the plan's ε.

    In units of the clip norm. Mechanisms without a closed form at this size are left out.
    `independent` is what training with independent noise is called.
    """
    choices: list[tuple[str, Strategy]] = [(f"this run ({plan.strategy.name})", plan.strategy)]
    if not plan.participation.is_sampled:
        if plan.strategy.name != "tree":
            tree = fit("tree", plan.participation).strategy
            choices.append(("Honaker tree, best restart", tree))
        if plan.strategy.name != "identity":
            choices.append((f"independent noise ({independent})", identity()))
    series = []
    own = plan.sensitivity.value
    for label, strategy in choices:
        try:
            ratio = sensitivity(strategy, plan.participation).value / own if own else 1.0
            curve = plan.noise_multiplier * ratio * error(strategy, plan.steps).per_step
        except NoshuffleError:
            continue
        series.append((label, curve))
    return series


def noise_curve(
    series: Sequence[tuple[str, Any]], *, batch_size: int | None, step: str = "step"
) -> str:
    """Noise in the summed update over steps (or rounds), per mechanism, at equal privacy."""
    scale = 1.0 / batch_size if batch_size else 1.0

    def draw(axes: Axes) -> None:
        for (label, curve), colour in zip(series, (ACCENT, WARM, MUTED)):
            picks = np.unique(np.linspace(0, len(curve) - 1, _MOST_POINTS).round().astype(int))
            axes.plot(picks + 1, scale * curve[picks], color=colour, label=label, lw=1.4)
        axes.set(xlabel=step, ylabel="noise std / clip norm", ylim=(0, None))
        axes.legend(frameon=False)

    return _draw(draw)
