"""Private convex and online learning: estimators, and the solvers behind them.

    PrivateLogisticRegression, PrivateSVC                      classes
    PrivateLinearRegression, PrivateHuberRegressor,            numbers
    PrivateQuantileRegressor, PrivatePoissonRegressor, PrivateGammaRegressor

    PrivateTreesClassifier, PrivateTreesRegressor              boosted trees, of whole tables
    PrivatePCA, PrivateScaler, PrivateOneHot                   components; scales; categories

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
from noshuffle.convex.one_hot import PrivateOneHot
from noshuffle.convex.pca import PrivatePCA
from noshuffle.convex.regress import PrivateLinearRegression
from noshuffle.convex.scaler import PrivateScaler
from noshuffle.convex.trees import PrivateTreesClassifier, PrivateTreesRegressor

__all__ = [
    "PrivateGammaRegressor",
    "PrivateHuberRegressor",
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivateOneHot",
    "PrivatePCA",
    "PrivatePoissonRegressor",
    "PrivateQuantileRegressor",
    "PrivateSVC",
    "PrivateScaler",
    "PrivateTreesClassifier",
    "PrivateTreesRegressor",
]
