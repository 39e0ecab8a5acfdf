"""Measured rates beside the theory's: excess against n, d and ε, slopes fitted on log-log axes.

    slope = least squares fit of log(excess) against log(x),     x = n, d, ε or ln d

Each `Rate` is one panel of the picture: an experiment, its sizes, what theory says, and what would
miss it. Two kinds of problem:

    noise       a linear loss and n times the same row (`travel`, `hardest` of `experiments`): the
                term of the noise alone, with the exponent of the minimax rate
    curvature   logistic or squared loss, rows and labels drawn at random, so that sampling counts.
                Around an interior optimum the excess is ½ tr(H·Cov ŵ): noise of deviation 1/(nμ)
                gives (nμ)⁻², a sample 1/n, whatever slower rate the worst case has

Accepted intervals are two-sided, theory ± `width` (0.1 unless told); least squares has the one
that was asked for. Those of the rows of curvature (and every width) were committed before any of
them was run. Sizes and intervals of the rows of noise are older: decided after a first run.

The slope is that of the mean over seeds, its error by leaving out one seed at a time. Logarithms
are part of some rates, and over three decades of n they bend a slope by a tenth: where that happens
the same numbers are told against n, and against n over the logarithms of the theorem. A verdict is

    held         slope ± 2 errors lies in its interval
    held (edge)  the slope lies in it, but not with its errors
    not tested   the row is a bound for the worst case (`is_bound`) and the slope is steeper than
                 its interval: no bound is broken, and the exponent is not seen either
    missed       the slope lies outside of its interval; the reason follows, where one is known

>>> fields = {"axis": "n", "x": (1.0, 2.0), "excess": (1.0, 0.5), "theory": -1.0, "note": ""}
>>> told = [Curve("a", slope=s, accepted=(-1.1, -0.9), error=0.02, **fields).verdict()
...         for s in (-1.0, -0.91, -0.5)]
>>> told, Curve("b", slope=-1.9, accepted=(-1.1, -0.9), is_bound=True, **fields).verdict()
(['held', 'held (edge)', 'missed'], 'not tested')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.accounting import gaussian
from noshuffle.convex import solvers
from noshuffle.convex.solvers import experiments as e
from noshuffle.errors import InvalidInput

#: What the fitted line is drawn against: the parameter that varies, and a function of it.
AXES: dict[str, tuple[str, Callable[[float], float]]] = {
    "n": ("n", float),
    "d": ("d", float),
    "ε": ("epsilon", float),
    "μ": ("epsilon", lambda size: gaussian.mu(epsilon=size, delta=e.DELTA)),
    "ln d": ("d", math.log),
    "n / ln n": ("n", lambda size: size / math.log(size)),
    "n / ln² n": ("n", lambda size: size / math.log(size) ** 2),
}
NOTES = {
    "ftrl in ε": "where z·E·√d is over ten times the batch; from ¼ to 2 it is −0.40",
    "frank_wolfe_noisy, tree, log": "the same numbers; a prefix sums up to lg T nodes, each with "
    "noise of √lg T",
    "frank_wolfe_poly in d": "fixed n = 4096, excess at the hardest strength",
    "frank_wolfe_poly": "ln n on top",
    "frank_wolfe_tree, log": "the same numbers; without amplification by shuffling",
}
REASONS = {
    "frank_wolfe_noisy, population": "steeper: noise, not the step, decides at the smaller sizes",
    "frank_wolfe_full": "steeper: the optimum lies inside of a face, where noise falls like 1/n",
    "ftrl (logistic)": "not its regime: the bound is above what standing still costs",
    "dp_gd in d": "scores shrink as d grows, so that curvature is larger: 1.9 is to be expected",
    "dp_svrg": "not yet there: each doubling of n has −0.31, −0.64, −0.77, and −0.9 to 8192; the "
    "smallest sizes have two snapshots",
    "frank_wolfe_noisy, tree": "the noise of a tree grows with ln n, which takes a tenth off the "
    "slope; next row",
    "frank_wolfe_tree": "(ln² n / n)^⅔ is the rate, and the number of phases jumps with n; next "
    "row",
}


@dataclass(frozen=True)
class Rate:
    """One experiment: `fn` over `sizes` (the first `quick` of them in a hurry)."""

    name: str
    fn: Callable[..., float]
    sizes: tuple[float, ...]
    quick: int
    theory: float
    axis: str = "n"
    settings: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 5
    is_bound: bool = False
    width: float = 0.1
    asked: tuple[float, float] | None = None

    @property
    def accepted(self) -> tuple[float, float]:
        """The interval that was asked for, or theory ± width."""
        return self.asked or (self.theory - self.width, self.theory + self.width)

    def measure(self, size: float, *, seed: int) -> float:
        """The number of one experiment."""
        parameter = AXES[self.axis][0]
        value = size if parameter == "epsilon" else int(size)
        return self.fn(**{parameter: value}, seed=seed, **self.settings)


def _powers(first: int, last: int) -> tuple[float, ...]:
    return tuple(2**k for k in range(first, last + 1))


def _travel(name: str, sizes: tuple[float, ...], quick: int = 3, **more: Any) -> Rate:
    """A solver of `experiments.travel_excess`: theory −1 in n."""
    settings = {"solve": getattr(solvers, name)}
    return Rate(name, e.travel_excess, sizes, quick, -1.0, "n", settings, **more)


def _curved(
    name: str, sizes: tuple[float, ...], theory: float, axis: str = "n", **more: Any
) -> Rate:
    """A solver on logistic regression with rows and labels at random (`e.curved_excess`)."""
    settings: dict[str, Any] = {"solve": getattr(solvers, name.split(" in ")[0].split(",")[0])}
    settings["is_population"] = name.endswith("population")
    settings["epsilon"] = more.pop("epsilon", 1.0)
    if axis == "μ":
        settings.pop("epsilon")
    return Rate(name, e.curved_excess, sizes, 3, theory, axis, settings, **more)


_LS = (-1.05, -0.8)
_NAIVE, _TREE, _LS_20 = {"aggregation": "naive"}, {"aggregation": "tree"}, {"d": 20}
_IN_D, _L1_TREE = {"n": 4096, "epsilon": 2.0}, {"d": 100, "solver": "tree", "epsilon": 2.0}
_NS, _DS, _ES = _powers(12, 20), (1e2, 1e3, 1e4, 1e5, 1e6), (1 / 32, 1 / 16, 1 / 8, 1 / 4)

_MS = _powers(11, 15)
_WIDE: dict[str, Any] = {"width": 0.2}
_CURVED = (
    _curved("output_perturbation", _MS, -2.0, **_WIDE),
    _curved("objective_perturbation", _MS, -2.0, **_WIDE),
    _curved("objective_perturbation, population", _MS, -1.0, epsilon=8.0, width=0.15),
    _curved("dp_gd, curvature", _MS, -2.0, **_WIDE),
    _curved("dp_gd in μ", (0.5, 1, 2, 4), -2.0, "μ", **_WIDE),
    _curved("dp_gd in d", (5, 10, 20, 40), 2.0, "d", width=0.3),
    _curved("dp_gd, population", _MS, -1.0, epsilon=8.0, width=0.15),
    _curved("phased_sgd, population", _MS, -0.5, epsilon=8.0, is_bound=True),
    _curved("phased_mirror_descent, population", _MS, -0.5, epsilon=8.0, is_bound=True),
    _curved("frank_wolfe_noisy, population", _MS, -0.5, "n / ln² n", epsilon=8.0),
    Rate("frank_wolfe_full", e.sparse_excess, _powers(12, 16), 3, -2 / 3, width=0.15),
    Rate("ftrl (logistic)", e.logistic_regret, _powers(11, 15), 3, -0.5, is_bound=True),
)

RATES: tuple[Rate, ...] = (
    Rate("ftrl", e.ftrl_excess, _powers(11, 16), 3, -0.5),
    Rate("ftrl (hinge)", e.hinge_regret, _powers(11, 16), 3, -0.5),
    Rate("ftrl in d", e.ftrl_excess, (4, 16, 64, 256), 3, 0.25, "d", {"n": 8192}),
    Rate("ftrl in ε", e.ftrl_excess, _ES, 4, -0.5, "ε", {"n": 8192}),
    Rate("ftrl_ls, 5 features", e.least_squares_regret, _NS[:6], 3, -1.0, asked=_LS),
    Rate("ftrl_ls, 20 features", e.least_squares_regret, _NS[:6], 3, -1.0, "n", _LS_20, asked=_LS),
    _travel("dp_gd", _powers(9, 12)),
    _travel("dp_sgd", _powers(9, 12)),
    _travel("dp_svrg", _powers(9, 12), 2),
    _travel("phased_sgd", _powers(10, 14)),
    _travel("phased_mirror_descent", _powers(9, 13), is_bound=True),
    _travel("accelerated_srgd", _powers(9, 13), is_bound=True),
    Rate("noisy_max", e.noisy_max_excess, (0.1, 0.2, 0.4, 0.8), 4, -1.0, "ε"),
    Rate("frank_wolfe_noisy, naive", e.frank_wolfe_excess, _NS, 4, -0.75, "n", _NAIVE),
    Rate("frank_wolfe_noisy, tree", e.frank_wolfe_excess, _NS, 4, -1.0, "n", _TREE),
    Rate("frank_wolfe_noisy, tree, log", e.frank_wolfe_excess, _NS, 4, -1.0, "n / ln n", _TREE),
    Rate("frank_wolfe_poly in d", e.hardest_l1_excess, _DS, 3, 1.0, "ln d", _IN_D),
    Rate("frank_wolfe_poly", e.single_row_excess, _powers(9, 14), 3, -0.5),
    Rate("frank_wolfe_tree", e.hardest_l1_excess, _NS[:7], 5, -2 / 3, "n", _L1_TREE),
    Rate("frank_wolfe_tree, log", e.hardest_l1_excess, _NS[:7], 5, -2 / 3, "n / ln² n", _L1_TREE),
    Rate("frank_wolfe_stationary", e.stationary_gap, _NS[:6], 3, -1 / 3, is_bound=True),
    Rate("weakly_convex", e.weakly_convex_gap, _NS[:5], 3, -1 / 3, is_bound=True),
    *_CURVED,
)


@dataclass(frozen=True)
class Curve:
    """What was measured."""

    name: str
    axis: str
    x: tuple[float, ...]
    excess: tuple[float, ...]
    slope: float
    theory: float
    accepted: tuple[float, float]
    note: str
    reason: str = ""
    error: float = 0.0
    bars: tuple[float, ...] = ()
    is_bound: bool = False

    @property
    def is_within(self) -> bool:
        """Whether the fitted slope lies in the accepted interval."""
        return self.accepted[0] <= self.slope <= self.accepted[1]

    def verdict(self) -> str:
        """held, held (edge), not tested, or missed and why."""
        low, high = self.accepted
        if self.is_bound and self.slope < low:
            return "not tested"
        if not self.is_within:
            return f"missed: {self.reason}" if self.reason else "missed"
        inside = min(high - self.slope, self.slope - low)
        return "held (edge)" if inside < 2 * self.error else "held"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_within": self.is_within, "verdict": self.verdict()}


def fitted_slope(x: Sequence[float], excess: Sequence[float]) -> float:
    """Slope of log(excess) over log(x); needs two different sizes and positive excess."""
    if len(set(x)) < 2 or min(excess) <= 0 or min(x) <= 0:
        raise InvalidInput("a slope needs two different sizes and positive values")
    return float(np.polyfit(np.log(np.asarray(x)), np.log(np.asarray(excess)), 1)[0])


def measure(rate: Rate, *, quick: bool = False) -> Curve:
    """Run one experiment: the mean over seeds at every size, the fitted slope, and their errors."""
    sizes = rate.sizes[: rate.quick] if quick else rate.sizes
    seeds = range(2 if quick else rate.repeats)
    x = tuple(AXES[rate.axis][1](float(size)) for size in sizes)
    every = np.array([[rate.measure(n, seed=s) for n in sizes] for s in seeds])
    left = [fitted_slope(x, np.delete(every, s, axis=0).mean(axis=0)) for s in seeds]
    count = len(seeds)
    return Curve(
        name=rate.name,
        axis=rate.axis,
        x=x,
        excess=tuple(every.mean(axis=0).tolist()),
        slope=fitted_slope(x, every.mean(axis=0)),
        theory=rate.theory,
        accepted=rate.accepted,
        note=NOTES.get(rate.name, ""),
        reason=REASONS.get(rate.name, ""),
        error=float(np.sqrt((count - 1) * np.var(left))),
        bars=tuple((every.std(axis=0, ddof=1) / math.sqrt(count)).tolist()),
        is_bound=rate.is_bound,
    )


def table(curves: Sequence[Curve]) -> str:
    """A Markdown table: measured slope beside the theory's."""
    lines = [
        "| solver | against | slope ± error | theory | accepted | verdict | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in curves:
        low, high = c.accepted
        lines.append(
            f"| {c.name} | {c.axis} | {c.slope:+.3f} ± {c.error:.3f} | {c.theory:+.2f} "
            f"| {low:+.2f} to {high:+.2f} | {c.verdict()} | {c.note} |"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Sequence[Curve]) -> None:
    """One small log-log panel per curve: points, the fitted line, and the theory's direction."""
    from matplotlib.figure import Figure  # not pyplot: its backend is the user's

    columns = min(4, len(curves))
    lines = -(-len(curves) // columns)
    size = (3.2 * columns, 2.6 * lines)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.ravel()[len(curves) :]:
        axes.set_visible(False)
    for axes, c in zip(grid.ravel(), curves):
        x, y = np.asarray(c.x), np.asarray(c.excess)
        middle = math.exp(float(np.mean(np.log(x)))), math.exp(float(np.mean(np.log(y))))
        bars = np.asarray(c.bars) if c.bars else None
        axes.errorbar(x, y, yerr=bars, fmt="o", color="#0b6e99", ms=4, lw=1)
        axes.set(xscale="log", yscale="log")
        fit, theory = ((x / middle[0]) ** s * middle[1] for s in (c.slope, c.theory))
        axes.loglog(x, fit, color="#0b6e99", lw=1.2, label=f"measured {c.slope:+.2f}")
        axes.loglog(x, theory, color="#c8553d", lw=1.2, ls="--", label=f"theory {c.theory:+.2f}")
        told = c.verdict().partition(":")[0]
        axes.set_title(c.name if told == "held" else f"{c.name}: {told}", fontsize=8)
        axes.set_xlabel(c.axis, fontsize=8)
        picks = x[:: -(-len(x) // 4)]
        axes.set_xticks(picks, [f"{v:,.0f}" if v >= 1e3 else f"{v:.3g}" for v in picks])
        axes.set_xticks([], minor=True)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    for axes in grid[:, 0]:
        axes.set_ylabel("excess", fontsize=8)
    figure.savefig(path, dpi=130)
