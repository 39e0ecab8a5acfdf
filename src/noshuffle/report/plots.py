"""The pictures that reports share, each an SVG string: no file, no network, no script.

learning_curve   accuracy on held-out data over steps
epsilon_curve    ε spent so far
signal_curve     length of the released gradient beside that of its noise alone
clip_curve       a clip norm that follows a private quantile
noise_figure     standard deviation of the noise in the model over steps, the chosen mechanism
                 beside a Honaker tree and independent noise at the same ε
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.participation.patterns import OPEN
from noshuffle.plan import Plan
from noshuffle.rounding import up
from noshuffle.strategies import Strategy, error, identity, sensitivity
from noshuffle.strategies.fit import fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED, ACCENT, WARM = "#7b8794", "#0b6e99", "#c8553d"
#: A picture and its caption.
Figure = tuple[str, str]
Given = ParamSpec("Given")


def as_svg(draw: Callable[Concatenate[Axes, Given], None]) -> Callable[Given, str]:
    """What `draw(axes, …)` puts on fresh axes, as SVG text."""

    @wraps(draw)
    def drawn(*given: Given.args, **more: Given.kwargs) -> str:
        return rendered(lambda axes: draw(axes, *given, **more))

    return drawn


def rendered(draw: Callable[[Axes], None]) -> str:
    """What is put on fresh axes, as SVG text."""
    out = io.StringIO()
    save_picture(draw, out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def save_picture(draw: Callable[[Axes], None], file: Path | io.StringIO, **form: Any) -> None:
    """What is put on fresh axes, into a file as `savefig` does; its suffix decides, or `form`."""
    import matplotlib
    from matplotlib.figure import Figure as Picture  # not pyplot: its backend is the user's

    settings: Any = {"svg.hashsalt": "noshuffle", "font.size": 10, "axes.edgecolor": MUTED}
    with matplotlib.rc_context(settings):
        figure = Picture(figsize=(5.4, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)  # else the grid lies over bars
        draw(axes)
        figure.savefig(file, **form)


def spread(last: int, *, most: int) -> list[int]:
    """At most so many whole numbers from 1 to `last`, evenly."""
    return [int(n) for n in np.unique(np.linspace(1, last, min(last, most)).round())]


@as_svg
def learning_curve(
    axes: Axes, rows: Sequence[dict[str, Any]], *, step: str = "step", of: str = "held-out data"
) -> None:
    """Accuracy of the released models on held-out data over steps (or rounds)."""
    scored = [row for row in rows if row.get("test_accuracy") is not None]
    accuracy = [100 * row["test_accuracy"] for row in scored]
    axes.plot([row["step"] for row in scored], accuracy, color=ACCENT, marker="o", ms=3)
    axes.set(xlabel=step, ylabel=f"accuracy on {of}, %")


@as_svg
def epsilon_curve(
    axes: Axes, plan: Plan, *, last: int, step: str = "step", what: str = "ε spent"
) -> None:
    """ε after each of the first `last` steps (or rounds), from the plan alone."""
    steps = spread(last, most=60)
    axes.step(steps, [plan.epsilon_after(s) for s in steps], where="post", color=WARM)
    axes.set(xlabel=step, ylabel=f"{what} (δ = {up(plan.delta)})", ylim=(0, None))


@as_svg
def tradeoff_curve(axes: Axes, least_misses: Callable[[Any], Any]) -> None:
    """Errors of whoever tells two neighbours apart: least misses over false alarms."""
    alphas = np.linspace(0.0, 1.0, 101)
    axes.plot(alphas, least_misses(alphas), color=WARM, label="at least")
    axes.plot(alphas, 1 - alphas, color=MUTED, lw=1, ls=":", label="guessing")
    axes.set(xlabel="false alarms (type I)", ylabel="misses (type II)", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)


@as_svg
def signal_curve(axes: Axes, rows: Sequence[dict[str, Any]], noise: Sequence[float]) -> None:
    """Norms of released gradients, and what the noise alone would have: both public."""
    steps = [row["step"] for row in rows]
    measured = [row["private_gradient_norm"] for row in rows]
    axes.plot(steps, measured, color=ACCENT, marker="o", ms=3)
    axes.plot(steps, noise, color=WARM, ls="--")
    axes.set(xlabel="step", ylabel="L2 norm", ylim=(0, 1.15 * max(*measured, *noise)))
    ends = [(measured[-1], "released gradient", ACCENT), (noise[-1], "noise alone", WARM)]
    label_ends(axes, steps[-1], ends)


@as_svg
def clip_curve(axes: Axes, rows: Sequence[dict[str, Any]], *, step: str = "step") -> None:
    steps, norms = ([row[name] for row in rows] for name in ("step", "clip_norm"))
    axes.plot(steps, norms, color=ACCENT, marker="o", ms=3)
    axes.set(xlabel=step, ylabel="clip norm", ylim=(0, None))


def label_ends(axes: Axes, x: float, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Names at the right ends of lines (height, name, colour), moved apart where they would touch.

    Heights are on the axes' own scale; the least distance is a share of it.
    """
    axes.get_ylim()  # limits that nobody set are computed when they are asked for
    place = axes.transData + axes.transAxes.inverted()
    wanted = sorted((float(place.transform((x, y))[1]), text, c) for y, text, c in ends)
    moved = apart([height for height, *_ in wanted], gap=0.065)
    for at, (_, text, colour) in zip(moved, wanted):
        axes.annotate(
            text, (1.01, at), xycoords="axes fraction", color=colour, va="center", fontsize=9
        )


