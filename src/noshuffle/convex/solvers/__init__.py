"""Solvers of private convex (and some nonconvex) optimization on a loss object, one file each.

    online          ftrl (regret, online to batch), ftrl_ls (least squares)
    gradient        dp_gd, dp_sgd, dp_svrg
    perturbation    output_perturbation, objective_perturbation
    selection       noisy_max; noise for l_p in `generalized_gaussian`
    Frank–Wolfe     frank_wolfe_full, frank_wolfe_noisy, frank_wolfe_poly, frank_wolfe_tree
    localisation    phased_sgd, phased_mirror_descent
    one epoch       accelerated_srgd
    nonconvex       frank_wolfe_stationary, weakly_convex; measures in `stationarity`

Each takes (loss, rows, labels, *, epsilon, delta, …), returns a `Solution` with its weights and its
PrivacyStatement, and refuses losses that miss the conditions of its proof. A few names are those of
their modules too; import modules as `from noshuffle.convex.solvers.ftrl import regret`.
"""

from noshuffle.convex.solvers.accelerated_srgd import accelerated_srgd
from noshuffle.convex.solvers.base import Solution
from noshuffle.convex.solvers.dp_gd import dp_gd
from noshuffle.convex.solvers.dp_sgd import dp_sgd
from noshuffle.convex.solvers.dp_svrg import dp_svrg
from noshuffle.convex.solvers.frank_wolfe_full import frank_wolfe_full
from noshuffle.convex.solvers.frank_wolfe_noisy import frank_wolfe_noisy
from noshuffle.convex.solvers.frank_wolfe_poly import frank_wolfe_poly
from noshuffle.convex.solvers.frank_wolfe_stationary import frank_wolfe_stationary
from noshuffle.convex.solvers.frank_wolfe_tree import frank_wolfe_tree
from noshuffle.convex.solvers.ftrl import ftrl
from noshuffle.convex.solvers.ftrl_ls import ftrl_ls
from noshuffle.convex.solvers.noisy_max import noisy_max
from noshuffle.convex.solvers.objective_perturbation import objective_perturbation
from noshuffle.convex.solvers.output_perturbation import output_perturbation
from noshuffle.convex.solvers.phased import phased_mirror_descent, phased_sgd
from noshuffle.convex.solvers.weakly_convex import weakly_convex

__all__ = [
    "Solution",
    "accelerated_srgd",
    "dp_gd",
    "dp_sgd",
    "dp_svrg",
    "frank_wolfe_full",
    "frank_wolfe_noisy",
    "frank_wolfe_poly",
    "frank_wolfe_stationary",
    "frank_wolfe_tree",
    "ftrl",
    "ftrl_ls",
    "noisy_max",
    "objective_perturbation",
    "output_perturbation",
    "phased_mirror_descent",
    "phased_sgd",
    "weakly_convex",
]
