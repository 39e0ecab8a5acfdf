"""Private convex and online learning: estimators, and the solvers behind them.

    PrivateLogisticRegression, PrivateSVC                      classes
    PrivateLinearRegression, PrivateHuberRegressor,            numbers
    PrivateQuantileRegressor, PrivatePoissonRegressor, PrivateGammaRegressor

    PrivateScaler                                              scales and quantiles

follow scikit-learn: `fit` on a table, by the solver that suits it, `partial_fit` on a stream, one
pass, any order, every iterate private; `privacy_` holds the statement. `noshuffle.convex.solvers`
has the algorithms of the literature, each usable alone on a loss.
"""

from noshuffle.convex.classify import PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.generalized import (
    PrivateGammaRegressor,
    PrivateHuberRegressor,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
)
from noshuffle.convex.regress import PrivateLinearRegression
from noshuffle.convex.scaler import PrivateScaler

__all__ = [
    "PrivateGammaRegressor",
    "PrivateHuberRegressor",
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivatePoissonRegressor",
    "PrivateQuantileRegressor",
    "PrivateSVC",
    "PrivateScaler",
]
