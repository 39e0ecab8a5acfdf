"""Private convex and online learning: estimators, and the solvers behind them.

    PrivateLogisticRegression, PrivateSVC, PrivateLinearRegression

follow scikit-learn: `fit` on a table, by the solver that suits it, `partial_fit` on a stream, one
pass, any order, every iterate private; `privacy_` holds the statement. `noshuffle.convex.solvers`
has the algorithms of the literature, each usable alone on a loss.
"""

from noshuffle.convex.classify import PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.regress import PrivateLinearRegression

__all__ = ["PrivateLinearRegression", "PrivateLogisticRegression", "PrivateSVC"]
