"""Every rate that is measured: the experiment, its sizes, what theory says, and what would miss it.

Accepted intervals are written down as rules about the theory's exponent, not about what was
measured. They were NOT fixed before the first run: which rule and which sizes a row has was decided
after a first run had been seen, except for the intervals that were asked for beforehand.

    asked for           least squares −0.8 to −1.05, general convex −0.5 ± 0.1; fixed beforehand
    exponent reached    theory ± 0.1: the problem is set to the hardest at every size
    bound from above    at most theory + 0.1. A bound is not broken by falling faster, but a slope
                        below theory − 0.1 says that the problem is kinder than the worst case, and
                        the exponent was then not tested

Most problems (`travel` and `hardest` of `experiments`) have a linear loss and n times the same row:
they show the term of the noise and nothing of sampling. Logarithms are part of some rates, and over
three decades of n they bend a slope by a tenth. Where that happens the same numbers are told twice:
against n, where the bare exponent may be missed, and against n over the logarithms of the theorem.
A rate that is known to miss has its `reason` here, so that the table can print it; the verdict
itself is computed (`rates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from noshuffle.convex.solvers import experiments as e

Measure = Callable[..., float]

#: What the fitted line is drawn against, as a function of the size that the experiment gets.
AXES: dict[str, Callable[[float], float]] = {
    "n": lambda size: size,
    "d": lambda size: size,
    "ε": lambda size: size,
    "ln d": math.log,
    "n / ln n": lambda size: size / math.log(size),
    "n / ln² n": lambda size: size / math.log(size) ** 2,
}


@dataclass(frozen=True)
class Rate:
    """One experiment: `fn(size, seed=…)` over `sizes` (`quick` in a hurry)."""

    name: str
    axis: str
    fn: Measure
    sizes: tuple[float, ...]
    quick: tuple[float, ...]
    theory: float
    accepted: tuple[float, float]
    repeats: int = 3
    note: str = ""
    reason: str = ""


def _powers(first: int, last: int) -> tuple[float, ...]:
    return tuple(2**k for k in range(first, last + 1))


def _near(theory: float) -> tuple[float, float]:
    return theory - 0.1, theory + 0.1


def _at_most(theory: float) -> tuple[float, float]:
    return -math.inf, theory + 0.1


def _by_dimension(d: float, *, seed: int, fn: Measure, n: int, **settings: Any) -> float:
    return fn(n, seed=seed, d=int(d), **settings)


def _by_epsilon(epsilon: float, *, seed: int, fn: Measure, n: int) -> float:
    return fn(n, seed=seed, epsilon=epsilon)


def _single_rows(n: float, *, seed: int) -> float:
    """Polyhedral Frank–Wolfe with one row per step, as its −1/2 is stated."""
    return e.hardest_l1_excess(int(n), seed=seed, d=100, steps=int(n) // 2, epsilon=8.0)


@lru_cache(maxsize=256)
def _tree(n: int, *, seed: int) -> float:
    """Measured once, told against n and against n / ln n."""
    return e.frank_wolfe_excess(n, seed=seed, aggregation="tree")


@lru_cache(maxsize=256)
def _l1_tree(n: int, *, seed: int) -> float:
    return e.hardest_l1_excess(n, seed=seed, d=100, solver="tree", epsilon=2.0)


_ASKED_LS = (-1.05, -0.8)
_UP_TO_LOGS = "the same numbers; "


def _rate(
    name: str,
    fn: Measure,
    sizes: tuple[float, ...],
    quick: int,
    theory: float,
    accepted: tuple[float, float] | None = None,
    **more: Any,
) -> Rate:
    """A row; `quick` is the number of sizes in a hurry, theory ± 0.1 is accepted."""
    axis = more.pop("axis", "n")
    return Rate(name, axis, fn, sizes, sizes[:quick], theory, accepted or _near(theory), **more)


RATES: tuple[Rate, ...] = (
    _rate("ftrl", e.ftrl_excess, _powers(11, 16), 3, -0.5),
    _rate("ftrl (hinge)", e.hinge_regret, _powers(11, 16), 3, -0.5),
    _rate(
        "ftrl in d",
        partial(_by_dimension, fn=e.ftrl_excess, n=8192),
        (4, 16, 64, 256),
        3,
        0.25,
        axis="d",
    ),
    _rate(
        "ftrl in ε",
        partial(_by_epsilon, fn=e.ftrl_excess, n=8192),
        (1 / 32, 1 / 16, 1 / 8, 1 / 4),
        4,
        -0.5,
        axis="ε",
        note="where z·E·√d is over ten times the batch; from ¼ to 2 it is −0.40",
    ),
    _rate("ftrl_ls, 5 features", e.least_squares_regret, _powers(12, 17), 3, -1.0, _ASKED_LS),
    _rate(
        "ftrl_ls, 20 features",
        partial(e.least_squares_regret, d=20),
        _powers(12, 17),
        3,
        -1.0,
        _ASKED_LS,
    ),
    _rate("dp_gd", e.gd_excess, _powers(9, 12), 3, -1.0),
    _rate("dp_sgd", e.sgd_excess, _powers(9, 12), 3, -1.0),
    _rate(
        "dp_svrg",
        e.svrg_excess,
        _powers(9, 12),
        2,
        -1.0,
        repeats=2,
        reason="snapshots and steps share one budget, and the number of snapshots grows with n",
    ),
    _rate("phased_sgd", e.phased_sgd_excess, _powers(10, 14), 3, -1.0),
    _rate("phased_mirror_descent", e.phased_mirror_excess, _powers(9, 13), 3, -1.0, _at_most(-1.0)),
    _rate("accelerated_srgd", e.srgd_excess, _powers(9, 13), 3, -1.0, _at_most(-1.0)),
    _rate("output_perturbation", e.output_excess, _powers(12, 17), 4, -0.5, _at_most(-0.5)),
    _rate("objective_perturbation", e.objective_excess, _powers(9, 14), 4, -1.0, _at_most(-1.0)),
    _rate("noisy_max", e.noisy_max_excess, (0.1, 0.2, 0.4, 0.8), 4, -1.0, axis="ε"),
    _rate(
        "frank_wolfe_noisy, naive",
        partial(e.frank_wolfe_excess, aggregation="naive"),
        _powers(12, 20),
        4,
        -0.75,
    ),
    _rate(
        "frank_wolfe_noisy, tree",
        _tree,
        _powers(12, 20),
        4,
        -1.0,
        reason="the noise of a tree grows with ln n, which takes a tenth off the slope; next row",
    ),
    _rate(
        "frank_wolfe_noisy, tree, log",
        _tree,
        _powers(12, 20),
        4,
        -1.0,
        axis="n / ln n",
        note=_UP_TO_LOGS + "a prefix sums up to lg T nodes, each with noise of √lg T",
    ),
    _rate(
        "frank_wolfe_poly in d",
        partial(_by_dimension, fn=e.hardest_l1_excess, n=4096, epsilon=2.0),
        (1e2, 1e3, 1e4, 1e5, 1e6),
        3,
        1.0,
        axis="ln d",
        repeats=2,
        note="fixed n = 4096, excess at the hardest strength",
    ),
    _rate("frank_wolfe_poly", _single_rows, _powers(9, 14), 3, -0.5, repeats=2, note="ln n on top"),
    _rate(
        "frank_wolfe_tree",
        _l1_tree,
        _powers(12, 18),
        5,
        -2 / 3,
        reason="(ln² n / n)^⅔ is the rate, and the number of phases jumps with n; next row",
    ),
    _rate(
        "frank_wolfe_tree, log",
        _l1_tree,
        _powers(12, 18),
        5,
        -2 / 3,
        axis="n / ln² n",
        note=_UP_TO_LOGS + "without amplification by shuffling",
    ),
    _rate("frank_wolfe_stationary", e.stationary_gap, _powers(12, 17), 3, -1 / 3, _at_most(-1 / 3)),
    _rate("weakly_convex", e.weakly_convex_gap, _powers(12, 16), 3, -1 / 3, _at_most(-1 / 3)),
)
