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
A rate that is known to miss has its reason here, so that the table can print it; the verdict itself
is computed (`rates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noshuffle.convex import solvers
from noshuffle.convex.solvers import experiments as e

#: What the fitted line is drawn against: the parameter that varies, and a function of it.
AXES: dict[str, tuple[str, Callable[[float], float]]] = {
    "n": ("n", float),
    "d": ("d", float),
    "ε": ("epsilon", float),
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
    "dp_svrg": "snapshots and steps share one budget, and the number of snapshots grows with n",
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
    repeats: int = 3
    is_bound: bool = False
    asked: tuple[float, float] | None = None

    @property
    def accepted(self) -> tuple[float, float]:
        """The interval that was asked for, theory ± 0.1, or at most theory + 0.1."""
        low = -math.inf if self.is_bound else self.theory - 0.1
        return self.asked or (low, self.theory + 0.1)

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


_LS = (-1.05, -0.8)
_NAIVE, _TREE, _LS_20 = {"aggregation": "naive"}, {"aggregation": "tree"}, {"d": 20}
_IN_D, _L1_TREE = {"n": 4096, "epsilon": 2.0}, {"d": 100, "solver": "tree", "epsilon": 2.0}
_NS, _DS, _ES = _powers(12, 20), (1e2, 1e3, 1e4, 1e5, 1e6), (1 / 32, 1 / 16, 1 / 8, 1 / 4)

RATES: tuple[Rate, ...] = (
    Rate("ftrl", e.ftrl_excess, _powers(11, 16), 3, -0.5),
    Rate("ftrl (hinge)", e.hinge_regret, _powers(11, 16), 3, -0.5),
    Rate("ftrl in d", e.ftrl_excess, (4, 16, 64, 256), 3, 0.25, "d", {"n": 8192}),
    Rate("ftrl in ε", e.ftrl_excess, _ES, 4, -0.5, "ε", {"n": 8192}),
    Rate("ftrl_ls, 5 features", e.least_squares_regret, _NS[:6], 3, -1.0, asked=_LS),
    Rate("ftrl_ls, 20 features", e.least_squares_regret, _NS[:6], 3, -1.0, "n", _LS_20, asked=_LS),
    _travel("dp_gd", _powers(9, 12)),
    _travel("dp_sgd", _powers(9, 12)),
    _travel("dp_svrg", _powers(9, 12), 2, repeats=2),
    _travel("phased_sgd", _powers(10, 14)),
    _travel("phased_mirror_descent", _powers(9, 13), is_bound=True),
    _travel("accelerated_srgd", _powers(9, 13), is_bound=True),
    Rate("output_perturbation", e.output_excess, _NS[:6], 4, -0.5, is_bound=True),
    Rate("objective_perturbation", e.objective_excess, _powers(9, 14), 4, -1.0, is_bound=True),
    Rate("noisy_max", e.noisy_max_excess, (0.1, 0.2, 0.4, 0.8), 4, -1.0, "ε"),
    Rate("frank_wolfe_noisy, naive", e.frank_wolfe_excess, _NS, 4, -0.75, "n", _NAIVE),
    Rate("frank_wolfe_noisy, tree", e.frank_wolfe_excess, _NS, 4, -1.0, "n", _TREE),
    Rate("frank_wolfe_noisy, tree, log", e.frank_wolfe_excess, _NS, 4, -1.0, "n / ln n", _TREE),
    Rate("frank_wolfe_poly in d", e.hardest_l1_excess, _DS, 3, 1.0, "ln d", _IN_D, repeats=2),
    Rate("frank_wolfe_poly", e.single_row_excess, _powers(9, 14), 3, -0.5, repeats=2),
    Rate("frank_wolfe_tree", e.hardest_l1_excess, _NS[:7], 5, -2 / 3, "n", _L1_TREE),
    Rate("frank_wolfe_tree, log", e.hardest_l1_excess, _NS[:7], 5, -2 / 3, "n / ln² n", _L1_TREE),
    Rate("frank_wolfe_stationary", e.stationary_gap, _NS[:6], 3, -1 / 3, is_bound=True),
    Rate("weakly_convex", e.weakly_convex_gap, _NS[:5], 3, -1 / 3, is_bound=True),
)
