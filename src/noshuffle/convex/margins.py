"""Losses of linear models with several margins, by what the engine asks: the residual of a row.

Margins are m = W x + b, and the gradient of a row's loss is the outer product

    ∇_W ℓ = r(m, y) ⊗ x,      ∇_b ℓ = r(m, y),      r = ∂ℓ/∂m,

so its norm is ‖r‖·√(‖x‖² + 1): a row is clipped without its gradient ever being built. Each loss
also names `lipschitz` (a bound on ‖r‖, infinite where there is none) and `curvature` (a bound on
∂r/∂m, or None where it is not smooth); learning rates come from these two.

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
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from noshuffle.convex import losses
from noshuffle.convex.arrays import Array, Targets


class MarginLoss(Protocol):
    """A convex function of the margins of one row."""

    @property
    def is_classifier(self) -> bool: ...
    def lipschitz(self, outputs: int) -> float: ...
    def curvature(self) -> float | None: ...
    def residual(self, margins: Array, y: Targets) -> Array: ...


@dataclass(frozen=True)
class PerMargin:
    """ℓ = Σ_k φ(m_k, s_k)."""

    phi: losses.Loss

    @property
    def is_classifier(self) -> bool:
        return self.phi.is_classifier

    def lipschitz(self, outputs: int) -> float:
        return self.phi.slope_bound * math.sqrt(outputs)

    def curvature(self) -> float | None:
        return self.phi.curvature_bound if self.phi.is_smooth else None

    def residual(self, margins: Array, y: Targets) -> Array:
        return np.asarray(self.phi.slope_fn(margins, self.targets(margins, y)))

    def targets(self, margins: Array, y: Targets) -> Array:
        """The number itself, or +1 for the class of a row and −1 for the others."""
        if not self.phi.is_classifier:
            return np.asarray(y[:, None], dtype=np.float64)
        if margins.shape[1] == 1:
            return np.asarray(2.0 * y[:, None] - 1.0)
        signs = np.full(margins.shape, -1.0)
        signs[np.arange(len(y)), y.astype(np.int64)] = 1.0
        return signs


@dataclass(frozen=True)
class Softmax:
    """ℓ = −log softmax(m)_y; ‖r‖ ≤ √2, and its Hessian is at most ½."""

    is_classifier: ClassVar[bool] = True

    def lipschitz(self, outputs: int) -> float:
        return math.sqrt(2.0)

    def curvature(self) -> float:
        return 0.5

    def residual(self, margins: Array, y: Targets) -> Array:
        out = np.asarray(softmax(margins, axis=1))
        out[np.arange(len(y)), y.astype(np.int64)] -= 1.0
        return out


def logistic_loss(classes: int) -> MarginLoss:
    """The loss of classes whose probabilities are `chances`."""
    return PerMargin(losses.logistic()) if classes == 2 else Softmax()


def chances(margins: Array) -> Array:
    """The probability of every class, one after another."""
    if margins.shape[1] > 1:
        return np.asarray(softmax(margins, axis=1))
    return np.hstack([1.0 - (positive := expit(margins)), positive])


def told(margins: Array) -> NDArray[Any]:
    """The class that margins tell, as its number."""
    return np.asarray(margins[:, 0] > 0 if margins.shape[1] == 1 else margins.argmax(axis=1))
