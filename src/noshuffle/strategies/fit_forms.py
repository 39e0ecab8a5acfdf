"""What the Toeplitz fits share: error and sensitivity with gradients, and the descent itself.

With c(x) the encoder, d = 1/c its inverse and a the workload, the decoder is b = a·d and

    rms² = Σ_i (n−i)/n · b_i²,      objective = rms × sensitivity.

A gradient in d becomes one in c by δd = −d·d·δc, that is

    ∂E/∂c_j = −Σ_i h_i d_{i−j},      h = T(d)ᵀ ∂E/∂d,

one recursive filter and one correlation: O(n·p + n log n) for p coefficients.

>>> value, slope = error_form(3, workload=Workload())(np.array([1.0, 0.0, 0.0]))    # b = (1, 1, 1)
>>> round(value, 9), slope.round(3).tolist()
(2.0, [4.0, 2.0, 0.667])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from noshuffle.errors import Unsupported
from noshuffle.participation import (
    CyclicPoisson,
    Epochs,
    MinSeparation,
    Participation,
    SinglePass,
)
from noshuffle.strategies.base import Strategy
from noshuffle.strategies.error import error
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.recursions import convolve, decaying, divided
from noshuffle.strategies.sensitivity import sensitivity
from noshuffle.strategies.workload import Workload

ValueAndGradient = Callable[[Array], tuple[float, Array]]

#: What the search sees where 1/c(x) overflows: far above any log-objective, but finite.
WALL = 1e3
#: Largest slope of the log-objective at which a search counts as converged.
FLAT = 1e-4
#: Numbers held at once when a schedule is integrated over columns.
COLUMN_BUDGET = 2_000_000


@dataclass(frozen=True)
class Fit:
    """A fitted strategy, and whether the search for it converged.

    `objective` is rms error × sensitivity, by which mechanisms compare at equal privacy.
    """

    strategy: Strategy
    objective: float
    converged: bool


class FitLayout(NamedTuple):
    """Steps, least distance between two participations, and how many there may be."""

    steps: int
    separation: int
    most: int


def layout(participation: Participation) -> FitLayout:
    """The three numbers the fits need; sampled and restarted participations are refused."""
    if isinstance(participation, SinglePass):
        return FitLayout(participation.steps, participation.steps, 1)
    if isinstance(participation, Epochs):
        separation = participation.steps_per_epoch
        return FitLayout(participation.steps, separation, participation.most)
    if isinstance(participation, MinSeparation):
        return FitLayout(participation.steps, participation.separation, participation.most)
    if isinstance(participation, CyclicPoisson):  # each turn is accounted apart
        return FitLayout(participation.steps, participation.groups, 1)
    raise Unsupported(
        "strategies are fitted for SinglePass, Epochs or MinSeparation, got "
        f"{type(participation).__name__}; use identity there, or a tree for Restarted"
    )


def coarser(workload: Workload, n: int, *, size: int) -> Workload:
    """The workload of a shorter run with the same shape of schedule: for warm starts only."""
    if workload.is_toeplitz:
        return workload
    grid = np.linspace(0, n - 1, size).astype(int)
    return Workload(workload.beta, tuple(workload.rates(n)[grid].tolist()))


def cost(
    strategy: Strategy,
    participation: Participation,
    *,
    workload: Workload,
    tree_accounting: str = "tight",
) -> float:
    """Rms error × sensitivity: what every fit reports and what fits are compared by."""
    reach = sensitivity(strategy, participation, tree_accounting=tree_accounting)
    return error(strategy, participation.steps, workload=workload).rms * reach.value


def error_form(n: int, *, workload: Workload) -> ValueAndGradient:
    """d ↦ (rms², its gradient), d the n coefficients of the inverse encoder."""
    if not workload.is_toeplitz:
        return _scheduled_form(n, workload)
    weights = (n - np.arange(n)) / n

    def form(d: Array) -> tuple[float, Array]:
        b = np.cumsum(decaying(d, workload.beta))
        back = np.cumsum((2 * weights * b)[::-1])  # the adjoint runs backwards in time
        return float(weights @ b**2), decaying(back, workload.beta)[::-1]

    return form


def _scheduled_form(n: int, workload: Workload) -> ValueAndGradient:
    """Mean square of  column_s(B) = cumsum_t(η_t e_{t−s}),  e = d / (1 − βx), over columns s.

    Column norms vary slowly with s, so long runs take the trapezoid rule over a grid of columns;
    the fit itself is judged by the exact error afterwards.
    """
    rates = workload.rates(n)
    count = min(n, max(16, COLUMN_BUDGET // n))
    nodes = np.unique(np.round(np.linspace(0, n - 1, count)).astype(int))
    edges = np.concatenate([[-0.5], (nodes[1:] + nodes[:-1]) / 2, [n - 0.5]])
    share = np.diff(edges) / n
    step = nodes[:, None] + np.arange(n)  # row s holds steps s, s+1, …; what passes n is not there
    inside = step < n
    later = np.where(inside, rates[np.minimum(step, n - 1)], 0.0)

    def form(d: Array) -> tuple[float, Array]:
        columns = inside * np.cumsum(later * decaying(d, workload.beta), axis=1)
        value = float(share @ np.einsum("st,st->s", columns, columns))
        back = np.cumsum(columns[:, ::-1], axis=1)[:, ::-1]
        slope = 2 * share @ (later * back)
        return value, decaying(slope[::-1], workload.beta)[::-1]

    return form


def sensitivity_form(n: int, *, separation: int, most: int, is_free: bool) -> ValueAndGradient:
    """c ↦ (squared sensitivity or an upper bound, its gradient).

    Guarantees: for any real c the value is at least the squared sensitivity of T(c) over every
    pattern of at most `most` steps with lags that are multiples of `separation`; with `is_free`
    also over lags that only have to be that large (the running maximum makes c non-increasing).
    """
    rows = -(-n // separation)

    def lags(values: Array) -> Array:
        folded = np.zeros(rows * separation)
        folded[:n] = values
        total = np.cumsum(folded.reshape(rows, separation), axis=0)
        if most < rows:
            total[most:] -= total[:-most].copy()
        return total.reshape(-1)[:n]

    def form(c: Array) -> tuple[float, Array]:
        size, source = np.abs(c), np.arange(n)
        if is_free and most > 1:
            top = np.maximum.accumulate(size[::-1])[::-1]
            # Which coefficient each running maximum comes from, for the chain rule.
            source = np.where(size == top, source, n)
            source = np.minimum.accumulate(source[::-1])[::-1]
            size = top
        v = lags(size)
        slope = lags(2 * v[::-1])[::-1]
        return float(v @ v), np.sign(c) * np.bincount(source, weights=slope, minlength=n)

    return form


def through_reciprocal(c: Array, d: Array, slope: Array) -> Array:
    """Gradient in the leading coefficients c when d = 1/c has gradient `slope`."""
    n, bands = len(d), len(c)
    back = divided(slope[::-1], c)[::-1]
    if bands <= 64:
        return -np.array([back[j:] @ d[: n - j] for j in range(bands)])
    return -convolve(back, d[::-1], 2 * n)[n - 1 : n - 1 + bands]


def lbfgs(
    fn: Callable[..., tuple[float, Array]],
    x: Array,
    limits: list[tuple[float, float]] | None,
    *,
    args: tuple[float, ...] = (),
    **options: float,
) -> Any:
    """One run of L-BFGS within limits, for a function that returns its gradient too."""
    from scipy.optimize import minimize

    return minimize(fn, x, args=args, jac=True, method="L-BFGS-B", bounds=limits, options=options)


def descend(
    fn: ValueAndGradient,
    x: Array,
    *,
    bounds: list[tuple[float, float]] | None = None,
    most: int = 500,
) -> tuple[Array, bool, int]:
    """L-BFGS within bounds: the point, whether its slope is flat, and the iterations taken.

    A search that gives up early is started afresh once: its memory of slopes may have misled it.
    """
    low, high = np.array(bounds).T if bounds else (-np.inf, np.inf)
    taken = 0
    for _ in range(2):
        found = lbfgs(fn, x, bounds, maxiter=most, maxcor=30, ftol=1e-13, gtol=1e-7)
        x, taken = np.asarray(found.x), taken + int(found.nit)
        residual = np.abs(np.clip(x - found.jac, low, high) - x).max(initial=0.0)
        if residual <= FLAT or taken >= most:
            break
    return x, bool(residual <= FLAT), taken


def better(
    found: Strategy,
    start: Strategy,
    participation: Participation,
    converged: bool,
    *,
    workload: Workload,
) -> Fit:
    """The fit, or its start where that is better; both judged by the library's own functions."""
    begin, reached = (cost(one, participation, workload=workload) for one in (start, found))
    return Fit(found, reached, converged) if reached <= begin else Fit(start, begin, converged)
