"""Losses of linear models with several margins, by what the engine asks: the residual of a row.

A linear model has margins m = W x + b, and the gradient of a row's loss is the outer product

    ∇_W ℓ = r(m, y) ⊗ x,      ∇_b ℓ = r(m, y),      r = ∂ℓ/∂m,

so its norm is ‖r‖·√(‖x‖² + 1): a row is clipped without its gradient ever being built. Each loss
also names `lipschitz` (a bound on ‖r‖) and `curvature` (a bound on ∂r/∂m, or None where it is not
smooth); learning rates come from these two.

    PerMargin   a loss φ of `losses` on every margin: one against the rest, targets s = ±1 (two
                classes have one margin), or the number y of a regression: r_k = φ'(m_k, s_k)
    Softmax     K margins together, y ∈ {0 … K−1}: r = softmax(m) − e_y

>>> PerMargin(losses.logistic()).residual(np.zeros((2, 1)), np.array([0, 1])).ravel()
array([ 0.5, -0.5])
>>> PerMargin(losses.smoothed_hinge()).residual(np.array([[1.0]]), np.array([1])).ravel()
array([-0.5])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax, softmax

from noshuffle.convex import losses
from noshuffle.convex.arrays import Array, Targets


class MarginLoss:
    """A convex function of the margins of one row."""

    def outputs(self, classes: int) -> int:
        """How many margins a problem with so many classes has (0 classes: regression)."""
        return 1 if classes <= 2 else classes

    def lipschitz(self, outputs: int) -> float:
        """A bound on ‖r‖ over all margins and targets; infinite where there is none."""
        raise NotImplementedError

    def curvature(self) -> float | None:
        """A bound on the second derivative along any margin, None for a loss with kinks."""
        raise NotImplementedError

    def residual(self, margins: Array, y: Targets) -> Array:
        """r for every row, in the shape of the margins."""
        raise NotImplementedError

    def value(self, margins: Array, y: Targets) -> Array:
        """The loss of every row."""
        raise NotImplementedError


@dataclass(frozen=True)
class PerMargin(MarginLoss):
    """ℓ = Σ_k φ(m_k, s_k)."""

    phi: losses.Loss

    def lipschitz(self, outputs: int) -> float:
        return self.phi.slope_bound * math.sqrt(outputs)

    def curvature(self) -> float | None:
        return self.phi.curvature_bound if self.phi.is_smooth else None

    def residual(self, margins: Array, y: Targets) -> Array:
        return np.asarray(self.phi.slope_fn(margins, self._targets(margins, y)))

    def value(self, margins: Array, y: Targets) -> Array:
        return np.asarray(self.phi.value_fn(margins, self._targets(margins, y)).sum(1))

    def _targets(self, margins: Array, y: Targets) -> Array:
        """The number itself, or +1 for the class of a row and −1 for the others."""
        if not self.phi.is_classifier:
            return np.asarray(y[:, None], dtype=np.float64)
        if margins.shape[1] == 1:
            return np.asarray(2.0 * y[:, None] - 1.0)
        signs = np.full(margins.shape, -1.0)
        signs[np.arange(len(y)), y.astype(np.int64)] = 1.0
        return signs


@dataclass(frozen=True)
class Softmax(MarginLoss):
    """ℓ = −log softmax(m)_y; ‖r‖ ≤ √2, and its Hessian is at most ½."""

    def lipschitz(self, outputs: int) -> float:
        return math.sqrt(2.0)

    def curvature(self) -> float:
        return 0.5

    def residual(self, margins: Array, y: Targets) -> Array:
        out = np.asarray(softmax(margins, axis=1))
        out[np.arange(len(y)), y.astype(np.int64)] -= 1.0
        return out

    def value(self, margins: Array, y: Targets) -> Array:
        rows = np.arange(len(y))
        return np.asarray(-log_softmax(margins, axis=1)[rows, y.astype(np.int64)])
