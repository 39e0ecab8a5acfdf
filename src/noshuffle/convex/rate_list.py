"""Every rate that is measured: the experiment, its sizes, what theory says, and what would miss it.

Accepted intervals come from theory, by three rules, and not from what was measured:

    a figure that was asked for     least squares −0.8 to −1.05, general convex −0.5 ± 0.1
    an exponent that is reached     theory ± 0.1: the problem is the hardest at every size
    a bound from above              at most theory + 0.1: the problem is kinder than the worst case,
                                    and falling faster than a bound breaks no bound

Logarithms are part of some rates, and over three decades of n they bend a slope by a tenth. Where
that happens the same numbers are told twice: against n, where the bare exponent may be missed, and
against n over the logarithms of the theorem. A rate that is known to miss has its `reason` here, so
that the table can print it; the verdict itself is computed.
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
_KINDER = "a bound from above; this problem is kinder than the worst case"

RATES: tuple[Rate, ...] = (
    Rate("ftrl", "n", e.ftrl_excess, _powers(11, 16), _powers(10, 13), -0.5, _near(-0.5)),
    Rate("ftrl (hinge)", "n", e.hinge_regret, _powers(11, 16), _powers(10, 13), -0.5, _near(-0.5)),
    Rate(
        "ftrl in d",
        "d",
        partial(_by_dimension, fn=e.ftrl_excess, n=8192),
        (4, 16, 64, 256),
        (4, 16, 64),
        0.25,
        _near(0.25),
    ),
    Rate(
        "ftrl in ε",
        "ε",
        partial(_by_epsilon, fn=e.ftrl_excess, n=8192),
        (1 / 32, 1 / 16, 1 / 8, 1 / 4),
        (1 / 16, 1 / 4),
        -0.5,
        _near(-0.5),
        note="where z·E·√d is over ten times the batch; from ¼ to 2 it is −0.40",
    ),
    Rate(
        "ftrl_ls, 5 features",
        "n",
        e.least_squares_regret,
        _powers(12, 17),
        _powers(12, 14),
        -1.0,
        _ASKED_LS,
    ),
    Rate(
        "ftrl_ls, 20 features",
        "n",
        partial(e.least_squares_regret, d=20),
        _powers(12, 17),
        _powers(12, 14),
        -1.0,
        _ASKED_LS,
    ),
    Rate("dp_gd", "n", e.gd_excess, _powers(9, 12), _powers(9, 11), -1.0, _near(-1.0)),
    Rate("dp_sgd", "n", e.sgd_excess, _powers(9, 12), _powers(9, 11), -1.0, _near(-1.0)),
    Rate(
        "dp_svrg",
        "n",
        e.svrg_excess,
        _powers(9, 12),
        (512, 1024),
        -1.0,
        _near(-1.0),
        repeats=2,
        reason="snapshots and steps share one budget, and the number of snapshots grows with n",
    ),
    Rate(
        "phased_sgd", "n", e.phased_sgd_excess, _powers(10, 14), _powers(10, 12), -1.0, _near(-1.0)
    ),
    Rate(
        "phased_mirror_descent",
        "n",
        e.phased_mirror_excess,
        _powers(9, 13),
        _powers(9, 11),
        -1.0,
        _at_most(-1.0),
        note=_KINDER,
    ),
    Rate(
        "accelerated_srgd",
        "n",
        e.srgd_excess,
        _powers(9, 13),
        _powers(9, 11),
        -1.0,
        _at_most(-1.0),
        note=_KINDER,
    ),
    Rate(
        "output_perturbation",
        "n",
        e.output_excess,
        _powers(12, 17),
        _powers(12, 15),
        -0.5,
        _at_most(-0.5),
        note=_KINDER,
    ),
    Rate(
        "objective_perturbation",
        "n",
        e.objective_excess,
        _powers(9, 14),
        _powers(9, 12),
        -1.0,
        _at_most(-1.0),
        note=_KINDER,
    ),
    Rate("noisy_max", "ε", e.noisy_max_excess, (0.1, 0.2, 0.4, 0.8), (0.1, 0.4), -1.0, _near(-1.0)),
    Rate(
        "frank_wolfe_noisy, naive",
        "n",
        partial(e.frank_wolfe_excess, aggregation="naive"),
        _powers(12, 20),
        _powers(12, 15),
        -0.75,
        _near(-0.75),
    ),
    Rate(
        "frank_wolfe_noisy, tree",
        "n",
        _tree,
        _powers(12, 20),
        _powers(12, 15),
        -1.0,
        _near(-1.0),
        reason="the noise of a tree grows with ln n, which takes a tenth off the slope; next row",
    ),
    Rate(
        "frank_wolfe_noisy, tree, log",
        "n / ln n",
        _tree,
        _powers(12, 20),
        _powers(12, 15),
        -1.0,
        _near(-1.0),
        note="the same numbers; a prefix sums up to lg T nodes, each with noise of √lg T",
    ),
    Rate(
        "frank_wolfe_poly in d",
        "ln d",
        partial(_by_dimension, fn=e.hardest_l1_excess, n=4096, epsilon=2.0),
        (1e2, 1e3, 1e4, 1e5, 1e6),
        (1e2, 1e3, 1e4),
        1.0,
        _near(1.0),
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
        _near(-0.5),
        repeats=2,
        note="ln n on top",
    ),
    Rate(
        "frank_wolfe_tree",
        "n",
        _l1_tree,
        _powers(12, 18),
        _powers(12, 16),
        -2 / 3,
        _near(-2 / 3),
        reason="(ln² n / n)^⅔ is the rate, and the number of phases jumps with n; next row",
    ),
    Rate(
        "frank_wolfe_tree, log",
        "n / ln² n",
        _l1_tree,
        _powers(12, 18),
        _powers(12, 16),
        -2 / 3,
        _near(-2 / 3),
        note="the same numbers; without amplification by shuffling",
    ),
    Rate(
        "frank_wolfe_stationary",
        "n",
        e.stationary_gap,
        _powers(12, 17),
        _powers(12, 14),
        -1 / 3,
        _at_most(-1 / 3),
        note=_KINDER,
    ),
    Rate(
        "weakly_convex",
        "n",
        e.weakly_convex_gap,
        _powers(12, 16),
        _powers(12, 14),
        -1 / 3,
        _at_most(-1 / 3),
        note=_KINDER,
    ),
)
