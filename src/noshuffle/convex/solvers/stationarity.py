"""How far a point is from stationary: gradient norm, Frank–Wolfe gap, Moreau envelope.

    gradient_norm   ‖∇F(w)‖ in the dual norm             unconstrained, smooth
    frank_wolfe_gap max_{v∈K} ⟨∇F(w), w − v⟩             constrained, smooth; 0 at stationary points
    moreau_gradient β‖w − prox(w)‖,                      ϱ-weakly convex, β > ϱ, kinks allowed
                    prox(w) = argmin_{x∈K} F(x) + (β/2)‖x − w‖²

The last is the norm of the gradient of the Moreau envelope F_β (Davis, Drusvyatskiy 2019). Its
(β−ϱ)-strongly convex inner problem is solved by projected subgradient steps 2/((β−ϱ)(k+2)) averaged
with weights k, to O(G²/((β−ϱ)K)) in F (Lacoste-Julien et al. 2012). All of these read raw data:
diagnostics of an experiment, not private. No state.

>>> from noshuffle.convex.losses import squared
>>> from noshuffle.convex.solvers.domains import Ball
>>> x, y = np.eye(2), np.array([0.5, 0.0])
>>> float(frank_wolfe_gap(squared(radius=1.0), np.array([0.5, 0.0]), x, y, domain=Ball(1.0)))
0.0
"""

from __future__ import annotations

import numpy as np

from noshuffle.convex.arrays import Array
from noshuffle.convex.loss_record import Loss
from noshuffle.convex.solvers.domains import Domain
from noshuffle.errors import InvalidInput, Unsupported, positive, whole


def gradient_norm(loss: Loss, w: Array, rows: Array, labels: Array) -> float:
    """‖∇F(w)‖ in the norm in which the loss bounds its rows."""
    return loss.row_norm(_gradient(loss, w, rows, labels))


def frank_wolfe_gap(loss: Loss, w: Array, rows: Array, labels: Array, *, domain: Domain) -> float:
    """max_{v∈K} ⟨∇F(w), w − v⟩, never below 0 for w in K (but for rounding)."""
    g = _gradient(loss, w, rows, labels)
    return float(g @ (w - domain.lmo(g)))


def _gradient(loss: Loss, w: Array, rows: Array, labels: Array) -> Array:
    if not loss.is_smooth:
        raise Unsupported(f"{loss.name} has kinks; use moreau_gradient")
    return loss.gradient(w, rows, labels)


def proximal_point(
    loss: Loss,
    w: Array,
    rows: Array,
    labels: Array,
    *,
    domain: Domain,
    strength: float,
    steps: int = 400,
) -> Array:
    """prox(w): argmin_{x∈K} F(x) + (strength/2)‖x − w‖², to O(1/steps) in value."""
    positive(strength=strength)
    whole(steps=steps)
    convexity = strength - loss.weak_convexity
    if convexity <= 0:
        raise InvalidInput(
            f"strength must exceed the weak convexity {loss.weak_convexity:g}, got {strength:g}"
        )
    x, average, total = w, np.zeros_like(w), 0.0
    for k in range(steps):
        g = loss.gradient(x, rows, labels) + strength * (x - w)
        x = domain.project(x - 2 / (convexity * (k + 2)) * g)
        average, total = average + (k + 1) * x, total + k + 1
    return np.asarray(average / total)


def moreau_gradient(
    loss: Loss,
    w: Array,
    rows: Array,
    labels: Array,
    *,
    domain: Domain,
    strength: float | None = None,
    steps: int = 400,
) -> float:
    """‖∇F_β(w)‖ = β‖w − prox(w)‖ with β twice the weak convexity unless given."""
    beta = 2 * loss.weak_convexity if strength is None else strength
    prox = proximal_point(loss, w, rows, labels, domain=domain, strength=beta, steps=steps)
    return beta * float(np.linalg.norm(w - prox))
