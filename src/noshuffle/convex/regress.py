"""PrivateLinearRegression: least squares on a stream, by gradients or by private sums.

Targets are clamped to the given `target_bounds` and scaled to [−1, 1] inside; coefficients are told
in the units of the data. Beside the solvers of every estimator there is "sums":

    "ftrl"   clipped gradients of the squared loss (clipping makes it Huber's loss): any number of
             features, any penalty and constraint
    "sums"   private running sums of x̃x̃ᵀ and y x̃ and their exact solution (DP-FTRL-LS): far more
             accurate for few features, O(p²) noise; ridge penalty and ball only

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.uniform(-1, 1, size=(5000, 2)); y = x @ [1.0, -2.0] + 0.5
>>> model = PrivateLinearRegression(solver="sums", target_bounds=(-4, 4), bounds=(-1, 1),
...                                 clip_norm=2.0, mechanism="tree", test_seed=0).fit(x, y)
>>> bool(model.score(x, y) > 0.95)
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from sklearn.base import RegressorMixin

from noshuffle.convex.arrays import Array
from noshuffle.convex.base import PrivateLinearModel
from noshuffle.convex.losses import Loss, huber, squared
from noshuffle.convex.margins import MarginLoss, PerMargin
from noshuffle.convex.progress import Accuracy, RSquared
from noshuffle.convex.rule import Rule
from noshuffle.convex.shape import constraint_of
from noshuffle.convex.sums_rule import SumsRule
from noshuffle.convex.targets import NumberTargets
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim.constraints import L2Ball


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(NumberTargets, RegressorMixin, PrivateLinearModel):  # type: ignore[misc]
    """Targets and predictions of all regressions. See `PrivateLinearModel` for more parameters.

    Parameters
    ----------
    target_bounds : (low, high) of y, known beforehand; y is clamped to it.
    """

    radius: float = 2.0  # targets and features are of order one inside, so weights are too
    target_bounds: tuple[float, float] = (-1.0, 1.0)

    _RATE: ClassVar[float | None] = None
    _SCORE: ClassVar[type[Accuracy] | type[RSquared]] = RSquared

    def _in_data_units(self, weights: Array) -> tuple[Array, Any]:
        low, high = self._limits()
        coef, intercept = self._original_coordinates(weights)
        return coef[0] * (high - low) / 2, float(self._link(intercept)[0])

    def _link(self, margins: Array) -> Array:
        return self._told(margins)

    def predict(self, X: Any) -> Array:
        """The expected target of every row, inside the target bounds."""
        return np.asarray(np.clip(self._link(self._margins(X)[:, 0]), *self._limits()))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearRegression(PrivateRegressor):
    """Linear regression. See `PrivateRegressor` for the other parameters.

    Parameters
    ----------
    solver : "sums", too: private sums of x̃x̃ᵀ and y x̃ and their solution.
    tau : "sums" only: weight of y x̃ beside x̃x̃ᵀ in what is clipped and noised together.
    """

    tau: float = 1.0

    _SOLVERS: ClassVar[tuple[str, ...]] = (*PrivateLinearModel._SOLVERS, "sums")

    def _record(self, **bounds: Any) -> Loss:
        return huber(**bounds)

    def _loss(self, classes: int) -> MarginLoss:
        return PerMargin(squared(radius=np.inf))  # clipping turns it into Huber's loss

    def _rule(self, features: int, classes: int) -> Rule:
        if self.solver_ != "sums":
            return super()._rule(features, classes)
        if self.penalty not in (None, "l2"):
            raise Unsupported(f"solver='sums' has penalty None or 'l2', got {self.penalty!r}")
        ball = constraint_of(self.constraint, radius=self.radius)
        if ball is not None and not isinstance(ball, L2Ball):
            raise Unsupported(f"solver='sums' has constraint None or 'ball', got {ball!r}")
        return SumsRule(
            features=features,
            clip_norm=self._clip_of_sums(),
            tau=self.tau,
            alpha=self.alpha if self.penalty == "l2" else 0.0,
            radius=np.inf if ball is None else ball.radius,
            fit_intercept=self.fit_intercept,
            most_weight=self._most_weight,
            watch=self._watch,
        )

    def _clip_of_sums(self) -> float:
        if self.clip_norm is not None:
            return float(self.clip_norm) * self._most_weight
        if self.feature_bound is None:
            raise InvalidInput("clip_norm=None needs a feature_bound; give one of the two")
        squared = self.feature_bound**2 + float(self.fit_intercept)
        return float(np.sqrt(squared**2 + self.tau**2 * squared)) * self._most_weight