def apart(heights: Sequence[float], *, gap: float) -> list[float]:
    """The nearest heights to these (ascending) that keep a distance: least squares.

    Less their index × gap they must not fall: pool adjacent violators, which take their mean.

    >>> apart([0.5, 0.5, 2.0], gap=0.1)
    [0.45, 0.55, 2.0]
    """
    pools: list[list[float]] = []
    for i, height in enumerate(heights):
        pools.append([height - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    return [round(height + i * gap, 9) for i, height in enumerate(level)]


def noise_figure(
    plan: Plan,
    caption: str,
    *,
    per: object = None,
    step: str = "step",
    independent: str = "DP-SGD",
) -> Iterator[Figure]:
    """Noise in the summed update over steps (or rounds), per mechanism, at the plan's ε.

    In units of the clip norm, divided by `per` planned units if that is a number. `independent`
    is what training with independent noise is called. Mechanisms whose error cannot be computed at
    this size are left out; without noise or mechanisms there is no figure.
    """
    if plan.steps == OPEN:  # no mechanism beside it was planned for any length
        return
    choices: list[tuple[str, Strategy]] = [(f"this run ({plan.strategy.name})", plan.strategy)]
    if not plan.participation.is_sampled:
        if plan.strategy.name != "tree":
            tree = fit("tree", plan.participation).strategy
            choices.append(("Honaker tree, best restart", tree))
        if plan.strategy.name != "identity":
            choices.append((f"independent noise ({independent})", identity()))
    scale = plan.noise_multiplier / (per if isinstance(per, int) and per else 1)
    own = plan.sensitivity.value
    series: list[tuple[str, Any]] = []
    for label, strategy in choices if scale else ():
        try:
            ratio = sensitivity(strategy, plan.participation).value / own if own else 1.0
            curve = scale * ratio * error(strategy, plan.steps).per_step
        except NoshuffleError:
            continue
        is_tree = bool(series) and strategy.name == "tree"  # of one step: it would hide the run's
        if not (is_tree and np.allclose(curve, series[0][1], rtol=1e-3)):
            series.append((label, curve))
    if series:
        yield _noise_curve(series, step=step), caption


@as_svg
def _noise_curve(axes: Axes, series: Sequence[tuple[str, Any]], *, step: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for (label, curve), colour in zip(series, (ACCENT, WARM, MUTED)):
        picks = spread(len(curve), most=400)
        axes.plot(picks, curve[np.array(picks) - 1], color=colour, label=label, lw=1.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    top = 1.15 * max(float(curve.max()) for _, curve in series)  # room for the legend
    axes.set(xlabel=step, ylabel="noise std / clip norm", ylim=(0, top))
    axes.legend(frameon=False, loc="upper left")
