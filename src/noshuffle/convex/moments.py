"""Second moments of rows as one vector, and the least squares problem that they make.

    m(x, y) = (svec(x xᵀ), τ y x),     svec: upper triangle, off-diagonals times √2

so that the Euclidean norm of svec(M) is the Frobenius norm of M and one noise covers both sums
(Kairouz et al. 2021, section 4.2, arXiv 2103.00039). Noise of standard deviation s per entry is,
unpacked, a symmetric matrix N with deviation s on the diagonal and s/√2 off it: ‖N‖_op ≈ s√(2d)
(`noise_norm`), the ridge that keeps the noisy problem convex. No state.

>>> gram, cross = unpack(moments(np.array([[1.0, 2.0]]), np.array([3.0]), ratio=0.5), 2, ratio=0.5)
>>> gram.tolist(), cross.tolist()
([[1.0, 2.0], [2.0, 4.0]], [3.0, 6.0])
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from noshuffle.convex.arrays import Array, Targets


def pack(square: Array) -> Array:
    """svec of a symmetric matrix."""
    upper = np.triu_indices(len(square))
    return np.asarray(square[upper] * _stretch(upper))


def moments(rows: Array, labels: Targets, *, ratio: float, weights: Array | float = 1.0) -> Array:
    """Sum over rows of weight·(svec(x xᵀ), τ y x), τ = ratio."""
    weighted = rows * np.reshape(weights, (-1, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        gram = pack(weighted.T @ rows)
    return np.concatenate([gram, ratio * (weighted.T @ labels)])


def unpack(vector: Array, d: int, *, ratio: float) -> tuple[Array, Array]:
    """The symmetric matrix and the vector that `moments` packed."""
    half, upper, out = d * (d + 1) // 2, np.triu_indices(d), np.zeros((d, d))
    out[upper] = vector[:half] / _stretch(upper)
    return np.asarray(out + np.triu(out, 1).T), vector[half:] / ratio


def _stretch(upper: tuple[Any, ...]) -> Array:
    return np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))


def noise_norm(deviation: float, d: int) -> float:
    """Expected operator norm of the unpacked noise."""
    return deviation * math.sqrt(2.0 * d)


def ball_least_squares(
    gram: Array,
    cross: Array,
    *,
    radius: float = math.inf,
    ridge: float,
    least_curvature: float = -math.inf,
) -> Array:
    """argmin_{‖w‖≤R} wᵀ(gram)w − 2⟨cross, w⟩ + ridge‖w‖², also where gram is indefinite.

    In the eigenbasis w(ν) = c/(e + ν), ν ≥ max(0, −e_min), and ‖w(ν)‖ falls in ν (secular
    equation): bisection for ‖w(ν)‖ = R unless ν = 0 is feasible. The case c ⊥ lowest eigenvector
    has probability zero under noise; bisection then ends at the pole, inside the ball. Without a
    radius `least_curvature` must be positive: eigenvalues of gram + ridge below it are raised.
    """
    values, basis = np.linalg.eigh(gram)
    values = np.maximum(values + ridge, least_curvature)
    c = basis.T @ cross
    size = float(np.linalg.norm(c))
    if size == 0:
        return np.zeros(len(c))
    if float(values[0]) > 0 and float(np.linalg.norm(c / values)) <= radius:
        return np.asarray(basis @ (c / values))
    low = max(0.0, -float(values[0]))
    floor = 1e-14 * max(float(np.abs(values).max()), size / radius)
    high = low + size / radius + floor
    for _ in range(100):
        middle = (low + high) / 2
        if float(np.linalg.norm(c / np.maximum(values + middle, floor))) > radius:
            low = middle
        else:
            high = middle
    return np.asarray(basis @ (c / np.maximum(values + high, floor)))
