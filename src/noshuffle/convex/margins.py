"""Losses of linear models, told by what the engine asks of them: the residual of every row.

A linear model has margins m = W x + b, and the gradient of a row's loss is the outer product

    ∇_W ℓ = r(m, y) ⊗ x,      ∇_b ℓ = r(m, y),      r = ∂ℓ/∂m,

so its norm is ‖r‖·√(‖x‖² + 1): a row is clipped without its gradient ever being built. Each loss
also names `lipschitz` (a bound on ‖r‖) and `curvature` (a bound on ∂r/∂m, or None where it is not
smooth); learning rates come from these two.

    Logistic      one margin, y ∈ {0, 1}          r = σ(m) − y
    Softmax       K margins, y ∈ {0 … K−1}        r = softmax(m) − e_y
    Hinge         K margins, one against the rest r_k = −s_k [s_k m_k < 1],      s = ±1
    SmoothHinge   its Huber form, width h          quadratic for s m between 1 − h and 1 + h
    Squared       one margin, y a number          r = m − y, which clipping turns into Huber's loss

>>> import numpy as np
>>> Logistic().residual(np.zeros((2, 1)), np.array([0, 1])).ravel()
array([ 0.5, -0.5])
>>> SmoothHinge(width=0.5).residual(np.array([[1.0]]), np.array([1])).ravel()
array([-0.5])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_softmax, softmax

from noshuffle.errors import positive

Array = NDArray[np.float64]
Targets = NDArray[np.int64] | Array


class Loss:
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
class Logistic(Loss):
    """ℓ = log(1 + e^{−s m}) with s = 2y − 1."""

    def lipschitz(self, outputs: int) -> float:
        return 1.0

    def curvature(self) -> float:
        return 0.25

    def residual(self, margins: Array, y: Targets) -> Array:
        return np.asarray(expit(margins) - y[:, None])

    def value(self, margins: Array, y: Targets) -> Array:
        return np.asarray(np.logaddexp(0.0, -_signs(margins, y) * margins).sum(1))


@dataclass(frozen=True)
class Softmax(Loss):
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


@dataclass(frozen=True)
class Hinge(Loss):
    """ℓ = Σ_k (1 − s_k m_k)₊, one class against the rest."""

    def lipschitz(self, outputs: int) -> float:
        return math.sqrt(outputs)

    def curvature(self) -> None:
        return None

    def residual(self, margins: Array, y: Targets) -> Array:
        signs = _signs(margins, y)
        return np.asarray(np.where(signs * margins < 1.0, -signs, 0.0))

    def value(self, margins: Array, y: Targets) -> Array:
        return np.asarray(np.maximum(1.0 - _signs(margins, y) * margins, 0.0).sum(1))


@dataclass(frozen=True)
class SmoothHinge(Loss):
    """The hinge with its kink rounded: (1 + h − u)²/4h for |u − 1| ≤ h, with u = s m."""

    width: float = 0.5

    def __post_init__(self) -> None:
        positive(width=self.width)

    def lipschitz(self, outputs: int) -> float:
        return math.sqrt(outputs)

    def curvature(self) -> float:
        return 1.0 / (2.0 * self.width)

    def residual(self, margins: Array, y: Targets) -> Array:
        signs = _signs(margins, y)
        slope = np.clip((1.0 + self.width - signs * margins) / (2.0 * self.width), 0.0, 1.0)
        return np.asarray(-signs * slope)

    def value(self, margins: Array, y: Targets) -> Array:
        u, h = _signs(margins, y) * margins, self.width
        bend = (1.0 + h - u) ** 2 / (4.0 * h)
        return np.asarray(np.where(u > 1 + h, 0.0, np.where(u < 1 - h, 1.0 - u, bend)).sum(1))


@dataclass(frozen=True)
class Squared(Loss):
    """ℓ = ½(m − y)²; its residual is bounded by clipping alone."""

    def lipschitz(self, outputs: int) -> float:
        return math.inf

    def curvature(self) -> float:
        return 1.0

    def residual(self, margins: Array, y: Targets) -> Array:
        return np.asarray(margins - y[:, None])

    def value(self, margins: Array, y: Targets) -> Array:
        return np.asarray(0.5 * np.square(margins[:, 0] - y))


def _signs(margins: Array, y: Targets) -> Array:
    """+1 for the class of a row and −1 for the others; with one margin, for y = 1 and y = 0."""
    if margins.shape[1] == 1:
        return np.asarray(2.0 * y[:, None] - 1.0)
    signs = np.full(margins.shape, -1.0)
    signs[np.arange(len(y)), y.astype(np.int64)] = 1.0
    return signs
