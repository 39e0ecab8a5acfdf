"""Generalised linear models: Huber, quantile, Poisson and gamma regression.

    PrivateHuberRegressor      mean of y, residuals beyond `width` count linearly
    PrivateQuantileRegressor   the `quantile` of y given x
    PrivatePoissonRegressor    counts and rates:   E y = e^{⟨x, w⟩ + b},  y ≥ 0
    PrivateGammaRegressor      positive amounts:   E y = e^{⟨x, w⟩ + b},  y > 0

Each is a loss of `losses` in the same fits as every estimator: "gd" and "ftrl" clip gradients (a
clipped gradient of a linear model is that of another convex loss), "objective" takes Huber and
Poisson, whose slopes are bounded and smooth without that. Targets are clamped to `target_bounds`;
predictions are in their units. Those with a logarithm are scaled to [0, 1] by the larger bound.
"gd" finds in private where the targets lie, begins with their mean or quantile, and descends in
units in which they are of order one (`target_rule`). Clipping leaves out part of residuals beyond
clip_norm/‖(x', 1)‖, about a third of that unit; a skewed y, or one with outliers, is then predicted
below its mean. Of models of log y the last readings tell by how much, and the intercept makes up
for it where the noise lets it be seen (`calibration`); a larger clip_norm trades the rest for
noise.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.uniform(-1, 1, size=(5000, 2)); y = rng.poisson(np.exp(1 + x[:, 0]))
>>> model = PrivatePoissonRegressor(target_bounds=(0, 20), bounds=(-1, 1), test_seed=0).fit(x, y)
>>> bool(abs(model.coef_[0] - 1) < 0.2), bool(abs(model.intercept_ - 1) < 0.2)
(True, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from noshuffle.convex import losses
from noshuffle.convex.arrays import Array, Targets, real_targets
from noshuffle.convex.margins import MarginLoss, PerMargin
from noshuffle.convex.progress import Accuracy, RSquared
from noshuffle.convex.regress import PrivateRegressor
from noshuffle.convex.target_units import LEAST_SLOPE
from noshuffle.errors import InvalidInput, positive


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateHuberRegressor(PrivateRegressor):
    """Robust regression: residuals beyond `width` (in units of y) count linearly.

    Where the width is under an eighth of the target bounds, gradients of "gd" and "ftrl" are of the
    loss times a constant, so that the noise, which is for gradients of the clip norm, does not hide
    them; `alpha` weighs against that loss.
    """

    width: float = 0.25

    def _record(self, **bounds: Any) -> losses.Loss:
        positive(width=self.width)
        low, high = self._limits()
        return losses.huber(width=2.0 * self.width / (high - low), **bounds)

    def _loss(self, classes: int) -> MarginLoss:
        return PerMargin(self._record(least_slope=LEAST_SLOPE))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateQuantileRegressor(PrivateRegressor):
    """The `quantile` of y given x, by the pinball loss, whose slopes are not to be clipped."""

    quantile: float = 0.5
    clip_norm: float | None = 4.0

    _STEP: ClassVar[float] = 0.2  # its slopes do not shrink towards the answer
    _SOLVERS: ClassVar[tuple[str, ...]] = ("auto", "ftrl", "gd")

    def _loss(self, classes: int) -> MarginLoss:
        return PerMargin(losses.quantile(level=self.quantile))

    def _start_level(self) -> float | None:
        return self.quantile


class LogRSquared(RSquared):
    """`RSquared` of models of log y."""

    def __call__(self, margins: Array, y: Targets) -> None:
        super().__call__(np.exp(np.minimum(margins, 0.0)), y)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLogRegressor(PrivateRegressor):
    """What models of log y share: targets in units of the larger bound, predictions e^s of it."""

    target_bounds: tuple[float, float] = (0.0, 1.0)

    _IS_LOG: ClassVar[bool] = True
    _SCORE: ClassVar[type[Accuracy] | type[RSquared]] = LogRSquared
    #: The lower bound is above zero.
    _IS_POSITIVE: ClassVar[bool] = False

    def _limits(self) -> tuple[float, float]:
        low, high = super()._limits()
        if low < 0 or (self._IS_POSITIVE and low == 0):
            least = "> 0" if self._IS_POSITIVE else ">= 0"
            raise InvalidInput(f"target_bounds must be {least} here, got {self.target_bounds!r}")
        return low, high

    def _lowest_target(self) -> float:
        low, high = self._limits()
        return low / high

    def _targets(self, y: Any) -> Array:
        self._fitted_limits = low, high = self._limits()
        return np.asarray(np.clip(real_targets(y), low, high) / high)

    def _in_data_units(self, weights: Array) -> tuple[Array, Any]:
        coef, intercept = self._original_coordinates(weights)
        return coef[0], float(intercept[0] + math.log(self._limits()[1]))

    def _link(self, margins: Array) -> Array:
        return np.asarray(self._limits()[1] * np.exp(np.minimum(margins, 0.0)))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivatePoissonRegressor(PrivateLogRegressor):
    """Counts or rates: y ≥ 0, log E y linear in x."""

    _SOLVERS: ClassVar[tuple[str, ...]] = ("auto", "ftrl", "gd", "objective")

    def _record(self, **bounds: Any) -> losses.Loss:
        return losses.poisson(**bounds)

    def _loss(self, classes: int) -> MarginLoss:
        return PerMargin(losses.poisson())


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateGammaRegressor(PrivateLogRegressor):
    """Positive amounts whose spread grows with their mean: y > 0, log E y linear in x."""

    target_bounds: tuple[float, float] = (0.01, 1.0)

    _IS_POSITIVE: ClassVar[bool] = True
    _SOLVERS: ClassVar[tuple[str, ...]] = ("auto", "ftrl", "gd")

    def _loss(self, classes: int) -> MarginLoss:
        low, high = self._limits()
        # A curvature that the smallest label alone can reach says nothing of a learning rate.
        return PerMargin(replace(losses.gamma(least=low / high), curvature_bound=math.inf))
