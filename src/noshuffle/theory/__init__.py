"""What theory promises for given n, d, ε, δ, β, L, R: numbers with their conditions.

base    Sizes, Bound; regret (or excess risk, of fresh rows) as a measured quantity
ftrl    Theorems 3.1, 4.1, 4.3, Corollary 4.2 and Table 1 of Kairouz et al. 2021, and bounds for
        DP-FTRL and unamplified DP-SGD with constants proved here
l_p     excess risk in l_p, convex and not
"""

from noshuffle.theory.base import Bound, Sizes, regret
from noshuffle.theory.ftrl import (
    best_batch,
    corollary_4_2,
    ftrl_regret,
    ftrl_risk,
    sgd_regret,
    table_1,
    theorem_4_1,
    theorem_4_3,
    tree_noise,
    tree_spread,
)

__all__ = [
    "Bound",
    "Sizes",
    "best_batch",
    "corollary_4_2",
    "ftrl_regret",
    "ftrl_risk",
    "regret",
    "sgd_regret",
    "table_1",
    "theorem_4_1",
    "theorem_4_3",
    "tree_noise",
    "tree_spread",
]
