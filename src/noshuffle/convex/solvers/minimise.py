"""Exact minimisers of regularised empirical risk, certified by their gradient norm.

    J(w) = (1/n) Σ φ(⟨x_i, w⟩, y_i) + (ridge/2)‖w‖² + ⟨tilt, w⟩,        ridge > 0

Damped Newton: w ← w − s·H⁻¹∇J, s ≤ 1 bisected by the sign of the slope of J along the step (values
of J are too coarse near the end, and at kinks of φ' full steps may go in a circle). J is
ridge-strongly convex, so a point with ‖∇J‖ ≤ γ is within γ/ridge of the minimiser: the certificate
that output and objective perturbation rest on. Not private by itself. No state.

>>> from noshuffle.convex.losses import squared
>>> x, y = np.eye(2), np.array([1.0, -1.0])
>>> minimise(squared(radius=9.0), x, y, ridge=0.5).weights
array([ 0.5, -0.5])
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.errors import Unsupported, positive

#: Newton needs few steps; more mean that the loss is not what it says.
_MOST_STEPS = 200


class Minimiser(NamedTuple):
    """The weights, and the gradient norm that certifies them."""

    weights: Array
    gradient_norm: float


def minimise(
    loss: Loss,
    rows: Array,
    labels: Array,
    *,
    ridge: float,
    tilt: Array | None = None,
    tolerance: float = 1e-10,
) -> Minimiser:
    """The minimiser of J to ‖∇J‖ ≤ tolerance (the loss's own ridge comes on top of `ridge`).

    Guarantees: the returned gradient norm was evaluated at the returned weights and is at most
    the tolerance; a loss with kinks is refused, and so is a search that does not get there.
    """
    positive(ridge=ridge, tolerance=tolerance)
    if not loss.is_smooth or not loss.is_convex:
        raise Unsupported(f"Newton's method needs a smooth convex loss, got {loss.name}")
    n, d = rows.shape
    total = ridge + loss.ridge
    b = np.zeros(d) if tilt is None else tilt
    w = np.zeros(d)

    def gradient(v: Array) -> Array:
        return np.asarray(loss.data_gradient(v, rows, labels) / n + total * v + b)

    g = gradient(w)
    for _ in range(_MOST_STEPS):
        norm = float(np.linalg.norm(g))
        if norm <= tolerance:
            return Minimiser(w, norm)
        weights = loss.curvatures(w, rows, labels) / n
        hessian = (rows * weights[:, None]).T @ rows + total * np.eye(d)
        step = cho_solve(cho_factor(hessian), g)
        slope, low, high, size = float(g @ step), 0.0, 1.0, 1.0
        while True:
            new = w - size * step
            g = gradient(new)
            along = float(g @ step)  # J falls further behind `new` where it is above zero
            is_short = size == 1.0 and along > 0
            if is_short or abs(along) <= 0.1 * slope or float(np.linalg.norm(g)) <= 0.5 * norm:
                break
            low, high = (size, high) if along > 0 else (low, size)
            if size == (size := (low + high) / 2):
                break
        w = new
    raise Unsupported(
        f"a gradient norm of {tolerance:g} was not reached in {_MOST_STEPS} Newton steps; allow a "
        "larger tolerance (what was reached is a fact about the data, and is not told)"
    )
