"""Measured rates beside the theory's: excess against n, d and ε, slopes fitted on log-log axes.

    slope = least squares fit of log(excess) against log(x),     x = n, d, ε or ln d

Each `Rate` is one line of the picture: a solver, what is varied, the sizes, the exponent that the
theory states (upper bounds: a steeper slope in n is a better one) and the interval that is
accepted here. `measure` runs one, `measure_all` all of them, `draw` makes the figure, `table` the
text.

>>> rate = next(r for r in RATES if r.name == "noisy_max")
>>> curve = measure(rate, quick=True)
>>> round(curve.slope, 1), curve.is_within
(-1.0, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.convex.solvers import experiments as e
from noshuffle.errors import InvalidInput

_Measure = Callable[..., float]


@dataclass(frozen=True)
class Rate:
    """One experiment: `fn(x, seed=…)` over `sizes` (`quick` in a hurry), `theory` its exponent."""

    name: str
    axis: str
    fn: _Measure
    sizes: tuple[float, ...]
    quick: tuple[float, ...]
    theory: float
    accepted: tuple[float, float]
    repeats: int = 3
    note: str = ""


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

    @property
    def is_within(self) -> bool:
        """Whether the fitted slope lies in the accepted interval."""
        return self.accepted[0] <= self.slope <= self.accepted[1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_within": self.is_within}


def _powers(first: int, last: int) -> tuple[float, ...]:
    return tuple(2**k for k in range(first, last + 1))


def _by_dimension(d: float, *, seed: int, fn: _Measure, n: int, **settings: Any) -> float:
    return fn(n, seed=seed, d=int(d), **settings)


def _by_epsilon(epsilon: float, *, seed: int, fn: _Measure, n: int) -> float:
    return fn(n, seed=seed, epsilon=epsilon)


def _single_rows(n: float, *, seed: int) -> float:
    """Polyhedral Frank–Wolfe with one row per step, as its −1/2 is stated."""
    return e.hardest_l1_excess(int(n), seed=seed, d=100, steps=int(n) // 2, epsilon=8.0)


_LS = (-1.05, -0.8)
_CONVEX = (-0.6, -0.4)
_ONE = (-1.45, -0.8)
_BETTER = "the problem is kinder than the worst case"

RATES: tuple[Rate, ...] = (
    Rate("ftrl", "n", e.ftrl_excess, _powers(11, 16), _powers(10, 13), -0.5, _CONVEX),
    Rate("ftrl (hinge)", "n", e.hinge_regret, _powers(11, 16), _powers(10, 13), -0.5, _CONVEX),
    Rate(
        "ftrl in d",
        "d",
        partial(_by_dimension, fn=e.ftrl_excess, n=8192),
        (4, 16, 64, 256),
        (4, 16, 64),
        0.25,
        (0.1, 0.35),
    ),
    Rate(
        "ftrl in ε",
        "ε",
        partial(_by_epsilon, fn=e.ftrl_excess, n=8192),
        (0.25, 0.5, 1.0, 2.0),
        (0.25, 1.0),
        -0.5,
        (-0.6, -0.3),
    ),
    Rate(
        "ftrl_ls, 5 features",
        "n",
        e.least_squares_regret,
        _powers(12, 17),
        _powers(12, 14),
        -1.0,
        _LS,
    ),
    Rate(
        "ftrl_ls, 20 features",
        "n",
        partial(e.least_squares_regret, d=20),
        _powers(12, 17),
        _powers(12, 14),
        -1.0,
        _LS,
    ),
    Rate("dp_gd", "n", e.gd_excess, _powers(9, 12), _powers(9, 11), -1.0, _ONE),
    Rate("dp_sgd", "n", e.sgd_excess, _powers(9, 12), _powers(9, 11), -1.0, _ONE),
    Rate("dp_svrg", "n", e.svrg_excess, _powers(9, 12), (512, 1024), -1.0, _ONE, 2),
    Rate("phased_sgd", "n", e.phased_sgd_excess, _powers(10, 14), _powers(10, 12), -1.0, _ONE),
    Rate(
        "phased_mirror_descent",
        "n",
        e.phased_mirror_excess,
        _powers(9, 13),
        _powers(9, 11),
        -1.0,
        (-1.6, -0.8),
        note=_BETTER,
    ),
    Rate(
        "accelerated_srgd",
        "n",
        e.srgd_excess,
        _powers(9, 13),
        _powers(9, 11),
        -1.0,
        (-1.5, -0.8),
        note=_BETTER,
    ),
    Rate(
        "output_perturbation",
        "n",
        e.output_excess,
        _powers(12, 17),
        _powers(12, 15),
        -0.5,
        (-1.1, -0.4),
        note=_BETTER,
    ),
    Rate(
        "objective_perturbation",
        "n",
        e.objective_excess,
        _powers(9, 14),
        _powers(9, 12),
        -1.0,
        (-2.1, -0.8),
        note=_BETTER,
    ),
    Rate(
        "noisy_max",
        "ε",
        e.noisy_max_excess,
        (0.1, 0.2, 0.4, 0.8),
        (0.1, 0.4),
        -1.0,
        (-1.1, -0.9),
    ),
    Rate(
        "frank_wolfe_noisy, naive",
        "n",
        partial(e.frank_wolfe_excess, aggregation="naive"),
        _powers(12, 20),
        _powers(12, 15),
        -0.75,
        (-0.85, -0.65),
    ),
    Rate(
        "frank_wolfe_noisy, tree",
        "n",
        partial(e.frank_wolfe_excess, aggregation="tree"),
        _powers(12, 20),
        _powers(12, 15),
        -1.0,
        (-1.1, -0.8),
        note="log T in the noise of a tree",
    ),
    Rate(
        "frank_wolfe_poly in d",
        "ln d",
        partial(_by_dimension, fn=e.hardest_l1_excess, n=4096, epsilon=2.0),
        (1e2, 1e3, 1e4, 1e5, 1e6),
        (1e2, 1e3, 1e4),
        1.0,
        (0.6, 1.4),
        repeats=2,
        note="fixed n = 4096, excess at the hardest strength",
    ),
    Rate(
        "frank_wolfe_poly",
        "n",
        _single_rows,
        _powers(9, 14),
        _powers(9, 11),
        -0.5,
        (-0.65, -0.3),
        repeats=2,
        note="ln n on top",
    ),
    Rate(
        "frank_wolfe_tree",
        "n",
        partial(e.hardest_l1_excess, d=100, solver="tree", epsilon=2.0),
        _powers(12, 18),
        _powers(12, 16),
        -2 / 3,
        (-0.85, -0.4),
        note="without amplification by shuffling",
    ),
    Rate(
        "frank_wolfe_stationary",
        "n",
        e.stationary_gap,
        _powers(12, 17),
        _powers(12, 14),
        -1 / 3,
        (-0.8, -0.25),
        note=_BETTER,
    ),
    Rate(
        "weakly_convex",
        "n",
        e.weakly_convex_gap,
        _powers(12, 16),
        _powers(12, 14),
        -1 / 3,
        (-1.2, -0.15),
        note=_BETTER,
    ),
)


def fitted_slope(x: Sequence[float], excess: Sequence[float]) -> float:
    """Slope of log(excess) over log(x); needs two different sizes and positive excess."""
    if len(set(x)) < 2 or min(excess) <= 0 or min(x) <= 0:
        raise InvalidInput("a slope needs two different sizes and positive values")
    return float(np.polyfit(np.log(np.asarray(x)), np.log(np.asarray(excess)), 1)[0])


def measure(rate: Rate, *, quick: bool = False) -> Curve:
    """Run one experiment: the mean over repeats at every size, and the fitted slope."""
    sizes = rate.quick if quick else rate.sizes
    repeats = max(1, rate.repeats - 1) if quick else rate.repeats
    excess = []
    for size in sizes:
        x = int(size) if rate.axis in ("n", "d", "ln d") else size
        excess.append(float(np.mean([rate.fn(x, seed=s) for s in range(repeats)])))
    against = [math.log(s) for s in sizes] if rate.axis == "ln d" else list(sizes)
    return Curve(
        name=rate.name,
        axis=rate.axis,
        x=tuple(against),
        excess=tuple(excess),
        slope=fitted_slope(against, excess),
        theory=rate.theory,
        accepted=rate.accepted,
        note=rate.note,
    )


def measure_all(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Curve]:
    """Every experiment in order (or those whose name starts with one of `only`)."""
    chosen = [r for r in RATES if not only or any(r.name.startswith(o) for o in only)]
    if not chosen:
        names = ", ".join(r.name for r in RATES)
        raise InvalidInput(f"no experiment is called {', '.join(only)}; there are: {names}")
    out = []
    for rate in chosen:
        if progress is not None:
            progress(rate.name)
        out.append(measure(rate, quick=quick))
    return out


def table(curves: Sequence[Curve]) -> str:
    """A Markdown table: measured slope beside the theory's."""
    lines = [
        "| solver | against | measured slope | theory | accepted | within | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in curves:
        low, high = c.accepted
        lines.append(
            f"| {c.name} | {c.axis} | {c.slope:+.2f} | {c.theory:+.2f} | {low:+.2f} to {high:+.2f} "
            f"| {'yes' if c.is_within else 'NO'} | {c.note} |"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Sequence[Curve]) -> None:
    """One small log-log panel per curve: points, the fitted line, and the theory's direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(curves))
    lines = -(-len(curves) // columns)
    size = (3.2 * columns, 2.6 * lines)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False
    )
    for axes in grid.ravel()[len(curves) :]:
        axes.set_visible(False)
    for axes, c in zip(grid.ravel(), curves):
        x, y = np.asarray(c.x), np.asarray(c.excess)
        middle = math.exp(float(np.mean(np.log(x)))), math.exp(float(np.mean(np.log(y))))
        axes.loglog(x, y, "o", color="#0b6e99", ms=4)
        fit, theory = ((x / middle[0]) ** s * middle[1] for s in (c.slope, c.theory))
        axes.loglog(x, fit, color="#0b6e99", lw=1.2, label=f"measured {c.slope:+.2f}")
        axes.loglog(x, theory, color="#c8553d", lw=1.2, ls="--", label=f"theory {c.theory:+.2f}")
        axes.set_title(c.name, fontsize=9)
        axes.set_xlabel(c.axis, fontsize=8)
        picks = x[:: -(-len(x) // 4)]
        axes.set_xticks(picks, [f"{v:g}" if v >= 1e3 else f"{v:.3g}" for v in picks])
        axes.set_xticks([], minor=True)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
